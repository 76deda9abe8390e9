"""`Translator`: translates texts with a trained model."""

import math

import numpy as np

from model_zoo import decoding
from tf_gpipe import progress
from trainers import placeholders
from trainers.command_line import UserError
from trainers.datasets import message_pairs
from trainers.weight_averages import averaged

# The number of hypotheses in a batch of the decoder.
_BATCH = 256
# The most rows times squared length: the encoder's attention takes as much
# memory. Beside a long text, short ones are padded to its length.
_SQUARES = 256 * 256**2


class Translator:
    """Translates texts with a `transformer_nmt`.

    Placeholders of a text appear unchanged in its translation.

    Args:
        model: The model, which may be a pipeline. If its optimizer keeps
            averages of the weights, these are used.
        vocabulary: `Vocabulary` that the model was trained with.
        max_length: Positive integer, the most tokens of a translation.
        beam_size: As of `model_zoo.decoding.decode`. Defaults to `1`: greedy.
        length_penalty: As of `model_zoo.decoding.decode`.

    Example:

    ```python
    translator = Translator(model, vocabulary, max_length=64)
    translator.translate(["Save", "Delete"], ["de", "fr"])
    ```
    """

    def __init__(
        self, model, vocabulary, max_length, beam_size=1, length_penalty=0.6
    ):
        self._model = model
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._beam_size = beam_size
        self._length_penalty = length_penalty

    @progress.shown(after=progress.PATIENCE)
    def translate(self, texts, languages):
        """Returns translations.

        Args:
            texts: List of strings.
            languages: List of strings, the target language of each text.

        Returns:
            List of strings, empty ones for blank texts.

        Raises:
            UserError: If the vocabulary lacks a language, or a text is so long
                that by itself it would fill the memory.
        """
        vocabulary = self._vocabulary
        # Normalised like the texts that the model was trained on.
        texts = list(map(message_pairs.normalized, texts))
        found = [placeholders.find(text) for text in texts]
        masked = map(placeholders.replace, texts, found)
        sources = [
            [vocabulary.language_token(language), *tokens, vocabulary.end]
            for language, tokens in zip(
                languages, vocabulary.encode(masked), strict=True
            )
        ]
        for text, source in zip(texts, sources, strict=True):
            if len(source) ** 2 > _SQUARES:
                raise UserError(
                    f"A text must have at most {math.isqrt(_SQUARES) - 2} "
                    "tokens: give one sentence or paragraph a line. Received "
                    f"one of {len(source) - 2}: {text[:40]!r}..."
                )
        # Sorted by length: a batch takes as long as its longest translation.
        order = np.argsort([len(source) for source in sources], kind="stable")
        order = [i for i in order if texts[i]]
        rows = max(1, _BATCH // self._beam_size)
        translations = [""] * len(texts)
        batches = []
        while order:
            most = _SQUARES // len(sources[order[-1]]) ** 2
            count = max(1, min(rows, most))
            batches.append(order[-count:])
            del order[-count:]
        with averaged(self._model):
            for selected in progress.track(batches, "translating"):
                decoded = self._decode([sources[i] for i in selected])
                for i, text in zip(selected, decoded, strict=True):
                    translations[i] = placeholders.restore(text, found[i])
        return translations

    def _decode(self, sources):
        padded = np.zeros((len(sources), len(sources[-1])), np.int32)
        for row, source in zip(padded, sources, strict=True):
            row[: len(source)] = source
        tokens = decoding.decode(
            self._model,
            padded,
            self._vocabulary.start,
            self._vocabulary.end,
            self._max_length,
            beam_size=self._beam_size,
            length_penalty=self._length_penalty,
        )
        return self._vocabulary.decode(tokens.numpy())
