"""What only a GPU shows: kernels, memory and XLA on each stage's device."""

import functools

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tools.benchmark import workloads
from tools.table1 import measured

pytestmark = pytest.mark.gpu
NUM_STAGES = 4

transformer = functools.partial(workloads.transformer, 4, 64, 16)
convolutional = functools.partial(workloads.convolutional, 4, 8, 16)


def make(layers, jit_compile=False, **kwargs):
    model = tf_gpipe.PipelinedSequential(
        layers, num_stages=NUM_STAGES, num_micro_batches=4, **kwargs
    )
    return workloads.compiled(model, jit_compile)


class GpuTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        layers=(transformer, convolutional),
        schedule=("1f1b", "zero_bubble"),
        jit_compile=(False, True),
    )
    def test_numbers(self, layers, schedule, jit_compile):
        model = make(layers(), jit_compile, schedule=schedule)
        x, y = workloads.data(layers(), 8)
        report = tf_gpipe.verify(model, x, y)
        self.assertTrue(report.ok, report)

    def test_variables_are_on_the_gpu_of_their_stage(self):
        model = make(transformer())
        x, y = workloads.data(transformer(), 8)
        model.train_on_batch(x, y)
        devices = [stage.device for stage in model.stages]
        self.assertLen(set(devices), NUM_STAGES)
        for stage in model.stages:
            self.assertIn("GPU", stage.device)
            for variable in stage.variables:
                self.assertEndsWith(variable.value.device, stage.device)

    def test_remat_saves_memory(self):
        layers = functools.partial(workloads.transformer, 8, 256, 64)
        x, y = workloads.data(layers(), 64)
        peaks = {}
        for remat in ("never", "always"):
            model = make(layers(), remat=remat)
            devices = [stage.device for stage in model.stages]
            peaks[remat] = measured.device_peaks(model, devices, x, y)
            keras.backend.clear_session()
        # The first stage keeps the most micro-batches.
        self.assertLess(peaks["always"][0], peaks["never"][0])

    def test_timeline_waits_for_kernels(self):
        # So many that even the fastest GPU takes longer to run than to queue
        # them.
        num_products, size, most_flops = 40, 8192, 5e15

        def products(x):
            for _ in range(num_products):
                x = tf.linalg.matmul(x, x)
            # So that none of them is kept.
            return tf.stop_gradient(x)

        model = tf_gpipe.PipelinedSequential(
            [keras.Input((size,)), keras.layers.Lambda(products)],
            num_stages=1,
            num_micro_batches=1,
            remat="never",
        )
        model.compile("sgd", "mse")
        timeline = tf_gpipe.callbacks.Timeline()
        x = tf.zeros((size, size))
        model.fit(
            x, x, size, epochs=2, shuffle=False, verbose=0, callbacks=[timeline]
        )
        (forward,) = (x for x in timeline.spans if x.task.kind == "F")
        self.assertGreater(
            forward.end - forward.start,
            num_products * 2 * size**3 / most_flops,
        )


if __name__ == "__main__":
    tf.test.main()
