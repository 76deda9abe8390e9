"""Eight logical devices, and the same seed before every test."""

import collections
import contextlib
import gc
import itertools
import os

import pytest

from tests.devices import KIND


@contextlib.contextmanager
def _without_logs():
    """Hides what TensorFlow logs at its start, such as missing GPUs.

    pytest would show it below the summary, its own last line.
    """
    stderr = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


# Processes that tests start log less.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if KIND == "CPU":
    # Tests see the same devices whether there is a GPU or not.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
with _without_logs():
    import keras
    import tensorflow as tf
    from tensorflow.python.framework import ops

    import tf_gpipe
    from tf_gpipe import upstream
    from tf_gpipe.stage import call_overrides
    from tools import local_devices

NUM_DEVICES = 8
# GPU memory of each device. The rest is left to processes that tests start.
GPU_MIB = 4096


@_without_logs()
def pytest_configure():
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES,
    )
    if KIND == "GPU":
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            raise pytest.UsageError(
                "TF_GPIPE_TEST_DEVICE=GPU needs a GPU, and TensorFlow sees "
                "none. Install with `bash tools/setup_venv.sh --gpu`."
            )
        local_devices.split_gpu(gpus[0], NUM_DEVICES, GPU_MIB)
    _tell_strategies_apart()
    _without_autotuning()
    _trace_plain_models_once()
    # From here on no test can change the number of devices.
    tf.config.list_logical_devices()
    # Each garbage collection would visit all objects that the imports of
    # TensorFlow and Keras made: a tenth of the time of tracing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _tell_strategies_apart():
    """Gives each `MirroredStrategy` keys of its own for its all-reduces.

    All strategies of a process count their all-reduces from the same key, and
    TensorFlow refuses two of one key and different shapes, whichever
    strategies, and so tests, they belong to. Its own tests set this number.
    """
    keys = itertools.count(0, 1000)
    tf.distribute.MirroredStrategy._collective_key_base = property(
        lambda strategy: next(keys)
    )


def _without_autotuning():
    """Has no `tf.data` iterator tune its pipeline.

    On a busy machine an iterator that is deleted may wait for the thread that
    tunes it for as long as it has lived, up to a minute: TensorFlow wakes the
    thread just before it marks the iterator as cancelled, and the thread goes
    to sleep again. Iterators that were left by an exception are deleted when
    Python collects garbage, many at once.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    # What an iterator is made of.
    tf.data.Dataset._apply_debug_options = lambda x: x.with_options(options)


def _trace_plain_models_once():
    """Has plain Keras models build their optimizers before the first step.

    Otherwise the first step makes the slots, and so TensorFlow traces it twice:
    a third of the time that a small model takes. Models that are or have
    pipelines are left as they are.
    """
    make_train_function = keras.Model.make_train_function
    pipelines = tf_gpipe.PipelinedSequential, tf_gpipe.PipelinedModel

    def make(model, force=False):
        optimizer = getattr(model, "optimizer", None)
        if (
            optimizer is not None
            and model.built
            and not optimizer.built
            # A user's step may train some of the weights.
            and not call_overrides.overrides(model, "train_step")
            and not any(
                isinstance(x, pipelines) for x in upstream.layers_within(model)
            )
        ):
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        return make_train_function(model, force)

    keras.Model.make_train_function = make


def pytest_report_header():
    return f"tensorflow {tf.__version__}, keras {keras.__version__}"


@pytest.fixture(autouse=True)
def _fresh_keras():
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _forgotten_gradients():
    """Has TensorFlow forget the custom gradients that a test has made.

    It keeps them, and with them the graphs of plain models: 6 MiB for each
    small model, and what collecting garbage takes.
    """
    gradients = ops.gradient_registry._registry
    known = set(gradients)
    yield
    for name in set(gradients) - known:
        if name.startswith(("CustomGradient-", "PartitionedCall-")):
            del gradients[name]


def _mark_cells_slow(items):
    """Marks as slow all but the first n cases of tests with `slow_after(n)`."""
    counts = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("slow_after")
        if mark is not None:
            # absl numbers the sets of parameters of a test.
            test = item.nodeid.rstrip("0123456789")
            if counts[test] >= mark.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[test] += 1


# Before pytest deselects slow tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # A helper of `tf.test.TestCase` that looks like a test.
    items[:] = [x for x in items if x.originalname != "test_session"]
    _mark_cells_slow(items)
    # Fast tests first, so that a mistake shows early.
    items.sort(key=lambda x: x.get_closest_marker("slow") is not None)
    if KIND != "GPU":
        skip = pytest.mark.skip(reason="needs TF_GPIPE_TEST_DEVICE=GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
