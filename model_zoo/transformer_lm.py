"""Decoder-only Transformers that predict the next token.

Sources: Vaswani et al., "Attention Is All You Need", 2017,
https://arxiv.org/abs/1706.03762; with layer normalisation before attention and
feed-forward layers, as in Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019. The default sizes are those of Transformer-L in Huang
et al., "GPipe", 2019, https://arxiv.org/abs/1811.06965, Table 1.
"""

import keras
from keras import ops

from model_zoo.chain import build_chain


@keras.saving.register_keras_serializable(package="model_zoo")
class SinusoidalPositions(keras.layers.Layer):
    """Scales embeddings by the root of their size and adds positions.

    The sinusoids of Vaswani et al., section 3.5. It has no weights, takes
    sequences of any length, and passes on the mask of its inputs.

    Input and output shape:
        `(batch_size, length, dim)`, `dim` an even number.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x):
        length, dim = ops.shape(x)[1], x.shape[-1]
        dtype = self.compute_dtype
        positions = ops.cast(ops.arange(length), "float32")[:, None]
        frequencies = ops.exp(
            ops.arange(0, dim, 2, dtype="float32")
            * (-ops.log(ops.cast(10000.0, "float32")) / dim)
        )
        angles = positions * frequencies
        table = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
        return x * ops.cast(dim**0.5, dtype) + ops.cast(table, dtype)

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(package="model_zoo")
class CausalTransformerBlock(keras.layers.Layer):
    """Causal self-attention, then a feed-forward layer.

    Both have layer normalisation before them, dropout after them, and a
    residual connection around them.

    Args:
        num_heads: Positive integer, a divisor of the size of the inputs.
        ffn_dim: Positive integer, hidden units of the feed-forward layer.
        dropout: Float, rate of dropout. Defaults to `0.0`.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Input and output shape:
        `(batch_size, length, dim)`

    Example:

    ```python
    block = CausalTransformerBlock(num_heads=4, ffn_dim=256)
    block(keras.ops.ones((2, 16, 64))).shape  # (2, 16, 64)
    ```
    """

    def __init__(self, num_heads, ffn_dim, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.ffn_dim = ffn_dim
        self.dropout = dropout
        self.norm_1 = keras.layers.LayerNormalization(
            epsilon=1e-5, name="norm_1"
        )
        self.norm_2 = keras.layers.LayerNormalization(
            epsilon=1e-5, name="norm_2"
        )
        self.inner = keras.layers.Dense(
            ffn_dim, activation="relu", name="inner"
        )
        self.drop_1 = keras.layers.Dropout(dropout, name="drop_1")
        self.drop_2 = keras.layers.Dropout(dropout, name="drop_2")

    def build(self, input_shape):
        dim = input_shape[-1]
        if dim % self.num_heads:
            raise ValueError(
                "`num_heads` must divide the size of the inputs. Received: "
                f"num_heads={self.num_heads}, input_shape={input_shape}"
            )
        self.attention = keras.layers.MultiHeadAttention(
            self.num_heads,
            dim // self.num_heads,
            dtype=self.dtype_policy,
            name="attention",
        )
        self.outer = keras.layers.Dense(dim, name="outer")
        build_chain(self, [self.norm_1, self.drop_1], input_shape)
        self.attention.build(input_shape, input_shape)
        build_chain(
            self,
            [self.norm_2, self.inner, self.outer, self.drop_2],
            input_shape,
        )

    def call(self, x, training=None):
        h = self.norm_1(x)
        h = self.attention(h, h, use_causal_mask=True)
        x = x + self.drop_1(h, training=training)
        h = self.outer(self.inner(self.norm_2(x)))
        return x + self.drop_2(h, training=training)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "ffn_dim": self.ffn_dim,
            "dropout": self.dropout,
        }


def transformer_lm(
    num_layers=3,
    dim=2048,
    ffn_dim=8192,
    num_heads=32,
    vocabulary=32000,
    length=1024,
    dropout=0.0,
):
    """A causal language model, Transformer-L of the GPipe paper.

    Args:
        num_layers: Positive integer L. Defaults to `3`.
        dim: Positive even integer, size of a position's vector. Defaults to
            `2048`.
        ffn_dim: Positive integer, hidden units of a feed-forward layer.
            Defaults to `8192`.
        num_heads: Positive integer, a divisor of `dim`. Defaults to `32`.
        vocabulary: Positive integer, tokens are `0` to `vocabulary - 1`.
            Defaults to `32000`.
        length: Positive integer, tokens of a sequence, or `None` for any
            number. Defaults to `1024`.
        dropout: Float, rate of dropout. Defaults to `0.0`.

    Returns:
        A list of Keras layers that begins with a `keras.layers.InputLayer`,
        mapping tokens `(batch_size, length)`, integers, to logits of the next
        tokens `(batch_size, length, vocabulary)`. With the default sizes and
        L of 3, 13, 103, 415 and 1663 it has 282.2 million, 785.7 million,
        5.32 billion, 21.03 billion and 83.88 billion parameters; embedding
        and logits have weights of their own.

    Raises:
        ValueError: If `dim` is odd, or `num_heads` is no divisor of it.

    Example:

    ```python
    layers = transformer_lm(2, dim=64, ffn_dim=256, num_heads=4, length=32)
    model = keras.Sequential(layers)
    ```
    """
    if dim % 2 or dim % num_heads:
        raise ValueError(
            "`dim` must be even and a multiple of `num_heads`. Received: "
            f"dim={dim}, num_heads={num_heads}"
        )
    return [
        keras.layers.InputLayer(shape=(length,), dtype="int32", name="tokens"),
        keras.layers.Embedding(
            vocabulary,
            dim,
            # `SinusoidalPositions` scales it to a standard deviation of 1.
            embeddings_initializer=keras.initializers.RandomNormal(
                stddev=dim**-0.5
            ),
            name="embedding",
        ),
        SinusoidalPositions(name="positions"),
        *(
            CausalTransformerBlock(
                num_heads, ffn_dim, dropout, name=f"block_{index + 1}"
            )
            for index in range(num_layers)
        ),
        keras.layers.LayerNormalization(epsilon=1e-5, name="norm"),
        keras.layers.Dense(vocabulary, use_bias=False, name="logits"),
    ]
