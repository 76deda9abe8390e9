"""Simulated layers do what layers do: forward, backward, recomputation."""

import time
from unittest import mock

import keras
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tools.benchmark import workloads


def make_model(remat, schedule="gpipe"):
    model = tf_gpipe.PipelinedSequential(
        workloads.waiting(2, seconds=1e-6),
        num_stages=2,
        num_micro_batches=2,
        schedule=schedule,
        remat=remat,
        devices=["CPU:1", "CPU:2"],
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def waits(model):
    """Returns how often a training step calls functions that wait."""
    model.make_train_function()
    x = tf.ones((4, workloads.NUM_CLASSES))
    step = tf.function(model.train_step, autograph=False)
    functions = step.get_concrete_function((x, x)).graph.as_graph_def().library
    bodies = {f.signature.name: f.node_def for f in functions.function}
    waiting = {
        name
        for name, nodes in bodies.items()
        if any(node.op == "SleepDataset" for node in nodes)
    }
    return sum(
        node.attr["f"].func.name in waiting
        for nodes in bodies.values()
        for node in nodes
    )


class WaitTest(parameterized.TestCase, tf.test.TestCase):
    def test_it_computes_what_it_scales(self):
        x = tf.random.stateless_normal((4, workloads.NUM_CLASSES), (0, 1))
        for layer in workloads.waiting(2, seconds=1e-6)[1:]:
            layer.build(x.shape)
            layer.scale.assign(3.0)

            @tf.function
            def gradients(x, layer=layer):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer(x)
                return y, *tape.gradient(y, [x, layer.scale.value])

            y, by_x, by_scale = gradients(x)
            self.assertAllClose(y, 3.0 * x)
            self.assertAllClose(by_x, tf.fill(x.shape, 3.0))
            self.assertAllClose(by_scale, tf.reduce_sum(x), rtol=1e-4)

    def test_there_is_something_to_recompute(self):
        never, always = waits(make_model("never")), waits(make_model("always"))
        # Each of the two stages waits once more.
        self.assertEqual(always - never, 2)

    def test_a_device_waits_for_one_layer_at_a_time(self):
        """Four layers side by side, which TensorFlow starts at once."""
        seconds = 0.05
        layers = [workloads.Wait(seconds, name=f"wait_{i}") for i in range(4)]
        x = tf.ones((1, workloads.NUM_CLASSES))
        for layer in layers:
            layer.build(x.shape)
        run = tf.function(lambda x: tf.add_n([layer(x) for layer in layers]))
        run(x)
        start = time.perf_counter()
        run(x).numpy()
        # What a wait overruns by was measured, and is left out of each.
        least = len(layers) * (seconds - workloads._lag())
        self.assertGreater(time.perf_counter() - start, 0.9 * least)

    def test_plain_models_run_like_pipelines(self):
        """Without XLA on a GPU, where Keras would choose it."""
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
        with mock.patch.object(
            tf.config, "list_physical_devices", return_value=gpus
        ):
            self.assertFalse(workloads.compiled(model).jit_compile)


if __name__ == "__main__":
    tf.test.main()
