"""Eight logical CPU devices, and the same seed before every test."""

import os

# Before TensorFlow is imported: it reports at start that there is no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

NUM_DEVICES = 8


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
