"""`Vocabulary`: word pieces shared by all languages."""

import hashlib
import io
import pathlib
import re
import urllib.parse

import sentencepiece
import tensorflow_datasets as tfds

from tf_gpipe.whole_files import replacing
from trainers import placeholders
from trainers.command_line import UserError

# The ids of sentencepiece's control symbols. Tokens of languages follow.
_PADDING, _START, _END, _UNKNOWN = range(4)
_LANGUAGE = re.compile(r"<2(.+)>")


class Vocabulary:
    """Word pieces with ids, by sentencepiece.

    Any text can be encoded: a character that is not in the vocabulary becomes
    its UTF-8 bytes. `decode` returns the encoded text unchanged, with white
    space and line breaks; only the character U+2581, sentencepiece's symbol of
    a space, becomes a space. Texts are not normalised: they should be in
    Unicode's form NFC, like the texts that vocabularies are trained on.

    Id 0 is padding, 1 the start of a text, 2 its end, and 3 an unknown
    character, which never occurs. Then there is a token for each language,
    `<2de>`, which tells a model what to translate into. No text is encoded to
    any of these, not even `"<2de>"`. The symbols of `placeholders` are tokens,
    too.

    Args:
        model: Bytes, a model of sentencepiece as `train` makes it.

    Raises:
        ValueError: If `model` is no such model.

    Example:

    ```python
    vocabulary = Vocabulary.load(vocabulary_path(["django_messages"], 8000))
    ids = vocabulary.encode(["Save and continue editing"])
    source = [vocabulary.language_token("de"), *ids[0], vocabulary.end]
    vocabulary.decode([source])  # ["Save and continue editing"]
    ```
    """

    start = _START
    end = _END

    def __init__(self, model):
        try:
            # sentencepiece logs an error for empty bytes, but raises none.
            processor = sentencepiece.SentencePieceProcessor(
                model_proto=model or b"\0"
            )
        except RuntimeError as error:
            raise ValueError("not a model of sentencepiece") from error
        self._processor = processor
        # A hash of the model, to compare with a checkpoint's vocabulary.
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self._tokens = {}
        for index in range(_UNKNOWN + 1, self.size):
            match = _LANGUAGE.fullmatch(processor.id_to_piece(index))
            if not match or not processor.is_control(index):
                break
            self._tokens[match[1]] = index
        special = (
            processor.pad_id(),
            processor.bos_id(),
            processor.eos_id(),
            processor.unk_id(),
        )
        if not self._tokens or special != (_PADDING, _START, _END, _UNKNOWN):
            raise ValueError("a model of sentencepiece for something else")

    @classmethod
    def load(cls, path):
        """Loads a vocabulary that `train` has saved.

        Args:
            path: Path of the file.

        Raises:
            UserError: If there is no such file, or it is damaged.
        """
        path = pathlib.Path(path)
        try:
            return cls(path.read_bytes())
        except FileNotFoundError as error:
            raise UserError(
                f"There is no vocabulary {path}. Make it with: {_command(path)}"
            ) from error
        except (OSError, ValueError) as error:
            raise UserError(
                f"The vocabulary {path} cannot be used: {error}. Make it again "
                f"with: {_command(path)}"
            ) from error

    @classmethod
    def train(cls, sentences, size, languages, path):
        """Trains a vocabulary and saves it.

        The same sentences in the same order give the same file.

        Args:
            sentences: Iterable of strings. Those of more than 4,192 bytes are
                ignored.
            size: Positive integer, the number of ids.
            languages: Iterable of strings, the codes of the languages that
                get a token.
            path: Path of the file, which is written when training is done.

        Returns:
            The `Vocabulary`.

        Raises:
            UserError: If the sentences are too few, or too varied, for a
                vocabulary of this size, or it cannot be saved.
        """
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=size,
                pad_id=_PADDING,
                bos_id=_START,
                eos_id=_END,
                unk_id=_UNKNOWN,
                control_symbols=[
                    f"<2{language}>" for language in sorted(set(languages))
                ],
                user_defined_symbols=list(placeholders.SYMBOLS),
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                # With several threads the order of sums, and so the file,
                # would vary.
                num_threads=1,
                # Log errors only, which are raised, too.
                minloglevel=2,
            )
        except RuntimeError as error:
            # Without the text of the failed check, and without advice about an
            # option that users cannot set here.
            reason = str(error).rpartition("] ")[2].partition(" Increase")[0]
            raise UserError(
                f"Cannot make a vocabulary of size {size} of these sentences. "
                f"{reason}"
            ) from error
        vocabulary = cls(model.getvalue())
        path = pathlib.Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                partial.write_bytes(model.getvalue())
        except OSError as error:
            raise UserError(
                f"Cannot save the vocabulary {path}: {error}"
            ) from error
        return vocabulary

    @property
    def size(self):
        """The number of ids."""
        return self._processor.vocab_size()

    @property
    def languages(self):
        """Sorted list of the codes of languages that have tokens."""
        return sorted(self._tokens)

    def language_token(self, language):
        """Returns the id of the token of a target language.

        Args:
            language: String, one of `languages`.

        Raises:
            UserError: If the language has no token.
        """
        if language not in self._tokens:
            raise UserError(
                f"The vocabulary has no language {language!r}. It has: "
                f"{', '.join(self.languages)}"
            )
        return self._tokens[language]

    def encode(self, texts):
        """Returns the ids of texts, without start and end.

        Args:
            texts: Iterable of strings.

        Returns:
            List of lists of integers.
        """
        texts = list(texts)
        return self._processor.encode(texts) if texts else []

    def decode(self, ids):
        """Returns the texts of ids.

        Args:
            ids: List of lists of integers, or array `(num_texts, length)`.
                Ids after the first `end` are ignored, and so are padding,
                `start` and tokens of languages.

        Returns:
            List of strings.
        """
        texts = []
        for row in ids:
            row = [int(index) for index in row]
            if _END in row:
                row = row[: row.index(_END)]
            texts.append(self._processor.decode(row) if row else "")
        return texts


def vocabulary_path(names, size, data_dir=None):
    """Returns the path where `tools.prepare_data` saves a vocabulary.

    It is `vocabularies/NAME+NAME_SIZE.model` in the data directory, with the
    names in alphabetical order.

    Args:
        names: List of strings, the TFDS datasets that share the vocabulary.
        size: Positive integer, the number of ids.
        data_dir: Path, the directory of datasets. Defaults to that of TFDS.
    """
    directory = pathlib.Path(
        tfds.core.constants.DATA_DIR if data_dir is None else data_dir
    )
    # The name of a dataset's configuration follows a slash.
    names = (urllib.parse.quote(name, safe="") for name in sorted(set(names)))
    return directory / "vocabularies" / f"{'+'.join(names)}_{size}.model"


def _command(path):
    """Returns the command that makes a vocabulary at `path`."""
    names, size, data_dir = "DATASET", "SIZE", "DIRECTORY"
    match = re.fullmatch(r"(.+)_(\d+)\.model", path.name)
    if match and path.parent.name == "vocabularies":
        names = urllib.parse.unquote(match[1].replace("+", " "))
        size, data_dir = match[2], path.parent.parent
    return (
        f"python -m tools.prepare_data {names} --vocabulary_size={size} "
        f"--data_dir={data_dir}"
    )
