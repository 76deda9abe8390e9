"""Layers that are measured together, and how their time is divided."""

import dataclasses
import math
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.devices import KIND
from tf_gpipe.partition import measured_calls
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.speeds import Speed
from tf_gpipe.tuning import measured_layers


class MeasuredLayersTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # The last but one of the first half has another size.
        units = [257 if i == 22 else 256 for i in range(48)]
        self.layers = KnownLayers(
            [keras.layers.Dense(x) for x in units], (64, 256), "sgd"
        )
        # An operation takes a hundredth of a layer.
        self.speed = dataclasses.replace(
            Speed.of_flops(3 * 64 * 2 * 256 * 256), operation=1e-3
        )

    def measured(self, seconds, rows=(64,), until=math.inf):
        """Measures with a clock by which layer i takes `seconds(i)`.

        Half of it forward.
        """
        numbers = {id(x): i for i, x in enumerate(self.layers.graph.nodes)}
        self.parts = []

        def traced(part, specs, differentiated, backward=True):
            own = [numbers[id(x)] for x in part.nodes]
            if backward:
                self.parts.append(own)
            time = sum(map(seconds, own)) * (1 if backward else 0.5)
            return lambda device: time

        with (
            mock.patch.object(measured_calls, "traced", traced),
            mock.patch.object(measured_calls, "overhead", lambda device: 0.0),
        ):
            return measured_layers.measured(
                self.layers, rows, f"{KIND}:0", self.speed, until
            )

    def test_neighbours_are_measured_together(self):
        found = self.measured(lambda i: 2.0)
        # The model's own inputs have no gradients. Of equal layers in a row,
        # the first are measured.
        self.assertEqual(
            self.parts,
            [[0, 1, 2, 3], [4, 5, 6, 7], [20, 21, 22], [23, 24, 25], [46, 47]],
        )
        self.assertLen(found, 48)
        for i in range(4, 20):
            self.assertAllClose([x.at(64) for x in found[i]], [1, 1])

    def test_a_slow_layer_is_found(self):
        found = self.measured(lambda i: 500.0 if i == 22 else 1.0)
        times = [sum(x.at(64) for x in found[i]) for i in range(48)]
        self.assertEqual(np.argmax(times), 22)
        self.assertAllClose(sum(times), 547)
        self.assertAllClose(times[22], 500)

    def test_what_cannot_be_measured_is_left_out(self):
        def seconds(i):
            if i == 22:
                raise ValueError("no such kernel")
            return 1.0

        found = self.measured(seconds)
        self.assertCountEqual(found, set(range(48)) - {22})

    def test_calls_are_measured_at_all_sizes_before_the_next(self):
        clock = mock.Mock(side_effect=[0.0, 0.0, 1.0])
        with mock.patch.object(measured_layers.time, "monotonic", clock):
            found = self.measured(lambda i: 1.0, (32, 64), until=0.5)
        self.assertCountEqual(found, range(len(found)))
        self.assertLess(len(found), 48)
        self.assertEqual(self.parts[::2], self.parts[1::2])

    def test_on_devices(self):
        """With the real clock: all calls have a time, and it may be none.

        Layers as short as these take less than the call that runs them, where
        other work slows that call.
        """
        layers = KnownLayers(
            [*[keras.layers.Dense(16) for _ in range(4)], keras.layers.LSTM(4)],
            (8, 16, 16),
            "sgd",
        )
        found = measured_layers.measured(
            layers, [2, 8], f"{KIND}:1", self.speed, math.inf
        )
        self.assertCountEqual(found, range(5))
        for forward, backward in found.values():
            for seconds in (forward.at(8), backward.at(8)):
                self.assertTrue(0 <= seconds < math.inf, seconds)


if __name__ == "__main__":
    tf.test.main()
