"""Translation with a `transformer_nmt`: greedy search and beam search.

The length penalty is that of Wu et al., "Google's Neural Machine Translation
System", 2016, https://arxiv.org/abs/1609.08144, section 7.
"""

import collections
import itertools
import weakref

import numpy as np
import tensorflow as tf

# The compiled search of each model, and the variables that it reads. By weak
# references, so that a search is deleted together with its model.
_SEARCHES = weakref.WeakKeyDictionary()

# The beam, all tensors of shape `(batch_size, beam_size, ...)`: tokens with
# the start token, log probabilities, numbers of tokens after the start token,
# whether the end token is among them, and keys and values of each block.
_Hypotheses = collections.namedtuple(
    "_Hypotheses", ["tokens", "log_probs", "lengths", "ended", "caches"]
)


def decode(
    model,
    source,
    start_token,
    end_token,
    max_length,
    beam_size=1,
    length_penalty=0.6,
):
    """Translates with a model that `transformer_nmt` made.

    Beam search keeps, for each source, the `beam_size` best hypotheses by
    score: the log probability of a hypothesis Y, divided by
    `((5 + len(Y)) / 6) ** length_penalty`. A hypothesis that has ended is kept
    while its score is among the best. With a `beam_size` of 1 this is greedy
    search: the most likely token at each position.

    The encoder runs once. The decoder runs for one position of the target at a
    time, and keeps the keys and values of earlier positions. The search is
    compiled for each model and each set of arguments other than `source`: for
    the shape of the first `source`, then for any shape.

    Args:
        model: A `keras.Model` with the layers of `transformer_nmt`, under
            their names.
        source: Integer array of shape `(batch_size, source_length)`, with
            padding `0`.
        start_token: Integer, the target's first token in training. Not `0`.
        end_token: Integer, the token that ends a translation. Not `0`.
        max_length: Positive integer, the most tokens of a translation, with
            its end token.
        beam_size: Positive integer, the number of hypotheses kept. Defaults to
            `1`.
        length_penalty: Float, not negative: the larger, the longer the
            translations. Defaults to `0.6`, as in Vaswani et al., 2017. It
            makes no difference with a `beam_size` of 1.

    Returns:
        Integer tensor of shape `(batch_size, max_length)`: for each source the
        hypothesis with the best score, without start token, up to its end
        token, and padding `0` after it. Padding is never part of a hypothesis.

    Raises:
        ValueError: If an argument is out of range, or the model lacks layers
            of a `transformer_nmt`.

    Example:

    ```python
    model = transformer_nmt(
        2, ffn_dim=128, num_heads=4, dim=32, vocabulary=100, head_size=8
    )
    source = np.array([[5, 6, 7, 0], [8, 9, 10, 11]])
    tokens = decode(
        model, source, start_token=1, end_token=2, max_length=9, beam_size=4
    )
    tokens.shape  # (2, 9)
    ```
    """
    if start_token < 1 or end_token < 1:
        raise ValueError(
            "`start_token` and `end_token` must be positive: token 0 is "
            f"padding. Received: start_token={start_token}, "
            f"end_token={end_token}"
        )
    if max_length < 1 or beam_size < 1:
        raise ValueError(
            "`max_length` and `beam_size` must be positive. Received: "
            f"max_length={max_length}, beam_size={beam_size}"
        )
    if length_penalty < 0:
        raise ValueError(
            "`length_penalty` must not be negative. Received: "
            f"length_penalty={length_penalty}"
        )
    source = tf.convert_to_tensor(source)
    if source.shape.rank != 2 or not source.dtype.is_integer:
        raise ValueError(
            "`source` must be integers of shape (batch_size, source_length). "
            f"Received: shape {source.shape}, dtype {source.dtype.name}"
        )
    # A pipeline that is cut anew gets new variables.
    variables = [v.value.ref() for v in model.variables]
    before, search = _SEARCHES.get(model, (None, None))
    if variables != before:
        search = tf.function(_search, autograph=False, reduce_retracing=True)
        _SEARCHES[model] = variables, search
    return search(
        model,
        tf.cast(source, tf.int32),
        # Python numbers: NumPy's would be traced as tensors, which cannot be
        # static sizes.
        start_token=int(start_token),
        end_token=int(end_token),
        max_length=int(max_length),
        beam_size=int(beam_size),
        length_penalty=float(length_penalty),
    )


def _search(
    model,
    source,
    start_token,
    end_token,
    max_length,
    beam_size,
    length_penalty,
):
    encoded = _encode(model, source)
    encoded_caches = [
        block.encoded_keys_values(encoded)
        for block in _blocks(model, "decoder")
    ]
    encoded_mask = tf.not_equal(source, 0)

    def scores(log_probs, lengths):
        lengths = tf.cast(lengths, tf.float32)
        return log_probs / ((5.0 + lengths) / 6.0) ** length_penalty

    def goes_on(index, beam):
        ended = scores(beam.log_probs, beam.lengths)
        # An upper bound of the scores of hypotheses that haven't ended.
        others = scores(beam.log_probs, max_length)
        ended = tf.where(beam.ended, ended, -np.inf)
        others = tf.where(beam.ended, -np.inf, others)
        return tf.reduce_any(
            tf.reduce_max(others, axis=1) > tf.reduce_max(ended, axis=1)
        )

    def extend(index, beam):
        logits, caches = _next_logits(
            model, index, beam, encoded_caches, encoded_mask
        )
        vocabulary = logits.shape[-1]
        padding = tf.range(vocabulary) == 0
        # A hypothesis that has ended goes on with padding, at no cost.
        log_probs = beam.log_probs[..., None] + tf.where(
            beam.ended[..., None],
            tf.where(padding, 0.0, -np.inf),
            tf.where(padding, -np.inf, tf.nn.log_softmax(logits)),
        )
        lengths = tf.where(beam.ended, beam.lengths, beam.lengths + 1)
        _, best = tf.math.top_k(
            _merge(scores(log_probs, lengths[..., None])), beam_size
        )
        parents, last = best // vocabulary, best % vocabulary

        def select(x):
            return tf.gather(x, parents, batch_dims=1)

        ended = select(beam.ended) | (last == end_token)
        beam = _Hypotheses(
            tf.where(
                tf.range(max_length + 1) == index + 1,
                last[..., None],
                select(beam.tokens),
            ),
            tf.gather(_merge(log_probs), best, batch_dims=1),
            select(lengths),
            ended,
            tf.nest.map_structure(select, caches),
        )
        return index + 1, beam

    beam = _first_beam(encoded_caches, start_token, max_length, beam_size)
    _, beam = tf.while_loop(
        goes_on, extend, [0, beam], maximum_iterations=max_length
    )
    # Hypotheses are sorted, the best first.
    return beam.tokens[:, 0, 1:]


def _first_beam(encoded_caches, start_token, max_length, beam_size):
    shape = [tf.shape(encoded_caches[0][0])[0], beam_size]
    tokens = tf.one_hot(0, max_length + 1, start_token, 0, dtype=tf.int32)
    # All hypotheses but the first are impossible; otherwise the first step
    # would choose the same token for all.
    log_probs = tf.where(tf.range(beam_size) == 0, 0.0, -np.inf)
    return _Hypotheses(
        tf.broadcast_to(tokens, [*shape, max_length + 1]),
        tf.broadcast_to(log_probs, shape),
        tf.zeros(shape, tf.int32),
        tf.zeros(shape, tf.bool),
        tf.nest.map_structure(
            lambda x: tf.zeros([*shape, max_length, *x.shape[2:]], x.dtype),
            encoded_caches,
        ),
    )


def _encode(model, source):
    x = model.get_layer("embedding")(source)
    x = model.get_layer("source_positions")(x)
    for block in _blocks(model, "encoder"):
        x = block(x)
    return model.get_layer("encoder_norm")(x)


def _next_logits(model, index, beam, encoded_caches, encoded_mask):
    """Runs the decoder at a position.

    Returns:
        Tuple of the logits of the next token, `(batch_size, beam_size,
        vocabulary)`, and the caches with keys and values of this position.
    """
    embedding = model.get_layer("embedding")
    shape = tf.shape(beam.tokens)
    # All positions are embedded, since the layer counts from the first one.
    tokens = tf.reshape(beam.tokens, [-1, shape[-1]])
    x = model.get_layer("target_positions")(embedding(tokens))[:, index]
    x = tf.reshape(x, [shape[0], shape[1], x.shape[-1]])
    caches = []
    for block, cache, encoded_cache in zip(
        _blocks(model, "decoder"), beam.caches, encoded_caches, strict=True
    ):
        x, cache = block.step(x, index, cache, encoded_cache, encoded_mask)
        caches.append(cache)
    logits = embedding(model.get_layer("decoder_norm")(x), reverse=True)
    return tf.cast(logits, tf.float32), caches


def _blocks(model, kind):
    names = {layer.name for layer in model.layers}
    numbers = itertools.takewhile(
        lambda number: f"{kind}_{number}" in names, itertools.count(1)
    )
    return [model.get_layer(f"{kind}_{number}") for number in numbers]


def _merge(x):
    """Reshapes `(batch_size, beam_size, vocabulary)` to two axes."""
    return tf.reshape(x, [-1, x.shape[1] * x.shape[2]])
