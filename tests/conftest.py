"""Eight logical CPU devices, and the same seed before every test."""

import contextlib
import os

import pytest


@contextlib.contextmanager
def _without_logs():
    """TensorFlow logs at its start what it has not found, such as GPUs.

    pytest would show that below its own last line, the summary.
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


# For the processes that tests start.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with _without_logs():
    import keras
    import tensorflow as tf

NUM_DEVICES = 8


@_without_logs()
def pytest_configure():
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES,
    )
    # From here on a trainer under test cannot choose another number.
    tf.config.list_logical_devices()


def pytest_report_header():
    return f"tensorflow {tf.__version__}, keras {keras.__version__}"


@pytest.fixture(autouse=True)
def _fresh_keras():
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def pytest_collection_modifyitems(items):
    # A helper of `tf.test.TestCase` that looks like a test.
    items[:] = [x for x in items if x.originalname != "test_session"]
