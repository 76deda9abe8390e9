"""The description of a translation model: vocabulary, hyper-parameters."""

import dataclasses
import json
import pathlib
from typing import Any

from tf_gpipe.checkpoints.store import Store
from tf_gpipe.checks import near
from tf_gpipe.whole_files import replacing
from trainers.command_line import UserError
from trainers.sentence_pairs import Direction
from trainers.vocabulary import Vocabulary

# Names of files in the working directory.
_MODEL = "model.json"
_VOCABULARY = "vocabulary.model"


@dataclasses.dataclass(frozen=True)
class TranslationModel:
    """The description of a translation model, all but its weights.

    Attributes:
        vocabulary: `Vocabulary` that texts are tokenised with.
        model_args: Dictionary of hyper-parameters of `transformer_nmt`, except
            the vocabulary's size.
        num_train: Dictionary from each `Direction` to its number of training
            pairs.
    """

    vocabulary: Vocabulary
    model_args: dict[str, Any]
    num_train: dict[Direction, int]

    @property
    def targets(self):
        """Sorted list of the languages that the model translates into."""
        return sorted({direction.target for direction in self.num_train})

    def keep(self, workdir, vocabulary_path):
        """Writes the description to a working directory.

        If there is a checkpoint already, compares it with the one there.

        Args:
            workdir: Path of the working directory.
            vocabulary_path: Path of the vocabulary's file, which is copied.

        Raises:
            UserError: If the directory has a checkpoint of another model.
        """
        workdir = pathlib.Path(workdir)
        if Store(workdir / "checkpoints").newest():
            self._check(self.load(workdir), workdir)
            return
        content = json.dumps(
            {
                "vocabulary": self.vocabulary.fingerprint,
                "model_args": self.model_args,
                "num_train": {str(x): n for x, n in self.num_train.items()},
            },
            indent=1,
        )
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            model = pathlib.Path(vocabulary_path).read_bytes()
            with replacing(workdir / _VOCABULARY) as path:
                path.write_bytes(model)
            with replacing(workdir / _MODEL) as path:
                path.write_text(content + "\n")
        except OSError as error:
            raise UserError(f"Cannot write to --workdir: {error}") from error

    @classmethod
    def load(cls, workdir):
        """Returns the description of the model in a working directory.

        Args:
            workdir: Path of the working directory.

        Raises:
            UserError: If there is no checkpoint, or a file of the description
                is missing or damaged.
        """
        workdir = pathlib.Path(workdir)
        if not Store(workdir / "checkpoints").newest():
            raise UserError(
                f"There is no trained model in {workdir}. Train one with: "
                f"python -m trainers.translation --workdir={workdir}"
            )
        again = (
            "Put back the file that the run has written, or train again in "
            "another directory."
        )
        try:
            content = json.loads((workdir / _MODEL).read_text())
            fingerprint = content["vocabulary"]
            model_args = content["model_args"]
            num_train = {
                Direction(*name.split(" > ")): number
                for name, number in content["num_train"].items()
            }
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{workdir / _MODEL} is missing or damaged. {again}"
            ) from error
        path = workdir / _VOCABULARY
        vocabulary = Vocabulary.load(path) if path.exists() else None
        if vocabulary is None or vocabulary.fingerprint != fingerprint:
            raise UserError(
                f"{path} is missing or is not the vocabulary that the "
                f"checkpoint was trained with. {again}"
            )
        return cls(vocabulary, model_args, num_train)

    def target(self, language):
        """Returns the language to translate into.

        Args:
            language: String, or `None` if there is only one.

        Raises:
            UserError: If the model is not trained to translate into it.
        """
        if language is None and len(self.targets) == 1:
            return self.targets[0]
        if language not in self.targets:
            raise UserError(
                "--to must be a language that the model was trained to "
                f"translate into: {', '.join(self.targets)}. Received: "
                f"--to={language or ''}{near([language or ''], self.targets)}"
            )
        return language

    def check_languages(self, languages):
        """Checks that the model was trained with languages beside English.

        Args:
            languages: List of strings.

        Raises:
            UserError: If it was not trained with one of them.
        """
        trained = {direction.other for direction in self.num_train}
        if not trained >= set(languages):
            raise UserError(
                "--languages must be some that the model was trained with: "
                f"{', '.join(sorted(trained))}. Received: "
                f"--languages={','.join(languages)}"
            )

    def _check(self, other, workdir):
        """Raises an error if a checkpoint's description, `other`, differs."""
        if self.vocabulary.fingerprint != other.vocabulary.fingerprint:
            what = "another vocabulary"
            repair = f"--vocabulary={workdir / _VOCABULARY}"
        elif self.model_args != other.model_args:
            what = "other hyper-parameters"
            repair = "--model_args=" + ",".join(
                f"{name}={value!r}" for name, value in other.model_args.items()
            )
        elif set(self.num_train) != set(other.num_train):
            what = "other languages"
            repair = (
                "its --dataset, --directions and --languages: "
                + ", ".join(map(str, other.num_train))
            )
        else:
            return
        raise UserError(
            f"The checkpoint in {workdir} is of a model with {what}. Go on "
            f"with {repair}. Or choose another --workdir."
        )
