"""Which devices the tests run on."""

import os

# `"GPU"` if a GPU is to be split into the devices of the tests.
KIND = os.environ.get("TF_GPIPE_TEST_DEVICE", "CPU")
