"""Batches of sentence pairs of similar length, drawn by language."""

import itertools

import numpy as np
import tensorflow as tf

from trainers import devices
from trainers.command_line import UserError

# The most batches that are formed at a time, from pairs sorted by length. A
# larger number means less padding.
_POOL = 300


class TokenBatches:
    """Forms batches of randomly drawn pairs of similar length.

    A direction with `n` pairs gets a share of the drawn pairs in proportion to
    `n ** (1 / temperature)`. Within an epoch the pairs of a direction are drawn
    in random order, none again before all have been drawn.

    Pairs are drawn for many batches at a time, at most as many as there are,
    sorted by length and cut into batches, which are shuffled. Pairs that do not
    fill a batch are put into the following ones.

    Args:
        pairs: `TokenPairs` to train with.
        batch_tokens: Positive integer, the most tokens of a batch with its
            padding: the number of pairs times the sum of the lengths of the
            longest source and the longest target.
        temperature: Float, at least 1: with 1, shares are proportional to the
            numbers of pairs; infinity makes all directions equal. Defaults to
            `1.0`.
        num_replicas: Positive integer, by which the number of pairs in a batch
            is divisible. Defaults to `1`.
        seed: Integer. Defaults to `0`.

    Raises:
        UserError: If the longest pair would fit no batch, or all pairs
            together do not fill one.

    Example:

    ```python
    batches = TokenBatches(pairs, batch_tokens=4096, temperature=5.0)
    model.fit(batches.epochs(0, 10, steps_per_epoch=100), steps_per_epoch=100)
    ```
    """

    def __init__(
        self, pairs, batch_tokens, temperature=1.0, num_replicas=1, seed=0
    ):
        self._pairs = pairs
        self._batch_tokens = batch_tokens
        self._num_replicas = num_replicas
        self._seed = seed
        self._ranges = list(pairs.directions.values())
        shares = np.array([len(x) for x in self._ranges], float)
        shares **= 1 / temperature
        self._shares = shares / shares.sum()
        lengths = pairs.lengths(pairs.indices())
        longest = lengths.max(axis=0, initial=0).sum() * num_replicas
        if longest > batch_tokens:
            raise UserError(
                "--batch_tokens must be enough for the longest source and the "
                f"longest target, once a replica: {longest}. Received: "
                f"--batch_tokens={batch_tokens}. Raise it or lower --max_length"
            )
        if batch_tokens > lengths.sum():
            raise UserError(
                f"--batch_tokens must be at most {lengths.sum()}, the tokens "
                f"of all {len(lengths)} training pairs: a larger batch would "
                "have some of them several times. Lower it, or train with "
                f"more pairs. Received: --batch_tokens={batch_tokens}"
            )
        # The number of pairs drawn at a time, if they have the mean length. No
        # more than there are: the copies of a pair that is drawn several times
        # have one length, and so would be in one batch. A high `temperature`
        # draws the pairs of a small direction several times all the same.
        means = [lengths[x].mean() for x in self._ranges]
        pool = int(_POOL * batch_tokens // (2 * np.dot(self._shares, means)))
        self._pool = min(pool, len(lengths))

    def shares(self):
        """Returns the share of pairs of each `Direction`, as a dictionary."""
        return dict(zip(self._pairs.directions, self._shares, strict=True))

    def epochs(self, first, last, steps_per_epoch):
        """Returns the batches of epochs `first` to `last - 1`.

        The batches of an epoch depend only on the seed and its number.

        Args:
            first: Integer.
            last: Integer.
            steps_per_epoch: Positive integer.

        Returns:
            `tf.data.Dataset` of results of `TokenPairs.batch`.
        """

        def generate():
            for epoch in range(first, last):
                indices = self.indices(epoch)
                for rows in itertools.islice(indices, steps_per_epoch):
                    yield self._pairs.batch(rows)

        return _dataset(generate, (last - first) * steps_per_epoch)

    def indices(self, epoch):
        """Yields the numbers of the pairs of each batch of an epoch, for ever.

        Args:
            epoch: Integer.

        Yields:
            Integer arrays.
        """
        generator = np.random.default_rng((self._seed, epoch))
        streams = [_Shuffled(x, generator) for x in self._ranges]
        left = np.zeros(0, np.int64)
        while True:
            counts = generator.multinomial(self._pool, self._shares)
            drawn = [
                stream.take(count)
                for stream, count in zip(streams, counts, strict=True)
            ]
            # Shuffled, since pairs of one length would stay sorted by language.
            drawn = generator.permutation(np.concatenate([left, *drawn]))
            *batches, left = cut(
                self._pairs, drawn, self._batch_tokens, self._num_replicas
            )
            for index in generator.permutation(len(batches)):
                yield batches[index]

    def padding(self):
        """Returns the share of padding among the tokens of some batches."""
        used = total = 0
        for rows in itertools.islice(self.indices(0), _POOL // 3):
            lengths = self._pairs.lengths(rows)
            used += lengths.sum()
            total += len(rows) * lengths.max(axis=0).sum()
        return 1 - used / total


class _Shuffled:
    """Draws from a range in random order, over and over."""

    def __init__(self, numbers, generator):
        self._numbers = numbers
        self._generator = generator
        self._rest = np.zeros(0, np.int64)

    def take(self, count):
        rounds = -((len(self._rest) - count) // len(self._numbers))
        more = [
            self._generator.permutation(self._numbers) for _ in range(rounds)
        ]
        self._rest = np.concatenate([self._rest, *more])
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


def cut(pairs, indices, batch_tokens, num_replicas=1):
    """Sorts pairs by length and cuts them into batches.

    Args:
        pairs: `TokenPairs`.
        indices: Integer array `(n,)`, numbers of pairs.
        batch_tokens: As of `TokenBatches`.
        num_replicas: As of `TokenBatches`.

    Returns:
        List of integer arrays, one a batch; concatenated they are `indices`,
        sorted. The last one is the remainder: it may be empty, have fewer pairs
        than would fit, or a number not divisible by `num_replicas`.
    """
    lengths = pairs.lengths(indices)
    # By target length, then by source length: ascending for odd target lengths
    # and descending for even ones, or else a batch that spans two target
    # lengths would mix the longest sources with the shortest.
    source, target = lengths.T
    order = np.lexsort((np.where(target % 2, source, -source), target))
    indices, lengths = indices[order], lengths[order]
    batches, start = [], 0
    while True:
        most = batch_tokens // max(1, lengths[start:].min(initial=batch_tokens))
        rows = np.maximum.accumulate(lengths[start : start + most + 1])
        sizes = rows.sum(axis=1) * np.arange(1, len(rows) + 1)
        count = int(np.searchsorted(sizes, batch_tokens, side="right"))
        count = max(count // num_replicas, 1) * num_replicas
        if start + count >= len(indices):
            return [*batches, indices[start:]]
        batches.append(indices[start : start + count])
        start += count


def each_once(pairs, indices, batch_tokens, num_replicas=1):
    """Returns batches for evaluation, in which each pair occurs once.

    Args:
        pairs: `TokenPairs`.
        indices: Integer array `(n,)`, numbers of pairs.
        batch_tokens: As of `TokenBatches`.
        num_replicas: As of `TokenBatches`. A batch with too few pairs is filled
            up with rows of padding.

    Returns:
        `tf.data.Dataset`.
    """
    batches = cut(pairs, indices, batch_tokens, num_replicas)
    batches = [rows for rows in batches if len(rows)]

    def generate():
        for rows in batches:
            missing = [(0, -len(rows) % num_replicas), (0, 0)]
            yield tf.nest.map_structure(
                lambda x, missing=missing: np.pad(x, missing),
                pairs.batch(rows),
            )

    return _dataset(generate, len(batches))


def _dataset(generate, num_batches):
    """Returns a `tf.data.Dataset` of results of `TokenPairs.batch`.

    Its static shapes have no rows or lengths: otherwise each combination of
    them would be traced.

    Args:
        generate: Function that returns an iterator of batches.
        num_batches: Integer, the number of batches.
    """
    tokens = tf.TensorSpec((None, None), tf.int32)
    batches = tf.data.Dataset.from_generator(
        generate,
        output_signature=({"source": tokens, "target": tokens}, tokens),
    )
    # With an unknown number, Keras would warn when the batches end.
    known = tf.data.experimental.assert_cardinality(num_batches)
    return devices.share_batches(batches.apply(known))
