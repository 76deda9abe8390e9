"""Encoder-decoder Transformers that translate.

Sources: the multilingual T(L, H, A) in Huang et al., "GPipe", 2019, section 5,
https://arxiv.org/abs/1811.06965: the Transformer of Vaswani et al., "Attention
Is All You Need", 2017, https://arxiv.org/abs/1706.03762, with two measures that
keep deep models stable. Layer normalisation comes before each part, not after.
"""

import keras
from keras import ops

from model_zoo.transformer_lm import SinusoidalPositions


@keras.saving.register_keras_serializable(package="model_zoo")
class SharedEmbedding(keras.layers.ReversibleEmbedding):
    """Embeds tokens and, in reverse, turns vectors into logits of tokens.

    Padding is masked where tokens are embedded, and the logits carry the mask
    of the vectors they are made of.

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
        # That of vectors. Keras sets that of tokens in `call`, and would drop
        # this one.
        return mask

    def get_config(self):
        return {**super().get_config(), "logit_clip": self.logit_clip}


class _TransformerBlock(keras.layers.Layer):
    """Hyper-parameters and parts of the blocks of encoder and decoder."""

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
        # Glorot uniform is this with a scale, of the variance, of 1.
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
        return _norm(name, dtype=self.dtype_policy)

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
    """Attention to all positions, then a feed-forward layer.

    Each with layer normalisation before it, dropout after it, and added to
    its input. Positions that are masked get no attention.

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
    """Attention to earlier positions, to the encoder, then feed-forward.

    Each with layer normalisation before it, dropout after it, and added to
    its input. Positions that are masked get no attention.

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
            # MultiHeadAttention takes the Keras mask off the tensor it is
            # given, and the next block needs it.
            ops.copy(encoded),
            value_mask=encoded_mask,
            training=training,
        )
        x = x + self.drop_2(h, training=training)
        h = self.outer(self.inner(self.norm_3(x)))
        return x + self.drop_3(h, training=training)

    def encoded_keys_values(self, encoded):
        """Returns keys and values of the encoder's outputs, for `step`."""
        # A copy has no Keras mask, of which the projections would warn.
        encoded = ops.copy(encoded)
        attention = self.cross_attention
        return attention.key_dense(encoded), attention.value_dense(encoded)

    def step(self, x, index, cache, encoded_cache, encoded_mask):
        """Returns what `call` returns at one position, without dropout.

        Several hypotheses per source share the keys and values of the encoder.

        Args:
            x: Tensor of shape `(batch_size, num_hypotheses, dim)`, the inputs
                at this position.
            index: Integer scalar, the position.
            cache: Tuple of keys and values of earlier positions, each of shape
                `(batch_size, num_hypotheses, length, num_heads, head_size)`.
            encoded_cache: What `encoded_keys_values` returns.
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
        # Hypotheses are rows here: each attends to its own past.
        shape = (-1, *keys.shape[2:])
        h = ops.dot_product_attention(
            ops.reshape(query, (-1, 1, *query.shape[2:])),
            ops.reshape(keys, shape),
            ops.reshape(values, shape),
            mask=ops.reshape(positions <= index, (1, 1, 1, -1)),
        )
        x = x + attention.output_dense(ops.reshape(h, ops.shape(query)))
        # And the positions of one sequence here: all attend to one source.
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


def transformer_nmt(
    num_layers,
    ffn_dim,
    num_heads,
    dim=1024,
    vocabulary=64000,
    head_size=64,
    dropout=0.0,
    attention_dropout=0.0,
    tie_weights=True,
    scale_ffn_init=True,
    logit_clip=30.0,
    source_length=None,
    target_length=None,
):
    """A translation model, the multilingual T(L, H, A) of the GPipe paper.

    Token 0 is padding, in source and target: it gets no attention, and the
    logits carry a Keras mask, so that Keras's losses and metrics skip the
    positions where `target` is padding. The decoder is fed the target shifted
    right, after a start token of your choice other than 0.

    Two measures of the paper keep deep models stable: the initial values of
    all feed-forward kernels are divided by the number of layers, and the
    logits' magnitude is clipped. It doesn't tell at which value.

    `model_zoo.decoding.decode` translates with the model.

    Args:
        num_layers: Positive integer L, blocks of the encoder, and as many of
            the decoder.
        ffn_dim: Positive integer H, hidden units of a feed-forward layer.
        num_heads: Positive integer A, the number of attention heads.
        dim: Positive even integer, size of a position's vector. Defaults to
            `1024`.
        vocabulary: Positive integer, tokens are `0` to `vocabulary - 1`, the
            same for source and target. Defaults to `64000`.
        head_size: Positive integer, size of a head's queries, keys and values.
            Defaults to `64`, for any number of heads: the paper's
            T(24, 8192, 16) and T(12, 16384, 32) are as large as each other
            with heads of one size only, and its figures fit this size.
        dropout: Float, rate of dropout of embeddings and after each part of a
            block. Defaults to `0.0`.
        attention_dropout: Float, rate of dropout of attention weights.
            Defaults to `0.0`.
        tie_weights: Boolean, whether the logits share the matrix that source
            and target embeddings share. Defaults to `True`.
        scale_ffn_init: Boolean, whether the initial values of both kernels of
            every feed-forward layer, Glorot uniform, are divided by
            `num_layers`. Defaults to `True`.
        logit_clip: Positive float, the largest magnitude of a logit, or `None`
            for no limit. Defaults to `30.0`.
        source_length: Positive integer, tokens of a source, or `None` for any
            number. Defaults to `None`.
        target_length: Positive integer, tokens of a target, or `None` for any
            number. Defaults to `None`.

    Returns:
        A functional `keras.Model`. Its inputs are a dictionary of integers,
        `"source"` of shape `(batch_size, source_length)` and `"target"` of
        shape `(batch_size, target_length)`; its outputs are the logits of the
        next target tokens `(batch_size, target_length, vocabulary)`. It has
        these numbers of parameters, in millions; the paper, which tells its
        own roughly, doesn't say which of its embeddings are shared:

        | model | parameters | with `tie_weights=False` | paper |
        |---|---|---|---|
        | T(6, 8192, 16) | 342.6 | 408.1 | 400 |
        | T(24, 8192, 16) | 1173.8 | 1239.4 | 1300 |
        | T(12, 16384, 32) | 1173.6 | 1239.2 | 1300 |
        | T(32, 16384, 32) | 3020.5 | 3086.0 | 3000 |
        | T(64, 16384, 32) | 5975.4 | 6040.9 | 6000 |

    Raises:
        ValueError: If `num_layers` or `logit_clip` isn't positive, or `dim`
            is odd.

    Example:

    ```python
    model = transformer_nmt(
        2, ffn_dim=128, num_heads=4, dim=32, vocabulary=100, head_size=8
    )
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    source = np.array([[5, 6, 7, 0], [8, 9, 10, 11]])
    # Start token 1, end token 2.
    target = np.array([[1, 15, 16, 0], [1, 18, 19, 20]])
    labels = np.array([[15, 16, 2, 0], [18, 19, 20, 2]])
    model.fit({"source": source, "target": target}, labels)
    ```
    """
    if num_layers < 1:
        raise ValueError(
            f"`num_layers` must be positive. Received: num_layers={num_layers}"
        )
    if dim % 2:
        raise ValueError(
            "`dim` must be even: half of it are sines, half cosines. "
            f"Received: dim={dim}"
        )
    block_arguments = {
        "num_heads": num_heads,
        "head_size": head_size,
        "ffn_dim": ffn_dim,
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "ffn_init_scale": 1 / num_layers if scale_ffn_init else 1.0,
    }
    embedding = SharedEmbedding(
        vocabulary,
        dim,
        logit_clip=logit_clip,
        tie_weights=tie_weights,
        # Scaled up to a standard deviation of 1 with the positions.
        embeddings_initializer=keras.initializers.RandomNormal(
            stddev=dim**-0.5
        ),
        name="embedding",
    )
    source = keras.Input((source_length,), dtype="int32", name="source")
    target = keras.Input((target_length,), dtype="int32", name="target")

    x = SinusoidalPositions(name="source_positions")(embedding(source))
    x = keras.layers.Dropout(dropout, name="source_dropout")(x)
    for index in range(num_layers):
        x = EncoderBlock(**block_arguments, name=f"encoder_{index + 1}")(x)
    encoded = _norm("encoder_norm")(x)

    x = SinusoidalPositions(name="target_positions")(embedding(target))
    x = keras.layers.Dropout(dropout, name="target_dropout")(x)
    for index in range(num_layers):
        block = DecoderBlock(**block_arguments, name=f"decoder_{index + 1}")
        x = block(x, encoded)
    logits = embedding(_norm("decoder_norm")(x), reverse=True)
    return keras.Model(
        {"source": source, "target": target}, logits, name="transformer_nmt"
    )


def _norm(name, dtype=None):
    return keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name=name)
