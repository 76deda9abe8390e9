"""Exported pipelines serve where there is no tf_gpipe, on one device."""

import gc
import importlib.util
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests.devices import KIND
from tests.tf_gpipe import comparison

DEVICES = [f"{KIND}:{i}" for i in range(3)]
# Each loads an exported model and answers, in a process of its own.
SERVERS = {
    "tf_saved_model": """
import tensorflow as tf
def answered(path, x):
    loaded = tf.saved_model.load(path)
    return loaded.serve(x[""] if "" in x else x)
""",
    "onnx": """
import onnxruntime
def answered(path, x):
    session = onnxruntime.InferenceSession(path)
    names = [x.name for x in session.get_inputs()]
    return session.run(None, dict(zip(names, x.values(), strict=True)))[0]
""",
    "litert": """
from ai_edge_litert.interpreter import Interpreter
def answered(path, x):
    runner = Interpreter(path).get_signature_runner("serving_default")
    names = sorted(runner.get_input_details())
    (made,) = runner(**dict(zip(names, x.values(), strict=True))).values()
    return made
""",
}
ASK = """
import sys
import numpy as np
{server}
for path in sys.argv[1:]:
    x = dict(np.load(path + ".x.npz"))
    np.save(path + ".npy", np.asarray(answered(path, x)))
assert "tf_gpipe" not in sys.modules
"""
NEEDS = {
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "litert": ("ai_edge_litert",),
}


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype="float32")


def images():
    x = keras.Input((8, 8, 3))
    y = L.Conv2D(4, 3, padding="same", activation="relu")(x)
    y = L.BatchNormalization()(y)
    y = L.MaxPooling2D()(y)
    y = L.Flatten()(y)
    return keras.Model(x, L.Dense(3, "softmax")(L.Dropout(0.5)(y)))


def two_inputs():
    a, b = keras.Input((4,), name="a"), keras.Input((6,), name="b")
    within = keras.Sequential([keras.Input((6,)), L.Dense(4, "tanh")])
    both = L.Concatenate()([L.Dense(4, "selu")(a), within(b)])
    return keras.Model({"a": a, "b": b}, L.Dense(2)(both))


def tokens():
    x = keras.Input((6,), dtype="int32")
    y = L.Embedding(20, 8)(x)
    y = L.LayerNormalization()(y + L.MultiHeadAttention(2, 4)(y, y))
    return keras.Model(x, L.Dense(2)(L.GlobalAveragePooling1D()(y)))


def sequential():
    return keras.Sequential(
        [keras.Input((4,)), *(L.Dense(5, "tanh") for _ in range(4))]
    )


class Own(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def own():
    x = keras.Input((4,))
    return Own(x, L.Dense(2)(L.Dense(4, "relu")(x)))


MODELS = {
    images: numbers(4, 8, 8, 3),
    two_inputs: {"a": numbers(4, 4), "b": numbers(4, 6)},
    tokens: np.arange(24, dtype="int32").reshape(4, 6) % 20,
    sequential: numbers(4, 4),
    own: numbers(4, 4),
}


def trained(make):
    x = MODELS[make]
    keras.utils.set_random_seed(0)
    kind = tf_gpipe.PipelinedModel.from_model
    if make is sequential:
        kind = tf_gpipe.PipelinedSequential
    model = kind(make(), num_stages=2, num_micro_batches=2, devices=DEVICES[:2])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, numbers(4, model.output_shape[-1]), verbose=0)
    return model, x


class ExportTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*SERVERS)
    @pytest.mark.slow
    def test_formats(self, kind):
        for name in NEEDS.get(kind, ()):
            if importlib.util.find_spec(name) is None:
                self.skipTest(f"needs {name}")
        folder = self.get_temp_dir()
        suffix = {"onnx": ".onnx", "litert": ".tflite"}.get(kind, "")
        expected = {}
        for make in MODELS:
            model, x = trained(make)
            path = f"{folder}/{make.__name__}{suffix}"
            model.export(path, format=kind, verbose=False)
            np.savez(f"{path}.x.npz", **(x if isinstance(x, dict) else {"": x}))
            expected[path] = model.predict(x, verbose=0)
        # In a folder from which tf_gpipe cannot be imported.
        subprocess.run(
            [
                *(sys.executable, "-c", ASK.format(server=SERVERS[kind])),
                *expected,
            ],
            check=True,
            cwd=folder,
        )
        for path, y in expected.items():
            self.assertAllClose(np.load(f"{path}.npy"), y, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(images, sequential)
    @pytest.mark.slow
    def test_converted_by_tensorflow(self, make):
        litert = pytest.importorskip("ai_edge_litert.interpreter")
        model, x = trained(make)
        plain = model.to_keras()
        content = tf.lite.TFLiteConverter.from_keras_model(plain).convert()
        interpreter = litert.Interpreter(model_content=content)
        run = interpreter.get_signature_runner("serving_default")
        (name,) = run.get_input_details()
        (y,) = run(**{name: x}).values()
        self.assertAllClose(y, model.predict(x, verbose=0), atol=1e-5)

    @parameterized.parameters(*MODELS)
    @pytest.mark.slow_after(1)
    def test_as_a_layer(self, make):
        model, x = trained(make)
        path = tempfile.mkdtemp(dir=self.get_temp_dir())
        model.export(path, verbose=False)
        layer = L.TFSMLayer(path, call_endpoint="serve")
        self.assertAllClose(layer(x), model.predict(x, verbose=0), atol=1e-5)

    @parameterized.parameters(1, 4)
    def test_as_a_layer_of_a_pipeline(self, num_micro_batches):
        path = tempfile.mkdtemp(dir=self.get_temp_dir())
        inner = keras.Sequential([keras.Input((4,)), L.Dense(4, "tanh")])
        inner.export(path, verbose=False)

        def make():
            x = keras.Input((4,))
            # Its stage is on another device than the layer was loaded on.
            y = L.TFSMLayer(path, call_endpoint="serve")(L.Dense(4)(x))
            return keras.Model(x, L.Dense(2)(y))

        x, y = numbers(8, 4), numbers(8, 2)
        plain = comparison.train(make, [(x, y)], loss="mse")
        piped = comparison.train(
            make,
            [(x, y)],
            loss="mse",
            num_stages=2,
            num_micro_batches=num_micro_batches,
            balance=[1, 2],
            devices=DEVICES[:2],
        )
        comparison.assert_same(self, plain, piped)
        before = inner.layers[0].kernel
        self.assertNotAllClose(piped[0].layers[2].variables[0], before)
        file = f"{path}/model.keras"
        piped[0].save(file)
        loaded = keras.models.load_model(file, safe_mode=False)
        self.assertIsInstance(loaded, tf_gpipe.PipelinedModel)
        for a, b in zip(piped[0].variables, loaded.variables, strict=True):
            self.assertAllClose(a, b)
        self.assertAllClose(
            *(m.predict(x, verbose=0) for m in (plain[0], loaded))
        )

    def test_endpoints(self):
        model, x = trained(images)
        plain = model.to_keras()
        archive = keras.export.ExportArchive()
        archive.track(plain)
        spec = [tf.TensorSpec((None, 8, 8, 3))]
        archive.add_endpoint("serve", plain.call, spec)
        archive.add_endpoint(
            "training", lambda x: plain(x, training=True), spec
        )
        archive.add_endpoint(
            "top", lambda x: keras.ops.argmax(plain(x), -1), spec
        )
        path = tempfile.mkdtemp(dir=self.get_temp_dir())
        archive.write_out(path, verbose=False)
        loaded = tf.saved_model.load(path)
        expected = model.predict(x, verbose=0)
        self.assertAllClose(loaded.serve(x), expected, atol=1e-5)
        self.assertAllEqual(loaded.top(x), expected.argmax(-1))
        self.assertEqual(loaded.training(x).shape, expected.shape)

    def test_call_of_its_own(self):
        class Twice(tf_gpipe.PipelinedSequential):
            def call(self, inputs, training=None, mask=None):
                made = super().call(inputs, training=training, mask=mask)
                return made + made

        model = Twice(
            [keras.Input((4,)), L.Dense(4), L.Dense(2)],
            num_stages=2,
            devices=DEVICES[:2],
        )
        x = numbers(4, 4)
        path = tempfile.mkdtemp(dir=self.get_temp_dir())
        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        self.assertAllClose(loaded.serve(x), model(x))

    def test_that_is_not_built(self):
        model = tf_gpipe.PipelinedSequential([L.Dense(4)], num_stages=1)
        with self.assertRaisesRegex(ValueError, "has not been built"):
            model.export(tempfile.mkdtemp(dir=self.get_temp_dir()))


class PlotTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(two_inputs, sequential)
    def test_as_the_plain_model(self, make):
        pytest.importorskip("pydot")
        model, _ = trained(make)
        plot = keras.utils.model_to_dot(model, show_shapes=True)
        plain = keras.utils.model_to_dot(model.to_keras(), show_shapes=True)
        # The names of nodes differ: they are the ids of Python objects.
        for each in (plot, plain):
            self.assertLen(each.get_nodes(), len(plain.get_nodes()))
            self.assertLen(each.get_edges(), len(plain.get_edges()))
        labels = [x.get_label() for x in plot.get_nodes()]
        self.assertEqual(labels, [x.get_label() for x in plain.get_nodes()])

    @parameterized.parameters(two_inputs, sequential)
    @pytest.mark.slow_after(1)
    def test_graph_of_tensorboard(self, make):
        """Keras writes the graph only of plain models, such as `to_keras()`."""
        model, _ = trained(make)
        path = tempfile.mkdtemp(dir=self.get_temp_dir())
        keras.callbacks.TensorBoard(path).set_model(model)
        self.assertEmpty(self._graphs(path))
        keras.callbacks.TensorBoard(path).set_model(model.to_keras())
        (graph,) = self._graphs(path)
        for layer in model.layers:
            self.assertIn(f'"{layer.name}"', graph)

    def _graphs(self, path):
        gc.collect()  # Makes Keras's callback close its files.
        return [
            tf.make_ndarray(value.tensor).item().decode()
            for file in tf.io.gfile.glob(f"{path}/train/events*")
            for event in tf.compat.v1.train.summary_iterator(file)
            for value in event.summary.value
            if value.metadata.plugin_data.plugin_name == "graph_keras_model"
        ]


if __name__ == "__main__":
    tf.test.main()
