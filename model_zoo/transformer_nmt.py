"""Encoder-decoder Transformers that translate.

Sources: the multilingual T(L, H, A) in Huang et al., "GPipe", 2019, section 5,
https://arxiv.org/abs/1811.06965: the Transformer of Vaswani et al., "Attention
Is All You Need", 2017, https://arxiv.org/abs/1706.03762, with two measures that
keep deep models stable. Layer normalisation comes before each part, not after.
"""

import keras

from model_zoo.transformer_lm import SinusoidalPositions
from model_zoo.transformer_nmt_layers import DecoderBlock
from model_zoo.transformer_nmt_layers import EncoderBlock
from model_zoo.transformer_nmt_layers import SharedEmbedding
from model_zoo.transformer_nmt_layers import normalization


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
    logits' magnitude is clipped, at a value that the paper doesn't give.

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
        # `SinusoidalPositions` scales it to a standard deviation of 1.
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
    encoded = normalization("encoder_norm")(x)

    x = SinusoidalPositions(name="target_positions")(embedding(target))
    x = keras.layers.Dropout(dropout, name="target_dropout")(x)
    for index in range(num_layers):
        block = DecoderBlock(**block_arguments, name=f"decoder_{index + 1}")
        x = block(x, encoded)
    logits = embedding(normalization("decoder_norm")(x), reverse=True)
    return keras.Model(
        {"source": source, "target": target}, logits, name="transformer_nmt"
    )
