"""Hyper-parameters of a wrong type or out of range are refused."""

import keras
from absl.testing import absltest
from absl.testing import parameterized

import model_zoo
from model_zoo import hyper_parameters
from model_zoo.transformer_nmt import transformer_nmt


class HyperParametersTest(parameterized.TestCase):
    @parameterized.parameters(
        ("resnet_small", {"num_blocks": -1}),
        ("resnet_small", {"num_blocks": 0}),
        ("resnet_small", {"num_blocks": 2.0}),
        ("resnet_small", {"num_blocks": None}),
        ("resnet_small", {"num_blocks": True}),
        ("resnet_small", {"num_filters": "4"}),
        ("resnet_small", {"momentum": -0.1}),
        ("resnet_small", {"momentum": float("nan")}),
        ("resnet_small", {"input_shape": (8, 8)}),
        ("resnet_small", {"input_shape": (8, -8, 1)}),
        ("resnet_small", {"input_shape": 8}),
        ("transformer_lm", {"dropout": -0.5}),
        ("transformer_lm", {"dropout": None}),
        ("unet", {"depth": None}),
        ("transformer_nmt", {"dropout": None}),
        ("transformer_lm", {"length": -1}),
        ("transformer_nmt", {"num_layers": -2}),
        ("transformer_nmt", {"tie_weights": 1}),
        ("transformer_nmt", {"source_length": 0}),
        ("amoebanet_d", {"aux_head": "x"}),
        ("unet", {"depth": -1}),
        # Too large to be meant: they would run for days.
        ("resnet_small", {"num_blocks": 2**31 - 1}),
        ("amoebanet_d", {"num_layers": 2**31 - 2}),
        ("transformer_lm", {"num_layers": 2**31 - 1}),
        ("transformer_nmt", {"num_layers": 2**15 + 1}),
        ("unet", {"depth": 2**15 + 1}),
        ("resnet_small", {"num_filters": 10**21}),
        ("resnet_small", {"input_shape": (10**21, 8, 1)}),
        ("transformer_lm", {"dropout": 10**400}),
        ("amoebanet_d", {"num_stem_reductions": 65}),
    )
    def test_refuses(self, model, arguments):
        (name,) = arguments
        given = dict(arguments)
        if model == "transformer_nmt":
            given = {"num_layers": 1, "ffn_dim": 2, "num_heads": 1, **given}
        with self.assertRaisesRegex(ValueError, f"`{name}` must be"):
            model_zoo.get(model, **given)

    @parameterized.parameters(
        ("resnet_small", {"num_blocks": 1, "num_filters": 2}),
        ("transformer_lm", {"num_layers": 1, "dim": 4, "length": None}),
    )
    def test_takes(self, model, arguments):
        if model == "transformer_lm":
            arguments |= {"num_heads": 1, "ffn_dim": 2, "vocabulary": 3}
        self.assertNotEmpty(model_zoo.get(model, **arguments))

    @parameterized.parameters(
        (keras.optimizers.Adam, {"beta_1": "a"}, True),
        (keras.optimizers.Adam, {"beta_1": -0.5}, True),
        (keras.optimizers.Adam, {"beta_1": None}, True),
        (transformer_nmt, {"logit_clip": None}, False),
        (keras.optimizers.Adam, {"weight_decay": "a"}, True),
        (keras.optimizers.Adam, {"weight_decay": None}, False),
        (keras.optimizers.Adam, {"amsgrad": 1}, True),
        (keras.optimizers.Adam, {"gradient_accumulation_steps": 1.5}, True),
        (keras.optimizers.SGD, {"momentum": float("inf")}, True),
        (keras.optimizers.Adam, {"weight_decay": 0.1, "name": "a"}, False),
        (keras.optimizers.Adafactor, {"beta_2_decay": -0.5}, False),
        (keras.optimizers.Muon, {"adam_lr_ratio": 0.1}, False),
        (keras.optimizers.Muon, {"exclude_layers": ["a"]}, False),
        (keras.optimizers.Adagrad, {"initial_accumulator_value": 2.0}, False),
    )
    def test_of_optimizers(self, optimizer, arguments, refused):
        try:
            hyper_parameters.check(optimizer, arguments)
        except ValueError as error:
            self.assertTrue(refused, error)
        else:
            self.assertFalse(refused, arguments)


if __name__ == "__main__":
    absltest.main()
