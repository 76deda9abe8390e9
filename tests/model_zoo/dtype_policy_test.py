"""Layers in a block have the block's policy, wherever it comes from."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import model_zoo

SIZES = {
    "resnet_small": {"num_blocks": 2, "num_filters": 4},
    "resnet50": {"num_filters": 4, "input_shape": (32, 32, 3)},
    "amoebanet_d": {
        "num_layers": 3,
        "num_filters": 8,
        "num_classes": 4,
        "input_shape": (16, 16, 3),
        "num_stem_reductions": 0,
        "aux_head": True,
    },
    "transformer_lm": {
        "num_layers": 1,
        "dim": 8,
        "ffn_dim": 16,
        "num_heads": 2,
        "vocabulary": 5,
        "length": 4,
        "dropout": 0.1,
    },
}


class DtypePolicyTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(
            keras.config.set_dtype_policy, keras.config.dtype_policy()
        )

    @parameterized.parameters(*SIZES)
    @pytest.mark.slow_after(1)
    def test_policy_of_another_time(self, name):
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = keras.Sequential(model_zoo.get(name, **SIZES[name]))
        path = pathlib.Path(self.get_temp_dir(), "model.keras")
        model.save(path)
        x = np.ones((2, *model.input_shape[1:]), "float32")
        expected = model(x)
        keras.config.set_dtype_policy("float32")
        loaded = keras.saving.load_model(path)
        for layer in loaded._flatten_layers(include_self=False):
            if not isinstance(layer, keras.layers.InputLayer):
                self.assertEqual(
                    layer.compute_dtype, "bfloat16", f"{layer.path}"
                )
        for found, y in zip(
            keras.tree.flatten(loaded(x)),
            keras.tree.flatten(expected),
            strict=True,
        ):
            self.assertEqual(found.dtype, tf.bfloat16)
            self.assertAllEqual(found, y)


if __name__ == "__main__":
    tf.test.main()
