"""What the experiments compare, and the table made from the scores."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver
from absl.testing import parameterized

import model_zoo
from tests.trainers import tiny_messages
from tf_gpipe.commands.flags import keyword_arguments
from tools import translation_experiments
from trainers import translation
from trainers import translation_runs

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted(ROOT.glob("trainers/recipes/translation_*.cfg"))


def num_parameters(model_args, vocabulary=64):
    model_args = keyword_arguments(model_args)
    with keras.StatelessScope(initialize_variables=False):
        model = model_zoo.get(
            "transformer_nmt", **model_args, vocabulary=vocabulary
        )
    return model.count_params()


class RecipesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*RECIPES)
    def test_flags(self, path):
        with flagsaver.flagsaver():
            flags.FLAGS(["translation", f"--flagfile={path}"])
            self.assertIn("translation", path.name)
            self.assertGreater(num_parameters(flags.FLAGS.model_args), 1000)
            # Some hold for one dataset only.
            self.assertIn(f"--dataset={flags.FLAGS.dataset}", path.read_text())

    def test_default_job(self):
        path = ROOT / "trainers/recipes/translation_django.cfg"
        with flagsaver.flagsaver():
            for name, value in translation._DEFAULTS.items():
                flags.FLAGS.set_default(name, value)
            lines = [x for x in path.read_text().splitlines() if x[0] != "#"]
            names = [x.removeprefix("--").partition("=")[0] for x in lines]
            defaults = {name: flags.FLAGS[name].value for name in names}
            flags.FLAGS(["translation", f"--flagfile={path}"])
            found = {name: flags.FLAGS[name].value for name in names}
        defaults["model_args"] = translation_runs._MODEL_ARGS
        defaults["languages"] = translation._SLAVIC
        found["model_args"] = keyword_arguments(found["model_args"])
        self.assertEqual(found, defaults)
        self.assertContainsSubset(translation._DEFAULTS, found)


class ExperimentsTest(tf.test.TestCase, parameterized.TestCase):
    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def write(self, workdir, **chrf):
        workdir.mkdir(parents=True)
        directions = [
            {
                "target": language,
                "loss": 2.0,
                "bleu": value / 2,
                "chrf": value,
                "copy_chrf": 7.0,
            }
            for language, value in chrf.items()
        ]
        content = json.dumps({"directions": directions})
        (workdir / "scores.json").write_text(content)

    def main(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            translation_experiments.main([*arguments, "--json"])
        *lines, found = printed.getvalue().splitlines()
        return json.loads(found), "\n".join(lines)

    def test_languages(self):
        self.enterContext(
            mock.patch.multiple(
                translation_experiments,
                _DATASET=tiny_messages.TinyMessages.name,
                _MIN_PAIRS=20,
            )
        )
        directory = self.make_directory()
        runs = directory / "runs" / "languages"
        self.write(runs / "bilingual_xx", xx=30.0)
        self.write(runs / "bilingual_yy", yy=10.0)
        self.write(runs / "multilingual", xx=40.0, yy=30.0, zz=90.0)
        # All runs are done: only the scores are read.
        found, printed = self.main(
            "languages",
            f"--data_dir={directory / 'data'}",
            f"--workdir={directory / 'runs'}",
        )
        self.assertIn("Training pairs: yy 30, xx 60", printed)
        self.assertEqual(
            [(x["run"], x["languages"], x["chrf"]) for x in found],
            [
                ("bilingual", "yy", 10.0),
                ("bilingual", "xx", 30.0),
                ("multilingual", "yy", 30.0),
                ("multilingual", "xx", 40.0),
                ("bilingual", "mean", 20.0),
                ("multilingual", "mean", 35.0),
            ],
        )
        self.assertEqual(found[-1]["bleu"], 17.5)

    def test_depth(self):
        rows = translation_experiments._depth(None)
        arguments = [row.flags[0].removeprefix("--model_args=") for row in rows]
        counts = [num_parameters(x) for x in arguments]
        # More layers have more layer normalisations.
        self.assertAllClose(counts, [counts[0]] * 4, rtol=0.01)
        parsed = [keyword_arguments(x) for x in arguments]
        self.assertEqual([x["num_layers"] for x in parsed], [6, 3, 6, 3])
        measures = [
            (x.get("scale_ffn_init"), "logit_clip" in x) for x in parsed
        ]
        self.assertEqual(measures, [(None, False)] * 2 + [(False, True)] * 2)

    def test_batch(self):
        rows = translation_experiments._batch(None)
        with flagsaver.flagsaver():
            for row in rows:
                flags.FLAGS(["translation", *row.flags])
                self.assertEqual(
                    flags.FLAGS.batch_tokens * flags.FLAGS.steps_per_epoch,
                    translation_experiments._EPOCH_TOKENS,
                )
        directory = self.make_directory()
        for value, row in enumerate(rows):
            self.write(directory / "batch" / row.run, xx=value, yy=value + 2.0)
        found, printed = self.main("batch", f"--workdir={directory}")
        self.assertEqual([x["chrf"] for x in found], [1.0, 2.0, 3.0])
        self.assertEqual({x["languages"] for x in found}, {"all"})
        self.assertIn("8192 tokens", printed)

    def test_scores_of_other_flags(self):
        directory = self.make_directory()

        def run(command, cwd, stdout):
            (workdir,) = (
                x.removeprefix("--workdir=")
                for x in command
                if x.startswith("--workdir=")
            )
            self.write(pathlib.Path(workdir), xx=1.0)
            return 0

        with mock.patch.object(
            translation_experiments.workers, "run_in_foreground", run
        ):
            for _ in range(2):
                self.main("batch", f"--workdir={directory}", "--num_epochs=1")
            with self.assertRaisesRegex(SystemExit, "with other flags: .*=1\n"):
                self.main("batch", f"--workdir={directory}")

    @pytest.mark.slow
    def test_failure(self):
        with self.assertRaisesRegex(SystemExit, "^Error: the run .* failed"):
            self.main(
                "batch", f"--workdir={self.make_directory()}", "--nonsuch"
            )
