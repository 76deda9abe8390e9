"""The table of KerasHub's models, and a sample of it."""

import json
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

pytest.importorskip("keras_hub", exc_type=ImportError)

from tests import pairwise  # noqa: E402
from tools.keras_hub import __main__ as command  # noqa: E402
from tools.keras_hub import backbones  # noqa: E402
from tools.keras_hub import data  # noqa: E402
from tools.keras_hub import table  # noqa: E402
from tools.keras_hub import trial  # noqa: E402

GOOD = {
    "names": ["ABackbone", "ATask"],
    "micro_batches": 2,
    "K=2": {"parameters": [10, 30], "float32": 1e-6},
    "K=4": {"parameters": [10, 10, 10, 10], "float64": 1e-12},
    "predict": "pipeline",
    "export": "to_keras()",
}


class TableTest(tf.test.TestCase, parameterized.TestCase):
    def test_of_a_good_one(self):
        self.assertEmpty(table.problems(GOOD))
        self.assertEqual(table.fullest(GOOD, 2), 1.5)
        text = table.markdown([GOOD])
        self.assertIn(
            "| ABackbone | ATask | 2 | 1.50 | 1.00 | 1e-06 | 1e-12 | - | yes "
            "| - | `to_keras()` | - | - |",
            text,
        )
        self.assertIn("1 of 1 backbones", text)

    @parameterized.parameters(
        ({"errors": {"process": "more than 9 s"}}, "more than 9 s"),
        ({"K=2": {"float32": 1e-4}, "K=4": {}}, "1.0e-04 of a variable's"),
        (
            {"K=4": {"float64": 1e-8}},
            "1.0e-08 of a variable's largest in float64",
        ),
        ({"export": "differs"}, "`export`: differs"),
        (
            {
                "enable_lora": "differs",
                "errors": {
                    "enable_lora, pipeline": "1e-5 off",
                    "enable_lora, float64 pipeline": "1e-9 off",
                },
            },
            "`enable_lora`: differs: 1e-9 off",
        ),
    )
    def test_of_a_bad_one(self, changed, expected):
        (reason,) = table.problems({**GOOD, **changed})
        self.assertIn(expected, reason)

    def test_rounding_is_no_difference(self):
        for why in (
            {"rounding": 2e-4},
            # Equal if TensorFlow's rewriting of graphs is off.
            {"as written": 1e-6},
        ):
            place = {"parameters": [1, 1], "float32": 1e-3, **why}
            self.assertEmpty(table.problems({**GOOD, "K=2": place}))

    def test_fine_in_float64(self):
        row = {**GOOD, "enable_lora": "float64 pipeline"}
        self.assertEmpty(table.problems(row))
        self.assertIn("`to_keras()` | yes | - |", table.markdown([row]))

    def test_goes_on(self):
        path = self.get_temp_dir() + "/found.jsonl"
        backbone = "BertBackbone"
        rows = [
            {**GOOD, "names": [backbone, getattr(x, "__name__", None)]}
            for x in backbones.tasks_of(backbone)
        ]
        with open(path, "w") as file:
            file.writelines(json.dumps(x) + "\n" for x in rows)
        # The file has all rows already: nothing is tried.
        status = command.main(["--models=BertB", "--json", f"--file={path}"])
        self.assertEqual(status, 0)
        with open(path) as file:
            self.assertLen(file.readlines(), len(rows))

    def test_all_are_there(self):
        self.assertGreaterEqual(len(backbones.names()), 76)
        pairs = command.models()
        self.assertLen(set(pairs), len(pairs))
        self.assertIn(("BertBackbone", "BertTextClassifier"), pairs)


class DataTest(tf.test.TestCase):
    def test_one_scale_for_all_rows(self):
        """Stable Diffusion takes the scale of the first row."""
        x = {k: keras.Input((), name=k) for k in ("guidance_scale", "other")}
        model = keras.Model(x, keras.ops.add(*x.values()))
        made = data.inputs(model)
        self.assertLen(set(made["guidance_scale"]), 1)
        self.assertLen(set(made["other"]), data.ROWS)


class UsesTest(tf.test.TestCase):
    def test_all_errors_are_kept(self):
        def fails(model, plain, x, y):
            raise ValueError(model.compute_dtype)

        found = {}
        model = trial.make("BertBackbone", None)
        with mock.patch.dict(trial.USES, {"enable_lora": fails}, clear=True):
            trial.uses(found, "BertBackbone", None, model, model, None, None)
        self.assertEqual(found["enable_lora"], "plain Keras fails")
        self.assertEqual(
            found["errors"],
            {
                "enable_lora, pipeline": "ValueError: float32",
                "enable_lora, float64 pipeline": "ValueError: float64",
                "enable_lora, plain Keras": "ValueError: float32",
            },
        )


@pytest.mark.slow
class SampleTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *pairwise.some(
            (
                ("BertBackbone", "BertTextClassifier"),
                ("WhisperBackbone", None),
                ("GPT2Backbone", "GPT2CausalLM"),
                ("DenseNetBackbone", "DenseNetImageClassifier"),
            ),
            2,
        )
    )
    def test_trial(self, backbone, task):
        row = trial.run(backbone, task)
        self.assertEmpty(table.problems(row))
        self.assertEqual(row["predict"], "pipeline")
        self.assertLess(table.fullest(row, 2), 1.3)

    def test_what_a_first_call_makes(self):
        """A noise schedule, which must not be a tensor of the first graph."""
        model = trial.make("StableDiffusion3Backbone", None)
        x = keras.tree.map_structure(tf.constant, data.inputs(model))
        made = [
            tf.function(lambda x: model(x), autograph=False)(x)["images"]
            for _ in range(2)
        ]
        self.assertAllEqual(*made)

    def test_float32_within_a_model_of_float64(self):
        """Numbers differ only by what TensorFlow rewrites in float32.

        And by the order of sums in the gradients of projections, in float64.
        """
        x, y = trial.trained("LlamaBackbone", "LlamaCausalLM", "float64")[1:3]
        self.addCleanup(keras.config.set_floatx, "float32")
        differs = trial.as_written(
            "LlamaBackbone", "LlamaCausalLM", "float64", x, y, 4, 1
        )
        self.assertLess(differs, 1e-14)


if __name__ == "__main__":
    tf.test.main()
