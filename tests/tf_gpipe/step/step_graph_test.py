"""The graph of a step: its calls for each task, and its reads of weights."""

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe.step.executed_graph import executed_graph

_SCHEDULES = (
    *("gpipe", "1f1b", "zero_bubble", "interleaved"),
    "eager_zero_bubble",
)
_REMAT = ("always", "except_last", "never")


def _layers():
    layers = [
        keras.layers.Dense(
            6,
            "tanh",
            kernel_initializer=keras.initializers.GlorotUniform(seed=i),
        )
        for i in range(8)
    ]
    return [keras.Input((6,)), *layers]


def _pipeline(schedule="1f1b", remat="always", cls=None):
    return (cls or tf_gpipe.PipelinedSequential)(
        _layers(),
        balance=[2] * 4,
        devices=["CPU:0", "CPU:1"] if schedule == "interleaved" else None,
        num_micro_batches=4,
        schedule=schedule,
        remat=remat,
    )


def _data():
    return np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def _step(model, gradients):
    """Trains with the sum of the gradients by three sets of weights."""
    found = []
    for factor in (0.5, 3.0, 1.5):
        for v in model.trainable_variables:
            v.assign(v * factor)
        loss, by_weight = gradients()
        found.append(by_weight)
    total = [sum(g) for g in zip(*found, strict=True)]
    model.optimizer.apply(total, model.trainable_variables)
    return {"loss": loss}


class PlainAssigning(keras.Sequential):
    def train_step(self, data):
        x, y = data

        def gradients():
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            return loss, tape.gradient(loss, self.trainable_variables)

        return _step(self, gradients)


class Assigning(tf_gpipe.PipelinedSequential):
    def train_step(self, data):
        return _step(self, lambda: self.loss_and_gradients(*data)[:2])


def _weights_after(model):
    x = _data()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    return model.get_weights()


@functools.cache
def _weights_of_plain():
    return _weights_after(PlainAssigning(_layers()))


class StepGraphTest(parameterized.TestCase, tf.test.TestCase):
    @pairwise.product(schedule=_SCHEDULES, remat=_REMAT)
    @pytest.mark.slow_after(1)
    def test_calls_take_no_weights(self, schedule, remat):
        model = _pipeline(schedule, remat)
        model.compile("sgd", "mse")
        x = _data()
        model.train_on_batch(x, x)
        step = tf.function(lambda x: model.train_step((x, x)))
        graph = step.get_concrete_function(tf.constant(x)).graph
        calls = [
            op
            for op in graph.get_operations()
            if "PartitionedCall" in op.type
            and str(op.name)[0] in "FRBW"
            and "pack" not in op.get_attr("f").name
        ]
        tasks = model._pipeline.schedule.steps(remat)
        self.assertGreaterEqual(len(calls), len(tasks))
        for call in calls:
            self.assertLessEqual(len(call.inputs), 5, call.name)

    def test_callees_are_not_searched(self):
        model = _pipeline()
        model.compile("sgd", "mse")
        x = _data()
        nodes = executed_graph(model.train_on_batch, x, x)
        forward = [
            node
            for node in nodes
            if "PartitionedCall" in node.op
            and "_forward" in node.attr["f"].func.name
        ]
        self.assertLen(forward, 16)
        for node in forward:
            self.assertTrue(node.attr["_XlaHasReferenceVars"].b, node.name)

    @pairwise.product(schedule=_SCHEDULES, remat=_REMAT)
    @pytest.mark.slow_after(1)
    def test_weights_that_a_step_assigns(self, schedule, remat):
        """Gradients are by the weights at the call that returns them."""

        piped = _weights_after(_pipeline(schedule, remat, Assigning))
        for a, b in zip(_weights_of_plain(), piped, strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6)

    @parameterized.parameters("1f1b", "gpipe", "zero_bubble", "interleaved")
    @pytest.mark.slow
    def test_saved_function(self, schedule):
        """A saved step loads with TensorFlow alone, and runs several times."""
        model = _pipeline(schedule)
        model.compile("sgd", "mse")
        x = tf.constant(_data())
        module = tf.Module()
        module.model = model
        module.step = tf.function(
            lambda x: model.loss_and_gradients(x, x)[:2],
            input_signature=[tf.TensorSpec((8, 6))],
        )
        loss, gradients = module.step(x)
        path = self.get_temp_dir() + "/saved"
        tf.saved_model.save(module, path)
        loaded = tf.saved_model.load(path)
        for _ in range(3):
            self.assertAllClose((loss, gradients), loaded.step(x))


class GarbageCollectionTest(tf.test.TestCase):
    def test_paused_while_traced(self):
        seen = []

        class Layer(keras.layers.Layer):
            def call(self, x):
                if tf.is_symbolic_tensor(x):
                    seen.append(gc.isenabled())
                return x

        model = tf_gpipe.PipelinedSequential(
            [keras.Input((6,)), Layer(), keras.layers.Dense(6)],
            num_stages=2,
        )
        model.compile("sgd", "mse")
        x = _data()
        seen.clear()
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            try:
                model.train_on_batch(x, x)
                self.assertEqual(gc.isenabled(), enabled)
            finally:
                gc.enable()
            model.compile("sgd", "mse")
        self.assertNotEmpty(seen)
        self.assertNotIn(True, seen)

    def test_goes_on_after_an_error(self):
        def loss(y_true, y_pred):
            raise KeyError("mine")

        model = _pipeline()
        model.compile("sgd", loss)
        with self.assertRaisesRegex(KeyError, "mine"):
            model.train_on_batch(_data(), _data())
        self.assertTrue(gc.isenabled())


if __name__ == "__main__":
    tf.test.main()
