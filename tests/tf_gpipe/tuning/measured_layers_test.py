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
from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
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

    def measured(self, seconds, rows=(64,), num_devices=1, until=math.inf):
        """Measures with a clock by which layer i takes `seconds(i)`.

        Half of it forward; with several devices three times as long.
        """
        numbers = {id(x): i for i, x in enumerate(self.layers.graph.nodes)}
        self.parts = []

        def traced(part, specs, differentiated, backward=True):
            own = [numbers[id(x)] for x in part.nodes]
            if backward:
                self.parts.append(own)
            time = sum(map(seconds, own)) * (1 if backward else 0.5)
            return lambda devices: time * (3 if len(devices) > 1 else 1)

        with (
            mock.patch.object(measured_calls, "traced", traced),
            mock.patch.object(measured_calls, "overhead", lambda devices: 0.0),
        ):
            return measured_layers.measured(
                self.layers,
                rows,
                [f"{KIND}:{i}" for i in range(num_devices)],
                self.speed,
                until,
            )

    def test_neighbours_are_measured_together(self):
        found = self.measured(lambda i: 2.0)
        # The model's own inputs have no gradients. Of equal layers in a row,
        # the first are measured.
        self.assertEqual(
            self.parts,
            [[0, 1, 2, 3], [4, 5, 6, 7], [20, 21, 22], [23, 24, 25], [46, 47]],
        )
        self.assertLen(found.lines, 48)
        for i in range(4, 20):
            self.assertAllClose([x.at(64) for x in found.lines[i]], [1, 1])

    def test_a_slow_layer_is_found(self):
        found = self.measured(lambda i: 500.0 if i == 22 else 1.0)
        times = [sum(x.at(64) for x in found.lines[i]) for i in range(48)]
        self.assertEqual(np.argmax(times), 22)
        self.assertAllClose(sum(times), 547)
        self.assertAllClose(times[22], 500)

    def test_what_cannot_be_measured_is_left_out(self):
        def seconds(i):
            if i == 22:
                raise ValueError("no such kernel")
            return 1.0

        found = self.measured(seconds)
        self.assertCountEqual(found.lines, set(range(48)) - {22})

    @parameterized.parameters((1, None), (2, 3.0))
    def test_slowdown_with_all_devices_at_once(self, num_devices, slowdown):
        found = self.measured(lambda i: 1.0, num_devices=num_devices)
        self.assertEqual(found.slowdown, slowdown)

    def test_calls_are_measured_at_all_sizes_before_the_next(self):
        clock = mock.Mock(side_effect=[0.0, 0.0, 1.0])
        with mock.patch.object(measured_layers.time, "monotonic", clock):
            found = self.measured(lambda i: 1.0, (32, 64), until=0.5)
        self.assertCountEqual(found.lines, range(len(found.lines)))
        self.assertLess(len(found.lines), 48)
        self.assertEqual(self.parts[::2], self.parts[1::2])

    def test_on_devices(self):
        """With the real clock: all calls have a time."""
        layers = KnownLayers(
            [*[keras.layers.Dense(16) for _ in range(4)], keras.layers.LSTM(4)],
            (8, 16, 16),
            "sgd",
        )
        where = Machine(
            [Device(f"{KIND}:{i}", None, self.speed) for i in range(2)]
        )
        times, found = measured_layers.on_machine(
            layers, [2, 8], where, math.inf
        )
        self.assertGreaterEqual(found.sharing, 1.0)
        self.assertAllGreater(times.of(8, self.speed)[:2].sum(axis=0), 0)


if __name__ == "__main__":
    tf.test.main()
