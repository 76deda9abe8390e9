"""Tokenised sentence pairs, in memory."""

import dataclasses

import numpy as np

from trainers import placeholders
from trainers.command_line import UserError
from trainers.sentence_pairs import Direction


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """Tokenised sentences with their translations, all in memory.

    A source is the token of the target's language, the text and the end
    token. A target is the start token, the text and the end token.

    Attributes:
        tokens: Integer array, all sources and targets one after the other.
        starts: Integer array `(2 * num_pairs + 1,)`: source `i` starts at
            `starts[2 * i]`, its target at `starts[2 * i + 1]`.
        directions: Dictionary of the `range` of pairs of each `Direction`.
        num_dropped: Integer, the number of pairs that were too long.
    """

    tokens: np.ndarray
    starts: np.ndarray
    directions: dict[Direction, range]
    num_dropped: int

    def __len__(self):
        return len(self.starts) // 2

    @property
    def nbytes(self):
        """Bytes of memory that the pairs take."""
        return self.tokens.nbytes + self.starts.nbytes

    def indices(self, direction=None):
        """Returns the numbers of all pairs, or of those of a `Direction`."""
        if direction is None:
            return np.arange(len(self))
        return np.array(self.directions[direction])

    def lengths(self, indices):
        """Returns the numbers of tokens that the model gets for pairs.

        Args:
            indices: Integer array `(n,)`, numbers of pairs.

        Returns:
            Integer array `(n, 2)`, tokens of the source and of the target. The
            target is one shorter than stored: as the input it has no end token,
            as the label no start token.
        """
        starts = self.starts[2 * indices[:, None] + np.arange(3)]
        return np.diff(starts) - [0, 1]

    def batch(self, indices):
        """Returns inputs and labels for `transformer_nmt`, padded with 0.

        Args:
            indices: Integer array `(n,)`, numbers of pairs.

        Returns:
            Tuple of a dictionary of the `"source"` `(n, source_length)` and
            the `"target"` `(n, target_length)`, and the labels, of the shape
            of the target.
        """
        source_lengths, target_lengths = self.lengths(indices).T
        source = self._padded(self.starts[2 * indices], source_lengths)
        starts = self.starts[2 * indices + 1]
        target = self._padded(starts, target_lengths)
        labels = self._padded(starts + 1, target_lengths)
        return {"source": source, "target": target}, labels

    def _padded(self, starts, lengths):
        columns = np.arange(lengths.max(initial=0))
        inside = columns < lengths[:, None]
        rows = np.zeros(inside.shape, np.int32)
        rows[inside] = self.tokens[(starts[:, None] + columns)[inside]]
        return rows


def tokenise(vocabulary, texts, max_length=None):
    """Tokenises pairs of texts.

    Args:
        vocabulary: `Vocabulary`.
        texts: Iterable of tuples as `SentencePairs.texts` yields them.
        max_length: Positive integer: pairs whose source or target has more
            tokens are left out. Defaults to `None`: none are.

    Returns:
        `TokenPairs`, sorted by direction; within one in the given order.

    Raises:
        UserError: If the vocabulary lacks a language, or all pairs are left
            out.
    """
    found = {}
    for direction, sources, targets in texts:
        if direction not in found:
            found[direction] = _Tokens(vocabulary, direction.target)
        found[direction].add(sources, targets, max_length)
    pairs = _joined(
        {direction: found[direction] for direction in sorted(found)}
    )
    if not pairs:
        raise UserError(
            f"All {pairs.num_dropped} pairs have more than {max_length} tokens "
            f"on a side. Raise --max_length. Received: {max_length}"
        )
    return pairs


class _Tokens:
    """Collects the tokens of the pairs of one direction."""

    def __init__(self, vocabulary, target_language):
        self._vocabulary = vocabulary
        self._language_token = vocabulary.language_token(target_language)
        # The smallest dtype that holds all ids, usually 2 bytes.
        self._dtype = np.min_scalar_type(vocabulary.size - 1)
        self.tokens = [np.zeros(0, self._dtype)]
        self.lengths = [np.zeros(0, np.int64)]
        self.num_dropped = 0

    def add(self, sources, targets, max_length):
        vocabulary = self._vocabulary
        found = [placeholders.find(source) for source in sources]
        sides = (
            vocabulary.encode(map(placeholders.replace, texts, found))
            for texts in (sources, targets)
        )
        sentences = []
        for source, target in zip(*sides, strict=True):
            source = [self._language_token, *source, vocabulary.end]
            target = [vocabulary.start, *target, vocabulary.end]
            if max_length and max(len(source), len(target) - 1) > max_length:
                self.num_dropped += 1
            else:
                sentences += [source, target]
        self.lengths.append(np.array([len(x) for x in sentences], np.int64))
        self.tokens.append(
            np.fromiter((t for x in sentences for t in x), self._dtype)
        )


def _joined(found):
    """Joins a dictionary from directions to `_Tokens` into `TokenPairs`."""
    directions, first = {}, 0
    for direction, tokens in found.items():
        last = first + sum(map(len, tokens.lengths)) // 2
        directions[direction] = range(first, last)
        first = last
    parts = list(found.values())
    lengths = np.concatenate([x for part in parts for x in part.lengths])
    return TokenPairs(
        tokens=np.concatenate([x for part in parts for x in part.tokens]),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        directions={key: x for key, x in directions.items() if x},
        num_dropped=sum(part.num_dropped for part in parts),
    )
