"""The parts of TensorFlow that everything needs: kernels, XLA, virtual devices.

The checks use different libraries: cuBLAS, cuDNN, ptxas and libdevice. They
compare results with NumPy's or with the CPU's.
"""

import functools
import subprocess

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe
from tools.benchmark import report
from tools.benchmark import workloads
from tools.gpu import devices
from tools.gpu.checking import Failed
from tools.gpu.checking import Skipped

# Relative to the largest entry, with TensorFloat-32 switched off.
_TOLERANCE = 1e-4


def gpu_seen(cpu):
    """Reports the GPU, its driver and versions."""
    if cpu:
        raise Skipped("needs a GPU", **report.machine())
    gpu = devices.first_gpu()
    driver = subprocess.run(
        "nvidia-smi --query-gpu=driver_version,memory.total "
        "--format=csv,noheader".split(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    details = tf.config.experimental.get_device_details(gpu)
    build = tf.sysconfig.get_build_info()
    return {
        **report.machine(),
        "compute_capability": details.get("compute_capability"),
        "driver, memory": driver.splitlines()[0],
        **{k: v for k, v in build.items() if k.endswith("_version")},
    }


def matrix_product(cpu):
    a, b = _random((256, 512)), _random((512, 128))
    return _same(tf.matmul, (a, b), a @ b, cpu)


def convolution(cpu):
    """Runs a convolution with its gradients."""
    x, kernel = _random((4, 32, 32, 8)), _random((3, 3, 8, 16))
    return _same_as_cpu(
        _with_gradients(lambda x, k: tf.nn.conv2d(x, k, 2, "SAME")),
        (x, kernel),
        cpu,
    )


def embedding_and_softmax(cpu):
    """Runs a lookup and a softmax with their gradients."""
    tokens = np.arange(60).reshape(4, 15) % 50

    def logits(table, kernel):
        return tf.nn.softmax(tf.gather(table, tokens) @ kernel)

    return _same_as_cpu(
        _with_gradients(logits), (_random((50, 16)), _random((16, 50))), cpu
    )


def jit_compile(cpu):
    """Runs a function that XLA compiles."""
    a, b = _random((128, 128)), _random((128, 128))
    function = tf.function(lambda a, b: tf.tanh(a @ b), jit_compile=True)
    return _same(function, (a, b), np.tanh(a @ b), cpu)


def virtual_devices(cpu):
    """Sends a tensor from one device to another and uses it there."""
    first, second = devices.start(cpu, count=2)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    a = _random((256, 256))
    with tf.device(first):
        product = tf.linalg.matmul(a, a)
    with tf.device(second):
        product = tf.linalg.matmul(product, a)
    return _close(product, a @ a @ a, [first, second])


def trained_step(cpu):
    """Checks that the loss falls, with Keras and in a two-stage pipeline."""
    names = devices.start(cpu, count=2)
    layers = functools.partial(workloads.convolutional, 2, filters=8, size=8)
    x, y = workloads.data(layers(), 16)
    losses = {}
    for name, model in {
        "keras": keras.Sequential(layers()),
        "tf_gpipe": tf_gpipe.PipelinedSequential(
            layers(), num_stages=2, num_micro_batches=4, devices=names
        ),
    }.items():
        model.compile(
            keras.optimizers.Adam(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        losses[name] = [float(model.train_on_batch(x, y)) for _ in range(5)]
        if not losses[name][-1] < losses[name][0]:
            raise Failed(f"the loss of {name} does not fall", losses=losses)
    return {"losses": losses}


def _random(shape):
    generator = np.random.default_rng(0)
    return generator.standard_normal(shape, dtype="float32")


def _with_gradients(function):
    """Returns a function of the result and its gradients, in one vector."""

    def with_gradients(*sources):
        sources = [tf.convert_to_tensor(x) for x in sources]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = function(*sources)
            loss = tf.reduce_sum(y * y)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, sources))
        return tf.concat([tf.reshape(t, [-1]) for t in (y, *gradients)], 0)

    return with_gradients


def _same_as_cpu(function, arguments, cpu):
    with tf.device("CPU:0"):
        expected = function(*arguments).numpy()
    return _same(function, arguments, expected, cpu)


def _same(function, arguments, expected, cpu):
    """Compares a function's result on the device with the expected one."""
    if not cpu:
        devices.first_gpu()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    device = "CPU:0" if cpu else "GPU:0"
    with tf.device(device):
        result = function(*arguments)
    if device not in result.device:
        raise Failed(f"it ran on {result.device}, not on {device}")
    return _close(result, expected, [result.device])


def _close(result, expected, names):
    apart = np.max(np.abs(result.numpy() - expected)) / np.abs(expected).max()
    value = {"devices": names, "difference": float(apart)}
    # NaN fails, too.
    if not apart < _TOLERANCE:
        raise Failed("the result is another one", **value)
    return value
