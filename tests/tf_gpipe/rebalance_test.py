"""The Rebalance callback cuts a model anew where that pays off."""

import itertools
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L  # noqa: N812

import tf_gpipe
from tests.tf_gpipe.partition.uncountable import Endless
from tf_gpipe.callbacks import rebalance
from tf_gpipe.devices import placement
from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import WEIGHTS
from tools.benchmark.workloads import Wait

_X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")


def dense():
    return [L.Dense(6) for _ in range(4)]


def waiting():
    """Two layers that wait for long, and two that do not.

    Both stages wait for so long that what else the machine does alters their
    times by a small part.
    """
    return [Wait(0.01), Wait(0.01), Wait(0.0025), L.Dense(6)]


class Particular(Endless):
    """A layer that refuses negative inputs, and cannot be counted."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            return super().call(tf.identity(x))


def make(layers=dense, pipelined=True, **kwargs):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), batch_size=kwargs.pop("rows", None))
    layers = [inputs, *layers()]
    if not pipelined:
        model = keras.Sequential(layers)
    else:
        model = tf_gpipe.PipelinedSequential(
            layers,
            **{
                "num_stages": 2,
                "num_micro_batches": 2,
                "balance": [2, 2],
                "devices": ["CPU:0", "CPU:1"],
                **kwargs,
            },
        )
    model.compile("sgd", "mse")
    return model


class NewCutTest(parameterized.TestCase):
    def cut(self, forward, backward, costs, **kwargs):
        seconds = {
            FORWARD: forward,
            BACKWARD: backward,
            RECOMPUTE: [0.0, 0.0],
            WEIGHTS: [0.0, 0.0],
        }
        return rebalance.new_cut(
            make(remat="never", **kwargs)._pipeline, seconds, costs
        )

    def test_slow_layers(self):
        found = self.cut(
            [6.0, 2.0], [12.0, 4.0], [3, 3, 1, 1], num_micro_batches=8
        )
        self.assertEqual(found.counts, [1, 3])
        # The first stage is always busy; then the second, but for F0 and B7.
        self.assertEqual(found.before, 8 * (6 + 12))
        self.assertEqual(found.after, 3 + 8 * (5 + 10) + 6)

    def test_slow_devices(self):
        found = self.cut([4.0, 1.0], [8.0, 2.0], [1, 1, 1, 1])
        self.assertEqual(found.counts, [1, 3])
        # Layers take a fourth as long on the second device.
        self.assertLess(found.after, 0.75 * found.before)

    @parameterized.parameters([[1, 1, 1, 1]], [[0, 0, 1, 1]])
    def test_none(self, costs):
        self.assertIsNone(self.cut([1.0, 1.0], [2.0, 2.0], costs))

    def test_zero_bubble(self):
        found = self.cut(
            [6.0, 2.0], [6.0, 2.0], [3, 3, 1, 1], schedule="zero_bubble"
        )
        self.assertEqual(found.counts, [1, 3])


class FailureTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        error=[
            KeyboardInterrupt(),
            tf.errors.ResourceExhaustedError(None, None, "No memory is left."),
        ],
        moved=[0, 1, 2],
    )
    @pytest.mark.slow_after(2)
    def test_a_model_goes_on(self, error, moved):
        """Whichever of the variables had moved to another device by then."""

        def adam():
            model = make(lambda: [L.Dense(6, use_bias=False) for _ in range(4)])
            model.compile(keras.optimizers.Adam(0.1), "mse")
            model.fit(_X, _X, verbose=0)
            return model

        model, other = adam(), adam()
        place, left = placement.place, [moved]

        def failing(variable, devices, trainable=False):
            before = variable.value
            place(variable, devices, trainable)
            if variable.value is not before:
                if not left[0]:
                    raise error
                left[0] -= 1

        with (
            mock.patch.object(placement, "place", failing),
            self.assertRaises(type(error)),
        ):
            model.rebalance([1, 3])
        for each in (model, other):
            each.fit(_X, _X, verbose=0)
        for a, b in zip(
            [*model.variables, *model.optimizer.variables],
            [*other.variables, *other.optimizer.variables],
            strict=True,
        ):
            self.assertAllEqual(a, b)
        self.assertAllEqual(
            model.predict(_X, verbose=0), other.predict(_X, verbose=0)
        )


class RebalanceTest(tf.test.TestCase, parameterized.TestCase):
    def fitted(self, model, callback, *others, epochs=100):
        model.fit(
            _X,
            _X,
            batch_size=8,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[callback, *others],
        )

    @parameterized.parameters(1, 2)
    @pytest.mark.slow
    def test_layers_that_wait(self, steps_per_execution):
        model = make(waiting, rows=8)
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        callback = tf_gpipe.callbacks.Rebalance(every=2)
        epochs = []

        def stop(epoch, logs):
            # After an epoch with the new cut.
            model.stop_training = len(epochs) > 0
            if callback.cuts:
                epochs.append(epoch + 2)

        self.fitted(
            model, callback, keras.callbacks.LambdaCallback(on_epoch_end=stop)
        )
        (counts,) = callback.cuts.values()
        self.assertEqual(counts, [1, 3])
        self.assertEqual(model.balance, [1, 3])
        plain = make(waiting, pipelined=False)
        plain.fit(
            _X, _X, batch_size=8, epochs=epochs[0], shuffle=False, verbose=0
        )
        for a, b in zip(plain.weights, model.weights, strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(
        {"schedule": "zb_v"},
        {"schedule": "auto"},
        {"replicas": True},
        {"replicas": True, "schedule": "zb_v", "num_micro_batches": 1},
    )
    @pytest.mark.slow_after(1)
    def test_numbers_of_new_cuts(self, replicas=False, **kwargs):
        """They are those without new cuts, to the bit."""
        strategy = tf.distribute.get_strategy()
        pipelines = ["CPU:0", "CPU:1"]
        if replicas:
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:2"])
            pipelines = [pipelines, ["CPU:2", "CPU:3"]]
        num_stages = 4 if kwargs.get("schedule") == "zb_v" else 2
        layers = [1] * (num_stages - 1)
        cuts = [
            rebalance.NewCut(x, 2.0, 1.0)
            for x in ([*layers, 6], [6, *layers], [*layers[1:], 6, 1])
        ]

        def made():
            with strategy.scope():
                return make(
                    lambda: [L.Dense(6) for _ in range(num_stages + 5)],
                    num_stages=num_stages,
                    devices=pipelines,
                    balance=[6, *layers],
                    **kwargs,
                )

        model, same = made(), made()
        callback = tf_gpipe.callbacks.Rebalance(every=2, by="flops")
        with (
            mock.patch.object(rebalance, "new_cut", side_effect=cuts),
            mock.patch.object(callback, "_steps_left", return_value=10**9),
        ):
            self.fitted(model, callback, epochs=3)
        self.assertEqual(
            callback.cuts, {2 * i + 2: x.counts for i, x in enumerate(cuts)}
        )
        self.fitted(same, keras.callbacks.Callback(), epochs=3)
        for a, b in zip(model.weights, same.weights, strict=True):
            self.assertAllEqual(a, b)

    @pytest.mark.slow
    def test_a_memory_limit_that_refuses_a_cut(self):
        limit = tf_gpipe.plan(
            dense(),
            (8, 6),
            num_stages=2,
            num_micro_batches=2,
            balance=[2, 2],
            remat="never",
        ).device_bytes
        model = make(rows=8, remat="auto", memory_limit=max(limit))
        model.compile("adam", "mse")
        callback = tf_gpipe.callbacks.Rebalance(every=2, by="flops")
        # As long as if the first device were four times as slow.
        seconds = {
            **dict.fromkeys((RECOMPUTE, WEIGHTS), [0.0, 0.0]),
            FORWARD: [4e3, 1e3],
            BACKWARD: [8e3, 2e3],
        }
        with (
            mock.patch.object(
                tf_gpipe.PipelinedSequential,
                "rebalance",
                autospec=True,
                side_effect=tf_gpipe.PipelinedSequential.rebalance,
            ) as asked,
            mock.patch.object(rebalance, "stage_seconds", return_value=seconds),
        ):
            self.fitted(model, callback, epochs=3)
        self.assertEqual(asked.call_args.args[1], [1, 3])
        self.assertEqual(callback.cuts, {})
        self.assertEqual(model.balance, [2, 2])
        plain = make(pipelined=False)
        plain.compile("adam", "mse")
        plain.fit(_X, _X, batch_size=8, epochs=3, shuffle=False, verbose=0)
        for a, b in zip(plain.weights, model.weights, strict=True):
            self.assertAllClose(a, b, rtol=1e-5, atol=1e-6)

    @parameterized.parameters("time", "flops")
    def test_does_not_pay_in_what_is_left(self, by):
        model = make(waiting, rows=8)
        callback = tf_gpipe.callbacks.Rebalance(every=2, by=by)
        # Tracing takes longer than all steps, however fast the machine is.
        clock = mock.Mock(perf_counter=itertools.count(0, 1000).__next__)
        with mock.patch.object(rebalance, "time", clock):
            self.fitted(model, callback, epochs=2)
        self.assertEqual(callback.cuts, {})
        self.assertEqual(model.balance, [2, 2])

    @pytest.mark.slow
    def test_price_of_a_cut(self):
        """The first call is timed, which may have several steps."""
        traces = []

        class Traced(L.Dense):
            def call(self, x):
                traces.append(self)
                return super().call(x)

        def fit(**kwargs):
            model = make(lambda: [Traced(6) for _ in range(4)])
            model.compile("sgd", "mse", **kwargs)
            callback = tf_gpipe.callbacks.Rebalance(by="flops")
            self.fitted(model, callback, epochs=1)
            return callback

        # A clock that only tracing moves.
        clock = mock.Mock(perf_counter=lambda: float(len(traces)))
        with mock.patch.object(rebalance, "time", clock):
            self.assertEqual(fit()._steps_of_call, 1)
            self.assertGreater(fit()._first_seconds, 0)
            self.assertEqual(fit(steps_per_execution=2)._steps_of_call, 2)

    def test_beside_a_timeline(self):
        model = make()
        timeline = tf_gpipe.callbacks.Timeline()
        callback = tf_gpipe.callbacks.Rebalance(every=1, by="flops")
        self.fitted(model, callback, timeline, epochs=2)
        self.assertLen(timeline.spans, 2 * 2 * 2 + 2)
        self.assertNotEmpty(callback._seen)

    @parameterized.parameters("time", "flops")
    def test_keeps_the_cut_where_costs_cannot_be_found(self, by):
        """Training goes on, and the warning comes once."""
        first = L.Dense(6, "softplus")
        model = make(lambda: [first, Particular(), L.Dense(6), L.Dense(6)])
        callback = tf_gpipe.callbacks.Rebalance(every=1, by=by)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.fitted(model, callback, epochs=3)
        (found,) = [x for x in caught if "keeps the cut" in str(x.message)]
        self.assertIn("'particular'", str(found.message))
        self.assertEqual(callback.cuts, {})

    def test_refuses_several_hosts(self):
        """They would not all cut at the same step."""
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            model = make(devices=[["CPU:0", "CPU:1"]])
        with self.assertRaisesRegex(ValueError, "model.rebalance"):
            self.fitted(model, tf_gpipe.callbacks.Rebalance(), epochs=1)

    @parameterized.parameters(
        ({"every": 0}, "`every` must be a positive integer"),
        ({"every": 1.5}, "`every` must be a positive integer"),
        ({"by": "parameters"}, r"`by` must be one of \['time', 'flops'\]"),
        ({"by": None}, "`by` must be one of"),
    )
    def test_refuses(self, kwargs, text):
        with self.assertRaisesRegex(ValueError, text):
            tf_gpipe.callbacks.Rebalance(**kwargs)

    def test_plain_model(self):
        with self.assertRaisesRegex(ValueError, "The Rebalance callback"):
            self.fitted(
                make(pipelined=False), tf_gpipe.callbacks.Rebalance(), epochs=1
            )


if __name__ == "__main__":
    tf.test.main()
