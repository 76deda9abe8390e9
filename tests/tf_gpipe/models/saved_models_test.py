"""Saved models load anywhere; `to_keras` returns the plain model."""

import os
import pathlib
import subprocess
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests import quick_python
from tests.devices import KIND
from tf_gpipe.devices import sharing
from tf_gpipe.models.saving import _plain_model

DEVICES = [f"{KIND}:{i}" for i in range(8)]
# Loads a model where there is the given number of devices, trains it, and saves
# what it finds.
ELSEWHERE = """
import sys, warnings
import keras, numpy as np, tensorflow as tf
number, path, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * number,
)
import tf_gpipe
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    model = keras.models.load_model(path)
told = [str(x.message) for x in found if "was saved with" in str(x.message)]
x = np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
before = model.predict(x, verbose=0)
model.fit(x, x[:, :2], verbose=0, shuffle=False)
np.savez(out, *model.get_weights(), before=before, told=np.array(told),
         devices=np.array([s.device for s in model.stages]))
"""


def numbers(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype="float32")


def plain(functional):
    keras.utils.set_random_seed(0)
    layers = [L.Dense(4, activation="tanh") for _ in range(5)]
    layers.append(keras.Sequential([L.Dense(4), L.Dense(2)]))
    model = keras.Sequential([keras.Input((4,)), *layers])
    if not functional:
        return model
    return keras.Model(model.inputs[0], model.outputs[0])


def pipelined(functional, **kwargs):
    model = plain(functional)
    if functional:
        return tf_gpipe.PipelinedModel.from_model(model, **kwargs)
    return tf_gpipe.PipelinedSequential(model, **kwargs)


class ElsewhereTest(tf.test.TestCase, parameterized.TestCase):
    @pairwise.each(
        kwargs=(
            {"num_stages": 4},
            {"num_stages": 4, "devices": DEVICES[:4]},
            {"num_stages": 3, "devices": [DEVICES[1], "CPU:0", DEVICES[3]]},
            {
                "num_stages": 6,
                "schedule": "interleaved",
                "devices": DEVICES[:3],
            },
        ),
        functional=(True, False),
        number=(1, 2),
    )
    @pytest.mark.slow_after(1)
    def test_fewer_devices(self, functional, kwargs, number):
        if KIND != "CPU":
            self.skipTest("The devices of a process are its own.")
        model = pipelined(functional, num_micro_batches=3, **kwargs)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        x = np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
        model.fit(x, x[:, :2], verbose=0, shuffle=False)
        folder = self.get_temp_dir()
        path = os.path.join(folder, "model.keras")
        model.save(path)
        out = os.path.join(folder, "out.npz")
        subprocess.run(
            [
                *(*quick_python.command(), "-c", ELSEWHERE),
                *(str(number), path, out),
            ],
            check=True,
            cwd=pathlib.Path(tf_gpipe.__file__).parents[1],
        )
        found = np.load(out)
        self.assertAllClose(found["before"], model.predict(x, verbose=0))
        model.fit(x, x[:, :2], verbose=0, shuffle=False)
        for i, v in enumerate(model.get_weights()):
            self.assertAllClose(found[f"arr_{i}"], v, rtol=1e-5, atol=1e-6)
        self.assertLen(found["told"], 1)
        self.assertIn("share", found["told"][0])
        self.assertLen(set(found["devices"]), number)
        self.assertLen(found["devices"], kwargs["num_stages"])


class SharingTest(tf.test.TestCase, parameterized.TestCase):
    """Which devices a loaded model gets, of the eight that the tests have."""

    @parameterized.parameters(
        (None, 8, 1),
        (["CPU:0", "CPU:7"], 2, 1),
        ([["CPU:0"], ["CPU:1"]], 1, 2),
    )
    def test_all_are_there(self, devices, num_devices, num_replicas):
        found = sharing.devices_here("m", devices, num_devices, num_replicas)
        self.assertEqual(found, devices)

    def test_one_of_several_replicas(self):
        grid = [["CPU:3", "CPU:1"], ["CPU:2", "CPU:0"]]
        found = sharing.devices_here("m", grid, 2, 1)
        self.assertEqual(found, ["CPU:3", "CPU:1"])
        self.assertIsNone(sharing.devices_here("m", grid[0], 2, 2))

    @parameterized.parameters(
        (["CPU:0", "CPU:9"], 2, [0, 1], "on others"),
        (["/job:worker/task:1/device:CPU:0"] * 2, 2, [0, 0], "on others"),
        ([f"TPU:{i}" for i in range(3)], 3, [0, 1, 2], "on others"),
        (None, 16, [i // 2 for i in range(16)], "share"),
        (
            [f"CPU:{i}" for i in range(12)],
            12,
            [8 * i // 12 for i in range(12)],
            "share",
        ),
    )
    def test_some_are_missing(self, devices, num_devices, expected, word):
        with self.assertWarnsRegex(UserWarning, f"'m' was saved.*{word}"):
            found = sharing.devices_here("m", devices, num_devices, 1)
        names = [x.name for x in tf.config.list_logical_devices(KIND)]
        self.assertEqual(found, [names[i] for i in expected])

    def test_name_of_a_model_whose_class_is_kept(self):
        class Own(keras.Model):
            pass

        model = plain(True)
        own = Own(model.inputs, model.outputs, name="mine")
        pipeline = tf_gpipe.PipelinedModel.from_model(
            own, num_stages=2, devices=DEVICES[:2]
        )
        config = pipeline.get_config()
        config["devices"] = ["CPU:0", "CPU:9"]
        with self.assertWarnsRegex(UserWarning, "'mine' was saved"):
            tf_gpipe.PipelinedModel._revived(config)

    def test_replicas(self):
        with self.assertWarnsRegex(UserWarning, "share"):
            found = sharing.devices_here("m", None, 8, 2)
        self.assertLen(found, 2)
        self.assertEmpty(set(found[0]) & set(found[1]))


class ToKerasTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(True, False)
    @pytest.mark.slow
    def test_is_the_plain_model(self, functional):
        model = pipelined(functional, num_stages=3, devices=DEVICES[:3])
        model.compile("adam", "mse")
        x, y = numbers(6, 4), numbers(6, 2)
        model.fit(x, y, verbose=0)
        made = model.to_keras()
        self.assertIs(type(made), type(plain(functional)))
        self.assertEqual(made.name, model.name)
        self.assertFalse(made.compiled)
        for a, b in zip(made.variables, model.variables, strict=True):
            self.assertIs(a, b)
        self.assertEqual(
            [x.name for x in made.layers], [x.name for x in model.layers]
        )
        self.assertAllClose(made(x), model(x))
        self.assertAllClose(
            made.predict(x, verbose=0), model.predict(x, verbose=0)
        )
        # Both train the same weights, and go on alike.
        made.compile(keras.optimizers.SGD(0.1), "mse")
        made.fit(x, y, verbose=0)
        self.assertAllClose(made(x), model(x))
        model.fit(x, y, verbose=0)
        self.assertAllClose(made(x), model(x))

    @parameterized.parameters(True, False)
    def test_files(self, functional):
        model = pipelined(functional, num_stages=3, devices=DEVICES[:3])
        x = numbers(6, 4)
        folder = self.get_temp_dir()
        model.to_keras().save(f"{folder}/a.keras")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = keras.models.load_model(f"{folder}/a.keras")
        self.assertNotIsInstance(loaded, type(model))
        self.assertAllClose(loaded(x), model(x))
        model.to_keras().export(f"{folder}/served", verbose=False)
        served = tf.saved_model.load(f"{folder}/served")
        self.assertAllClose(served.serve(x), model(x))
        copy = keras.models.clone_model(model.to_keras())
        copy.set_weights(model.get_weights())
        self.assertAllClose(copy(x), model(x))
        for v in copy.variables:
            self.assertIn(f"{KIND}:0", v.value.device)

    @parameterized.parameters(True, False)
    def test_keeps_the_class(self, functional):
        base = keras.Model if functional else keras.Sequential

        class Own(base):
            scale = 3.0

            def scaled(self, x):
                return self.scale * self(x)

        model = plain(functional)
        args = (model.inputs, model.outputs)
        own = (
            Own(*args)
            if functional
            else Own([keras.Input((4,)), *model.layers])
        )
        own.note = "kept"
        own.trainable = False
        make = tf_gpipe.PipelinedSequential
        if functional:
            make = tf_gpipe.PipelinedModel.from_model
        pipeline = make(own, num_stages=2, devices=DEVICES[:2])
        made = pipeline.to_keras()
        self.assertIs(type(made), Own)
        self.assertEqual(made.note, "kept")
        self.assertFalse(made.trainable)
        self.assertAllClose(
            made.scaled(numbers(6, 4)), 3.0 * model(numbers(6, 4))
        )
        # It has no attribute of a pipeline.
        self.assertContainsSubset(vars(made).keys(), vars(own).keys())

    def test_of_a_subclass(self):
        class Own(tf_gpipe.PipelinedSequential):
            pass

        model = Own(plain(False).layers, num_stages=2, devices=DEVICES[:2])
        model.build((None, 4))
        self.assertIs(type(model.to_keras()), keras.Sequential)

    def test_of_a_model_that_is_not_built(self):
        model = tf_gpipe.PipelinedSequential([L.Dense(4)])
        with self.assertRaisesRegex(ValueError, "has not been built"):
            model.to_keras()

    def test_back_again(self):
        model = pipelined(True, num_stages=3, devices=DEVICES[:3])
        again = tf_gpipe.PipelinedModel.from_model(
            model.to_keras(), num_stages=2, devices=DEVICES[:2]
        )
        self.assertAllClose(again(numbers(6, 4)), model(numbers(6, 4)))
        self.assertIsInstance(_plain_model(again), keras.Model)

    @pairwise.product(
        functional=(True, False),
        steps_per_execution=(2, 1),
        during=(True, False),
        again=(False, True),
    )
    @pytest.mark.slow_after(2)
    def test_of_a_trained_model(
        self, functional, steps_per_execution, during, again
    ):
        """What `fit` notes on a pipeline stays there."""
        path = f"{self.get_temp_dir()}/served"
        make = tf_gpipe.PipelinedSequential
        if functional:
            make = tf_gpipe.PipelinedModel.from_model
        arguments = {"num_stages": 2, "devices": DEVICES[:2]}
        made = []

        def use(model):
            if again:
                model = make(model, **arguments)
                self.assertIsNone(model._training_run)
            model.export(path, verbose=False)
            made.append(model.to_keras())

        model = pipelined(functional, **arguments)
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        model.fit(
            *(numbers(8, 4), numbers(8, 2)),
            batch_size=2,
            verbose=0,
            validation_data=(numbers(2, 4), numbers(2, 2)),
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs: during and use(model)
                )
            ],
        )
        use(model)
        x = numbers(6, 4)
        served = tf.saved_model.load(path)
        self.assertAllClose(served.serve(x), model(x))
        for each in made:
            self.assertContainsSubset(
                vars(each).keys(), vars(plain(functional)).keys()
            )
            self.assertAllClose(make(each, **arguments)(x), model(x))


def dense_stack(width, depth):
    return [keras.Input((4,)), *(L.Dense(width) for _ in range(depth))]


class OwnStack(tf_gpipe.PipelinedSequential):
    def __init__(self, width):
        super().__init__(dense_stack(width, 2), num_stages=2)
        self.width = width

    def get_config(self):
        return {"width": self.width}


class OwnGraph(tf_gpipe.PipelinedModel):
    def __init__(self, layers, schedule):
        inputs, *others = dense_stack(3, layers)
        x = inputs
        for layer in others:
            x = layer(x)
        super().__init__(inputs, x, num_stages=2, schedule=schedule)
        self.depth = layers

    def get_config(self):
        return {"layers": self.depth, "schedule": self.schedule}


class OwnBuilt(tf_gpipe.PipelinedSequential):
    """Its layers are built by its first data."""

    def __init__(self, width, name=None):
        super().__init__(dense_stack(width, 2)[1:], num_stages=2, name=name)
        self.width = width

    def get_config(self):
        return {"width": self.width, "name": self.name}


class OwnConfigTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (OwnStack, 3), (OwnGraph, 2, "gpipe"), (OwnBuilt, 3, "mine")
    )
    def test_loads_again(self, cls, *args):
        model = cls(*args)
        model.compile("sgd", "mse")
        x = numbers(6, 4)
        model.fit(x, x[:, :3], verbose=0)
        path = os.path.join(self.get_temp_dir(), f"{cls.__name__}.keras")
        model.save(path)
        custom = {cls.__name__: cls}
        with keras.saving.custom_object_scope(custom):
            in_scope = keras.models.load_model(path)
        given = keras.models.load_model(path, custom_objects=custom)
        for loaded in (in_scope, given):
            self.assertIs(type(loaded), cls)
            self.assertEqual(loaded.get_config(), model.get_config())
            for a, b in zip(loaded.weights, model.weights, strict=True):
                self.assertAllEqual(a, b)
            self.assertAllClose(loaded.predict(x), model.predict(x))
            loaded.fit(x, x[:, :3], verbose=0)


class Hdf5Test(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        functional=(True, False),
        kwargs=(
            {},
            {"balance": "flops"},
            {"balance": [3, 4]},
            {"schedule": "interleaved", "devices": DEVICES[:1]},
            {"balance": lambda layer, shape: 1},
        ),
    )
    @pytest.mark.slow_after(1)
    def test_loads_again(self, functional, kwargs):
        """Compiled anew: Keras restores no optimizer from HDF5 rightly."""
        kwargs = {"devices": DEVICES[:2], **kwargs}
        model = pipelined(functional, num_stages=2, **kwargs)
        x, y = numbers(6, 4), numbers(6, 2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, verbose=0)
        path = f"{self.get_temp_dir()}/model.h5"
        model.save(path)
        loaded = keras.models.load_model(path, compile=False)
        self.assertIsInstance(loaded, type(model))
        for a, b in zip(model.variables, loaded.variables, strict=True):
            self.assertAllEqual(a, b)
        self.assertAllClose(loaded(x), model(x))
        self.assertEqual(loaded.balance, model.balance)
        loaded.compile(keras.optimizers.SGD(0.1), "mse")
        for each in (model, loaded):
            each.fit(x, y, verbose=0)
        for a, b in zip(model.variables, loaded.variables, strict=True):
            self.assertAllClose(a, b)


if __name__ == "__main__":
    tf.test.main()
