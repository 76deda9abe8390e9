"""What the oldest release of Keras that is supported does not have.

Tests that need it are skipped there.
"""

import inspect
import unittest

import keras


def need_multi_optimizer():
    """Skips a test where Keras has no `MultiOptimizer`."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        raise unittest.SkipTest("Keras has MultiOptimizer from 3.15 on")


def need_renorm():
    """Skips a test where Keras's batch normalisation has no `renorm`."""
    arguments = inspect.signature(keras.layers.BatchNormalization).parameters
    if "renorm" not in arguments:
        raise unittest.SkipTest("Keras has renorm=True from 3.14 on")
