"""What the oldest release of Keras that is supported does not have."""

import unittest

import keras


def need_multi_optimizer():
    """Skips a test where Keras has no `MultiOptimizer`."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        raise unittest.SkipTest("Keras has MultiOptimizer from 3.15 on")
