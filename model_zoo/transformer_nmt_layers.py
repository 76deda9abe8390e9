"""Layers of Transformers that translate: embedding, encoder and decoder.

Source: Vaswani et al., "Attention Is All You Need", 2017,
https://arxiv.org/abs/1706.03762, with layer normalisation before each part,
not after.
"""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="model_zoo")
class SharedEmbedding(keras.layers.ReversibleEmbedding):
    """Embeds tokens and, in reverse, turns vectors into logits of tokens.

    Embedded tokens carry a Keras mask of the padding, and logits the mask of
    the vectors that they are computed from.

    Args:
        input_dim: Positive integer, the number of tokens.
        output_dim: Positive integer, size of a vector.
        mask_zero: Boolean, whether token 0 is padding. Defaults to `True`.
        logit_clip: Positive float, the largest magnitude of a logit: logits
            beyond it are set to it, and have no gradient. `None` for no limit.
            Defaults to `None`.
        **kwargs: Arguments of `keras.layers.ReversibleEmbedding`.

    Call arguments:
        inputs: Tokens of shape `(batch_size, length)`, or with `reverse=True`
            vectors of shape `(batch_size, length, output_dim)`.
        reverse: Boolean, whether to return logits. Defaults to `False`.

    Example:

    ```python
    embedding = SharedEmbedding(100, 16, logit_clip=30.0)
    x = embedding(keras.ops.array([[5, 7, 0]]))
    embedding(x, reverse=True).shape  # (1, 3, 100)
    ```
    """

    def __init__(
        self, input_dim, output_dim, mask_zero=True, logit_clip=None, **kwargs
    ):
        if logit_clip is not None and not logit_clip > 0:
            raise ValueError(
                "`logit_clip` must be positive or `None`. Received: "
                f"logit_clip={logit_clip}"
            )
        super().__init__(input_dim, output_dim, mask_zero=mask_zero, **kwargs)
        self.logit_clip = logit_clip
        if self.reverse_dtype is None:
            # Keras would multiply in the dtype of the variable.
            self.reverse_dtype = self.compute_dtype

    def call(self, inputs, reverse=False):
        outputs = super().call(inputs, reverse=reverse)
        if reverse and self.logit_clip is not None:
            outputs = ops.clip(outputs, -self.logit_clip, self.logit_clip)
        return outputs

    def compute_mask(self, inputs, mask=None):
        # The logits get the mask of the vectors, which Keras would drop. The
        # mask of embedded tokens is set by Keras in `call`.
        return mask

    def get_config(self):
        return {**super().get_config(), "logit_clip": self.logit_clip}


class _TransformerBlock(keras.layers.Layer):
    """Base of encoder and decoder blocks: hyper-parameters and inner layers."""

    def __init__(
        self,
        num_heads,
        head_size,
        ffn_dim,
        dropout=0.0,
        attention_dropout=0.0,
        ffn_init_scale=1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = num_heads
        self.head_size = head_size
        self.ffn_dim = ffn_dim
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.ffn_init_scale = ffn_init_scale
        self.inner = self._dense(ffn_dim, "relu", "inner")

    def _attention(self, name):
        return keras.layers.MultiHeadAttention(
            self.num_heads,
            self.head_size,
            dropout=self.attention_dropout,
            dtype=self.dtype_policy,
            name=name,
        )

    def _dense(self, units, activation, name):
        # This is Glorot uniform if the scale, which is the variance's, is 1.
        initializer = keras.initializers.VarianceScaling(
            self.ffn_init_scale**2, mode="fan_avg", distribution="uniform"
        )
        return keras.layers.Dense(
            units,
            activation,
            kernel_initializer=initializer,
            dtype=self.dtype_policy,
            name=name,
        )

    def _drop(self, name):
        return keras.layers.Dropout(
            self.dropout, dtype=self.dtype_policy, name=name
        )

    def _norm(self, name):
        return normalization(name, dtype=self.dtype_policy)

    def _build_feed_forward(self, shape):
        self.outer = self._dense(shape[-1], None, "outer")
        self.inner.build(shape)
        self.outer.build((*shape[:-1], self.ffn_dim))

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "head_size": self.head_size,
            "ffn_dim": self.ffn_dim,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "ffn_init_scale": self.ffn_init_scale,
        }


@keras.saving.register_keras_serializable(package="model_zoo")
class EncoderBlock(_TransformerBlock):
    """Self-attention, then a feed-forward layer.

    Both have layer normalisation before them, dropout after them, and a
    residual connection around them. Masked positions get no attention.

    Args:
        num_heads: Positive integer, the number of attention heads.
        head_size: Positive integer, size of a head's queries, keys and values.
        ffn_dim: Positive integer, hidden units of the feed-forward layer.
        dropout: Float, rate of dropout after each part. Defaults to `0.0`.
        attention_dropout: Float, rate of dropout of attention weights.
            Defaults to `0.0`.
        ffn_init_scale: Float, by which the initial values of both kernels of
            the feed-forward layer, Glorot uniform, are multiplied. Defaults to
            `1.0`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input and output shape:
        `(batch_size, length, dim)`

    Example:

    ```python
    block = EncoderBlock(num_heads=4, head_size=16, ffn_dim=256)
    block(keras.ops.ones((2, 9, 64))).shape  # (2, 9, 64)
    ```
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm_1 = self._norm("norm_1")
        self.attention = self._attention("attention")
        self.drop_1 = self._drop("drop_1")
        self.norm_2 = self._norm("norm_2")
        self.drop_2 = self._drop("drop_2")

    def build(self, input_shape):
        self.norm_1.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.norm_2.build(input_shape)
        self._build_feed_forward(input_shape)

    def call(self, x, training=None):
        h = self.norm_1(x)
        h = self.attention(h, h, training=training)
        x = x + self.drop_1(h, training=training)
        h = self.outer(self.inner(self.norm_2(x)))
        return x + self.drop_2(h, training=training)

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(package="model_zoo")
class DecoderBlock(_TransformerBlock):
    """Causal self-attention, cross-attention, then a feed-forward layer.

    Each has layer normalisation before it, dropout after it, and a residual
    connection around it. Masked positions get no attention.

    Args:
        num_heads: Positive integer, the number of attention heads.
        head_size: Positive integer, size of a head's queries, keys and values.
        ffn_dim: Positive integer, hidden units of the feed-forward layer.
        dropout: Float, rate of dropout after each part. Defaults to `0.0`.
        attention_dropout: Float, rate of dropout of attention weights.
            Defaults to `0.0`.
        ffn_init_scale: Float, by which the initial values of both kernels of
            the feed-forward layer, Glorot uniform, are multiplied. Defaults to
            `1.0`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Call arguments:
        x: Tensor of shape `(batch_size, target_length, dim)`, as the outputs.
        encoded: The encoder's outputs, `(batch_size, source_length, dim)`.
        encoded_mask: Boolean tensor `(batch_size, source_length)`, false where
            the source is padding. Defaults to the Keras mask of `encoded`.

    Example:

    ```python
    block = DecoderBlock(num_heads=4, head_size=16, ffn_dim=256)
    x, encoded = keras.ops.ones((2, 7, 64)), keras.ops.ones((2, 9, 64))
    block(x, encoded).shape  # (2, 7, 64)
    ```
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm_1 = self._norm("norm_1")
        self.self_attention = self._attention("self_attention")
        self.drop_1 = self._drop("drop_1")
        self.norm_2 = self._norm("norm_2")
        self.cross_attention = self._attention("cross_attention")
        self.drop_2 = self._drop("drop_2")
        self.norm_3 = self._norm("norm_3")
        self.drop_3 = self._drop("drop_3")

    def build(self, x_shape, encoded_shape):
        self.norm_1.build(x_shape)
        self.self_attention.build(x_shape, x_shape)
        self.norm_2.build(x_shape)
        self.cross_attention.build(x_shape, encoded_shape)
        self.norm_3.build(x_shape)
        self._build_feed_forward(x_shape)

    def call(self, x, encoded, encoded_mask=None, training=None):
        h = self.norm_1(x)
        h = self.self_attention(h, h, use_causal_mask=True, training=training)
        x = x + self.drop_1(h, training=training)
        h = self.norm_2(x)
        h = self.cross_attention(
            h,
            # A copy: MultiHeadAttention removes the Keras mask from its input,
            # and the next block needs it.
            ops.copy(encoded),
            value_mask=encoded_mask,
            training=training,
        )
        x = x + self.drop_2(h, training=training)
        h = self.outer(self.inner(self.norm_3(x)))
        return x + self.drop_3(h, training=training)

    def encoded_keys_values(self, encoded):
        """Returns cross-attention's keys and values, for `step`."""
        # A copy has no Keras mask; with one the projections would warn.
        encoded = ops.copy(encoded)
        attention = self.cross_attention
        return attention.key_dense(encoded), attention.value_dense(encoded)

    def step(self, x, index, cache, encoded_cache, encoded_mask):
        """Computes the outputs of `call` at one position, without dropout.

        All hypotheses of a source share the encoder's keys and values.

        Args:
            x: Tensor of shape `(batch_size, num_hypotheses, dim)`, the inputs
                at this position.
            index: Integer scalar, the position.
            cache: Tuple of keys and values of earlier positions, each of shape
                `(batch_size, num_hypotheses, length, num_heads, head_size)`.
            encoded_cache: Tuple that `encoded_keys_values` returns.
            encoded_mask: Boolean tensor `(batch_size, source_length)`.

        Returns:
            Tuple of the outputs, of the shape of `x`, and `cache` with keys
            and values of this position.
        """
        h = self.norm_1(x)
        attention = self.self_attention
        query = attention.query_dense(h)
        positions = ops.arange(cache[0].shape[2])
        here = ops.reshape(positions == index, (-1, 1, 1))
        keys = ops.where(here, attention.key_dense(h)[:, :, None], cache[0])
        values = ops.where(here, attention.value_dense(h)[:, :, None], cache[1])
        # Self-attention: hypotheses are rows, each attends to its own past.
        shape = (-1, *keys.shape[2:])
        h = ops.dot_product_attention(
            ops.reshape(query, (-1, 1, *query.shape[2:])),
            ops.reshape(keys, shape),
            ops.reshape(values, shape),
            mask=ops.reshape(positions <= index, (1, 1, 1, -1)),
        )
        x = x + attention.output_dense(ops.reshape(h, ops.shape(query)))
        # Cross-attention: the hypotheses of a source are the positions of one
        # row, which all attend to that source.
        attention = self.cross_attention
        h = ops.dot_product_attention(
            attention.query_dense(self.norm_2(x)),
            *encoded_cache,
            mask=encoded_mask[:, None, None, :],
        )
        x = x + attention.output_dense(h)
        x = x + self.outer(self.inner(self.norm_3(x)))
        return x, (keys, values)

    def compute_output_shape(self, x_shape, encoded_shape):
        return x_shape


def normalization(name, dtype=None):
    return keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name=name)
