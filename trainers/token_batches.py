"""Batches of sentence pairs of similar length, drawn by language."""

import itertools

import numpy as np
import tensorflow as tf

from trainers import devices
from trainers.command_line import UserError

# How many batches are formed at a time, of pairs that are sorted by length:
# with more of them there is less padding.
_POOL = 300


class TokenBatches:
    """Draws pairs and puts those of similar length into a batch.

    A direction with `n` pairs has a share of `n ** (1 / temperature)`, divided
    by the sum over all directions. Within an epoch the pairs of a direction
    are drawn in random order, none again before all have been drawn.

    Pairs are drawn for many batches at a time, sorted by length, cut into
    batches, and the batches are shuffled. What fills no batch goes to the next
    ones.

    Args:
        pairs: `TokenPairs` to train with.
        batch_tokens: Positive integer: a batch has as many pairs as fit, each
            with as many tokens as the longest source and the longest target
            of the batch have together.
        temperature: Float, at least 1: with 1, shares are proportional to the
            numbers of pairs; infinity makes all directions equal. Defaults to
            `1.0`.
        num_replicas: Positive integer, by which the number of pairs in a batch
            is divisible. Defaults to `1`.
        seed: Integer. Defaults to `0`.

    Raises:
        UserError: If the longest pair would fit no batch, or there are too
            few pairs.

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
        # Of a pool, by pairs that are as long as the mean.
        means = [lengths[x].mean() for x in self._ranges]
        self._pool = int(
            _POOL * batch_tokens // (2 * np.dot(self._shares, means))
        )

    def shares(self):
        """Returns the share of pairs of each `Direction`, as a dictionary."""
        return dict(zip(self._pairs.directions, self._shares, strict=True))

    def epochs(self, first, last, steps_per_epoch):
        """Returns the batches of epochs `first` to `last - 1`.

        Those of an epoch follow from the seed and its number.

        Args:
            first: Integer.
            last: Integer.
            steps_per_epoch: Positive integer.

        Returns:
            `tf.data.Dataset` of what `TokenPairs.batch` returns.
        """

        def generate():
            for epoch in range(first, last):
                indices = self.indices(epoch)
                for rows in itertools.islice(indices, steps_per_epoch):
                    yield self._pairs.batch(rows)

        return _dataset(generate, (last - first) * steps_per_epoch)

    def indices(self, epoch):
        """Yields the pairs of each batch of an epoch, which never ends.

        Args:
            epoch: Integer.
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
            # Else those of one length would stay sorted by language.
            drawn = generator.permutation(np.concatenate([left, *drawn]))
            *batches, left = cut(
                self._pairs, drawn, self._batch_tokens, self._num_replicas
            )
            for index in generator.permutation(len(batches)):
                yield batches[index]

    def padding(self):
        """Returns the share of padding in tokens, of a sample of batches."""
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
        while len(self._rest) < count:
            more = self._generator.permutation(self._numbers)
            self._rest = np.concatenate([self._rest, more])
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
        List of integer arrays, which in the order of the list are `indices`
        sorted. The last one is what remains: it may have less than would fit,
        nothing, or a number of pairs that is not divisible.
    """
    lengths = pairs.lengths(indices)
    # By the target, then by the source: up and down by turns, lest short and
    # long sources meet in a batch where the next length of targets begins.
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
    """Returns batches to evaluate with.

    Args:
        pairs: `TokenPairs`.
        indices: Integer array `(n,)`, numbers of pairs.
        batch_tokens: As of `TokenBatches`.
        num_replicas: As of `TokenBatches`. Where there are too few pairs, some
            rows are nothing but padding.

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
    """Returns a `tf.data.Dataset` of what `TokenPairs.batch` returns.

    Rows and lengths are left open, lest each of them be traced anew.

    Args:
        generate: Function that returns an iterator of batches.
        num_batches: Integer, how many there are.
    """
    tokens = tf.TensorSpec((None, None), tf.int32)
    batches = tf.data.Dataset.from_generator(
        generate,
        output_signature=({"source": tokens, "target": tokens}, tokens),
    )
    # Keras warns otherwise when they end.
    known = tf.data.experimental.assert_cardinality(num_batches)
    return devices.share_batches(batches.apply(known))
