"""The translation trainer: its modes, and its errors."""

import contextlib
import io
import json
import math
import pathlib
import signal
import subprocess
import sys
import tempfile
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import flagsaver
from absl.testing import parameterized

from model_zoo import decoding
from tests import quick_python
from tests.devices import KIND
from tests.trainers import tiny_messages
from trainers import command_line
from trainers import translation
from trainers import translation_runs
from trainers.command_line import UserError
from trainers.interruption import Stopped
from trainers.job_config import JobConfig
from trainers.optimization import Optimization
from trainers.sentence_pairs import Direction
from trainers.sentence_pairs import SentencePairs
from trainers.translation_model import TranslationModel
from trainers.translator import Translator

MODEL_ARGS = {
    "num_layers": 1,
    "ffn_dim": 16,
    "num_heads": 2,
    "dim": 16,
    "head_size": 8,
    "dropout": 0.1,
}
OPTIMIZATION = Optimization(
    optimizer="adam",
    learning_rate=0.01,
    learning_rate_schedule="constant",
)


class TestCase(tf.test.TestCase, parameterized.TestCase):
    """Has a directory for datasets, which are prepared once."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.data_dir = pathlib.Path(directory.name)
        cls.vocabulary_path = cls.data_dir / "vocabularies" / "tiny.model"
        cls.vocabulary = tiny_messages.vocabulary(cls.vocabulary_path)

    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def train(self, optimization=OPTIMIZATION, config=None, **kwargs):
        """Returns the model, its scores and what was printed."""
        arguments = {
            "pairs": self.pairs(),
            "vocabulary": self.vocabulary_path,
            "batch_tokens": 200,
            "steps_per_epoch": 3,
            "max_length": 40,
            "num_test_pairs": 3,
            "model_args": MODEL_ARGS,
        }
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            network, scores = translation_runs.train_and_evaluate(
                self.config(**(config or {})),
                optimization,
                **{**arguments, **kwargs},
            )
        return network, scores, printed.getvalue()

    def config(self, **kwargs):
        arguments = {
            "num_stages": 2,
            "num_micro_batches": 2,
            "num_epochs": 2,
            "verbose": 0,
        }
        return JobConfig(**{**arguments, **kwargs})

    def pairs(self, dataset="tiny_messages", **kwargs):
        return SentencePairs([dataset], str(self.data_dir), **kwargs)

    def run_main(self, *arguments, stdin=""):
        """Returns what a command ends with, and what it prints."""
        argv = ["translation", f"--data_dir={self.data_dir}", *arguments]
        with (
            flagsaver.flagsaver(),
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(sys, "stdin", io.StringIO(stdin)),
            contextlib.redirect_stdout(io.StringIO()) as printed,
            self.assertRaises(SystemExit) as caught,
        ):
            command_line.run(
                translation.main,
                takes_arguments=True,
                dataset="tiny_messages",
                label_smoothing=0.1,
            )
        return caught.exception.code, printed.getvalue()

    def printed(self, *arguments, stdin=""):
        error, printed = self.run_main(*arguments, stdin=stdin)
        self.assertIsNone(error)
        return printed

    def error(self, *arguments):
        error, _ = self.run_main(*arguments)
        self.assertStartsWith(error, "Error: ")
        self.assertNotIn("\n", error)
        return error


class ModesTest(TestCase):
    @pytest.mark.slow
    def test_modes(self):
        workdir = self.make_directory()
        model_args = ",".join(f"{k}={v}" for k, v in MODEL_ARGS.items())
        flags = [
            f"--workdir={workdir}",
            f"--vocabulary={self.vocabulary_path}",
            f"--model_args={model_args}",
            "--directions=both",
            "--num_micro_batches=2",
            "--batch_tokens=200",
            "--num_epochs=1",
            "--steps_per_epoch=3",
            "--max_length=60",
            "--num_test_pairs=3",
            "--optimizer=adamw",
            "--optimizer_args=weight_decay=0.1",
            "--learning_rate=0.01",
            "--ema=0.9",
            "--verbose=0",
        ]
        printed = self.printed(*flags)
        self.assertIn("198 training pairs in 6 directions take", printed)
        self.assertRegex(printed, r"\d\d?\.\d% of the tokens are padding")
        self.assertIn(f"2 stages on {KIND}:0, {KIND}:1", printed)
        self.assertIn("batches of up to 200 tokens", printed)
        # A sample, the tables, the signatures.
        self.assertRegex(printed, r"en > \w\w: .*\n  reference: .*\n  model: ")
        self.assertRegex(printed, r"x > en .* all .* 3 ")
        self.assertRegex(printed, r"BLEU: nrefs:1.*\nchrF: nrefs:1")
        for name in (
            "flags.txt",
            "model.json",
            "losses.csv",
            "logs",
            "checkpoints/epoch_00001",
            "scores.png",
        ):
            self.assertTrue((workdir / name).exists(), name)
        scores = json.loads((workdir / "scores.json").read_text())["directions"]
        self.assertEqual(
            [(x["source"], x["target"], x["group"]) for x in scores],
            [
                ("en", "xx", "high"),
                ("en", "yy", "middle"),
                ("en", "zz", "low"),
                ("xx", "en", "high"),
                ("yy", "en", "middle"),
                ("zz", "en", "low"),
            ],
        )
        # The other modes need no flag but the directory.
        self.printed(f"--workdir={workdir}", "--mode=evaluate")
        again = json.loads((workdir / "scores.json").read_text())["directions"]
        for a, b in zip(scores, again, strict=True):
            self.assertAllClose(a.pop("loss"), b.pop("loss"))
            self.assertEqual(a, b)
        flags = [f"--workdir={workdir}", "--mode=translate"]
        printed = self.printed(*flags, "--to=yy", "save user", "", "view")
        lines = printed.splitlines()
        self.assertLen(lines, 3)
        stdin = "save user\n\nview\n"
        printed = self.printed(*flags, "--to=yy", stdin=stdin)
        self.assertEqual(printed.splitlines(), lines)
        # Nothing but "\n" ends a line.
        printed = self.printed(
            *flags, "--to=yy", stdin="save\u2028user\n\fview"
        )
        self.assertLen(printed.splitlines(), 2)
        self.assertEqual(self.printed(*flags, "--to=yy"), "")
        with mock.patch.object(Translator, "translate", return_value=["a\nb"]):
            printed = self.printed(*flags, "--to=yy", "save")
        self.assertEqual(printed, "a b\n")
        lost = tf.errors.UnavailableError(None, None, "Stage 1 has failed.")
        with mock.patch.object(decoding, "decode", side_effect=lost):
            for arguments in (
                [*flags, "--to=yy", "save"],
                [f"--workdir={workdir}", "--mode=evaluate"],
            ):
                self.assertRegex(
                    self.error(*arguments),
                    "Stage 1 has failed. The newest .*epoch_00001",
                )
        flags = [f"--workdir={workdir}", "--mode=predict"]
        printed = self.printed(*flags, "--to=yy", stdin=stdin)
        self.assertEqual(printed.splitlines(), lines)
        self.assertEndsWith(
            self.error(*flags, "save"), ": en, xx, yy, zz. Received: --to="
        )

    @pytest.mark.slow
    def test_several_replicas(self):
        config = {"strategy": "mirrored", "num_replicas": 2, "num_epochs": 1}
        _, scores, printed = self.train(
            config=config, pairs=self.pairs(languages=["xx", "zz"])
        )
        self.assertIn(f"{KIND}:0, {KIND}:1; {KIND}:2, {KIND}:3", printed)
        self.assertEqual([x.num_test for x in scores], [3, 3])

    @pytest.mark.slow
    def test_it_learns(self):
        _, scores, _ = self.train(
            OPTIMIZATION,
            {"num_epochs": 4},
            pairs=self.pairs(languages=["yy"]),
            steps_per_epoch=100,
            num_test_pairs=8,
            model_args={**MODEL_ARGS, "dim": 32, "dropout": 0.0},
        )
        (score,) = scores
        # So few words are learned by heart; an untrained model has less than 1.
        self.assertGreater(score.chrf, 10)
        self.assertLess(score.loss, 0.8 * math.log(self.vocabulary.size))

    @pytest.mark.slow
    def test_resumption_within_an_epoch(self):
        workdirs = [self.make_directory() for _ in range(2)]
        whole, whole_scores, _ = self.train(config={"workdir": workdirs[0]})

        begin = keras.callbacks.TensorBoard.on_epoch_begin

        def stop(self, epoch, logs=None):
            begin(self, epoch, logs)
            # In the second epoch, after its first step.
            if epoch == 1:
                signal.raise_signal(signal.SIGINT)

        with (
            mock.patch.object(
                keras.callbacks.TensorBoard, "on_epoch_begin", stop
            ),
            self.assertRaises(Stopped),
        ):
            self.train(config={"workdir": workdirs[1]})
        newest = max(x.name for x in workdirs[1].glob("checkpoints/*"))
        self.assertEqual(newest, "epoch_00001_step_000001")
        with self.assertRaisesRegex(UserError, "--num_replicas was 1, is 2"):
            self.train(config={"workdir": workdirs[1], "strategy": "mirrored"})
        parts, scores, _ = self.train(config={"workdir": workdirs[1]})
        for a, b in zip(whole.variables, parts.variables, strict=True):
            self.assertAllClose(a, b, atol=1e-6)
        self.assertEqual(scores, whole_scores)


class ErrorsTest(TestCase):
    def workdir(self, **kwargs):
        """Returns a working directory whose checkpoint is an empty folder."""
        workdir = self.make_directory()
        model = TranslationModel(
            **{
                "vocabulary": self.vocabulary,
                "model_args": MODEL_ARGS,
                "num_train": {Direction("en", x): 5 for x in ("xx", "yy")},
                **kwargs,
            }
        )
        model.keep(workdir, self.vocabulary_path)
        (workdir / "checkpoints" / "epoch_00001").mkdir(parents=True)
        return workdir

    @parameterized.parameters(
        ({"batch_tokens": 20}, "--batch_tokens=20"),
        ({"max_length": 2}, "Raise --max_length"),
        ({"vocabulary": "/nonsuch"}, "no vocabulary /nonsuch. Make it with"),
        ({"model_args": {"vocabulary": 9}}, "--model_args: vocabulary"),
        ({"model_args": {"layers": 9}}, "layers"),
        ({"model_args": {**MODEL_ARGS, "dim": 3}}, "`dim` must be even"),
    )
    def test_unfitting_arguments(self, arguments, message):
        with mock.patch.object(keras.Model, "fit") as fit:
            with self.assertRaisesRegex(UserError, message):
                self.train(**arguments)
        fit.assert_not_called()

    @parameterized.parameters(
        ({"dataset": "nonsuch"}, "no dataset 'nonsuch'"),
        ({"dataset": "tiny_empty_messages"}, "has no train pairs"),
        ({"languages": ["xx", "de"]}, "no train pairs in de. It has: xx, yy"),
    )
    def test_data(self, arguments, message):
        with self.assertRaisesRegex(UserError, message):
            self.train(pairs=self.pairs(**arguments))

    def test_directory_of_another_model(self):
        other = self.data_dir / "other.model"
        tiny_messages.vocabulary(other, size=330)
        two = self.pairs(languages=["xx", "yy"])
        for arguments, repair in (
            (
                {"vocabulary": other},
                "another vocabulary. .*--vocabulary=.*model",
            ),
            (
                {"model_args": {**MODEL_ARGS, "dim": 32}},
                "other hyper-parameters. .*--model_args=num_layers=1,.*dim=16",
            ),
            ({"pairs": self.pairs()}, "other languages. .*: en > xx, en > yy"),
            # The same model, but its checkpoint is an empty folder.
            ({}, "checkpoint .*epoch_00001 is damaged"),
        ):
            with self.assertRaisesRegex(UserError, repair):
                self.train(
                    config={"workdir": self.workdir()},
                    **{"pairs": two, **arguments},
                )

    @parameterized.parameters("evaluate", "translate")
    def test_directory_that_lacks_something(self, mode):
        def message(workdir):
            return self.error(f"--mode={mode}", f"--workdir={workdir}")

        self.assertRegex(
            message(self.make_directory()),
            "^Error: There is no trained model in .* "
            "python -m trainers.translation --workdir=",
        )
        for name, content in (
            ("model.json", None),
            ("model.json", b"{}"),
            ("vocabulary.model", None),
            ("vocabulary.model", b"x"),
        ):
            workdir = self.workdir()
            (workdir / name).unlink()
            if content is not None:
                (workdir / name).write_bytes(content)
            self.assertRegex(message(workdir), f"^Error: .*{name}")

    def test_vocabulary_that_was_exchanged(self):
        workdir = self.workdir()
        tiny_messages.vocabulary(workdir / "vocabulary.model", size=330)
        self.assertRegex(
            self.error("--mode=evaluate", f"--workdir={workdir}"),
            "is not the vocabulary that the checkpoint was trained with",
        )

    @parameterized.parameters(
        *("--of_another_trainer=3", "--num_epochs=x"),
        *("--of_another_trainer=3\n", "--num_epochs=x\n"),
    )
    def test_flags_of_another_trainer(self, line):
        self.assert_refuses_flags(line)

    @parameterized.parameters(
        *("", "\n", "\0\0\0\0\n", "--mode=train\nmax_length=40\n"),
        # The number was 40.
        *("--mode=train\n--max_len", "--mode=train\n--max_length=4"),
    )
    def test_flags_after_a_crash_of_the_host(self, text):
        self.assert_refuses_flags(text)

    def assert_refuses_flags(self, text):
        workdir = self.workdir()
        (workdir / "flags.txt").write_text(text)
        self.assertIn(
            "flags.txt is damaged, or of another trainer",
            self.error("--mode=evaluate", f"--workdir={workdir}"),
        )

    def test_dry_run_of_another_mode(self):
        self.assertRegex(
            self.error(
                *("--mode=evaluate", "--dry_run"),
                f"--workdir={self.workdir()}",
            ),
            "leave it or --mode out",
        )

    def test_model_of_other_languages(self):
        flags = [f"--workdir={self.workdir()}"]
        self.assertRegex(
            self.error(*flags, "--mode=evaluate", "--languages=xx,zz"),
            "trained with: xx, yy. Received: --languages=xx,zz",
        )
        self.assertRegex(
            self.error(*flags, "--mode=translate", "--to=zz", "save"),
            "translate into: xx, yy. Received: --to=zz",
        )

    @parameterized.parameters(
        (["--mode=nonsuch"], "nonsuch$"),
        (["--mode=translat"], r"--mode=translat. Did you mean translate\?"),
        (["--temperature=0.5"], "temperature"),
        (["--beam_size=0"], "beam_size"),
        # Told before training, not by a device out of memory after it.
        (["--beam_size=257"], "beam_size=257"),
        (["--max_length=65537"], "max_length=65537"),
        (["--steps_per_epoch=2147483648"], "steps_per_epoch=2147483648"),
        (["--num_epochs=2147483648"], "num_epochs=2147483648"),
        (["--label_smoothing=1"], "should be below 1"),
        (["--directions=de-x"], "directions"),
        (["save"], "are for --mode=translate. Received: .* save"),
        (["--to=de"], "are for --mode=translate. Received: .*--to=de"),
        (["--mode=translate", "save"], "needs the --workdir"),
        (["--mode=evaluate"], "needs the --workdir"),
        (["--dataset=tiny_mesages"], "Did you mean tiny_messages"),
        (
            ["--dataset=tiny_messages,tiny_messages"],
            "each data set once. Received: --dataset=tiny_messages,tiny_mess",
        ),
        (["--dataset=tiny_messages,"], "Received: --dataset=tiny_messages,$"),
        (["--strategy=tpu"], "differ in length.* Received: --strategy=tpu"),
        (
            ["--vocabulary_size=99"],
            r"There is no vocabulary .*tiny_messages_99.model. Make it with: "
            "python -m tools.prepare_data tiny_messages --vocabulary_size=99",
        ),
    )
    def test_bad_flags(self, arguments, message):
        self.assertRegex(self.error(*arguments), message)

    def test_workdir_that_cannot_be_written_to(self):
        error = self.error(
            "--workdir=/dev/null/nonsuch",
            f"--vocabulary={self.vocabulary_path}",
        )
        self.assertIn("Cannot write to --workdir", error)


class ProcessTest(TestCase):
    @parameterized.parameters("--workdir=/tmp/\udce9", "caf\udce9")
    def test_arguments_in_another_encoding(self, argument):
        # As Python reads bytes that are no UTF-8.
        error = self.error("--mode=translate", argument)
        self.assertIn("must be in UTF-8. Received: '", error)

    @parameterized.parameters("strict", "surrogateescape")
    def test_standard_input_in_another_encoding(self, errors):
        file = io.TextIOWrapper(io.BytesIO(b"save\ncaf\xe9\n"), "utf-8", errors)
        with self.assertRaisesRegex(UserError, "must be in UTF-8. .*e9"):
            translation._lines(file)
        self.assertEmpty(translation._lines(None))

    @pytest.mark.slow
    def test_error(self):
        result = subprocess.run(
            [
                *quick_python.command(),
                "-m",
                "trainers.translation",
                f"--data_dir={self.data_dir}",
            ],
            cwd=pathlib.Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 1)
        self.assertNotIn("Traceback", result.stderr)
        self.assertRegex(
            result.stderr.splitlines()[-1],
            "^Error: There is no vocabulary .*django_messages_4000.model. Make "
            "it with: python -m tools.prepare_data django_messages",
        )


if __name__ == "__main__":
    absltest.main()
