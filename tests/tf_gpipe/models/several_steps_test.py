"""Training steps that follow one another in one graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tf_gpipe.models import several_steps

_rng = np.random.default_rng(0)
_X = _rng.normal(size=(58, 6)).astype("float32")
_Y = _rng.normal(size=(58, 2)).astype("float32")


def _make(cls=tf_gpipe.PipelinedSequential, **kwargs):
    keras.utils.set_random_seed(1)
    arguments = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "balance": [3, 3],
        "devices": ["CPU:0", "CPU:1"],
        **kwargs,
    }
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(8, kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.GaussianNoise(0.1),
        keras.layers.Dense(2),
    ]
    return cls(layers, **arguments)


def _trained(model, optimizer, steps, metrics=("mae",)):
    """Returns all variables after two epochs of training, and the history."""
    model.compile(
        optimizer(), "mse", metrics=metrics, steps_per_execution=steps
    )
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(8)
    history = model.fit(data, epochs=2, shuffle=False, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(v) for v in variables], history.history


class _Signs(tf_gpipe.PipelinedSequential):
    """Trains by the signs of the gradients."""

    def train_step(self, data):
        loss, gradients, _ = self.loss_and_gradients(*data)
        gradients = [keras.ops.sign(x) for x in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class SeveralStepsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({}, "1f1b", "never", 2),
        ({"global_clipnorm": 0.1}, "1f1b", "always", 3),
        ({"use_ema": True, "ema_momentum": 0.5}, "gpipe", "except_last", 4),
        ({"gradient_accumulation_steps": 2}, "zero_bubble", "never", 8),
        ({"weight_decay": 0.1}, "zero_bubble", "always", 11),
    )
    @pytest.mark.slow_after(1)
    def test_bits_of_single_steps(self, options, schedule, remat, steps):
        # There are eight steps, and the last one has two rows. Of the numbers
        # of steps in a graph, only 2, 4 and 8 divide eight.
        def optimizer():
            return keras.optimizers.Adam(0.05, **options)

        one, several = (
            _trained(_make(schedule=schedule, remat=remat), optimizer, n)
            for n in (1, steps)
        )
        for a, b in zip(one[0], several[0], strict=True):
            self.assertAllEqual(a, b)
        for name, values in one[1].items():
            self.assertAllClose(values, several[1][name], rtol=1e-6)

    @parameterized.parameters("zb_v", "interleaved", "auto")
    @pytest.mark.slow_after(1)
    def test_stages_that_share_devices(self, schedule):
        def trained(steps):
            model = _make(num_stages=4, balance=[1, 2, 1, 2], schedule=schedule)
            return _trained(model, lambda: keras.optimizers.SGD(0.1), steps)

        for a, b in zip(trained(1)[0], trained(4)[0], strict=True):
            self.assertAllEqual(a, b)

    @pairwise.each(steps=(2, 3, 6), known=(False, True))
    @pytest.mark.slow
    def test_losses_of_outputs(self, steps, known):
        """Keras weights them by rows where a dataset tells how many.

        There are eight steps, which 3 and 6 do not divide.
        """

        def history(pipelined):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((6,))
            x = keras.layers.Dense(3)(inputs)
            outputs = [keras.layers.Dense(2, name=name)(x) for name in "ab"]
            model = keras.Model(inputs, outputs)
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, num_stages=2, devices=["CPU:0", "CPU:1"]
                )
            model.compile("sgd", ["mse", "mae"], steps_per_execution=steps)
            x, y = _X, (_Y, 1 - _Y)
            if known:
                x, y = _X[:56], (_Y[:56], 1 - _Y[:56])
            data = tf.data.Dataset.from_tensor_slices((x, y))
            data = data.batch(8, drop_remainder=known)
            return model.fit(data, epochs=2, shuffle=False, verbose=0).history

        expected, found = history(False), history(True)
        for name, values in expected.items():
            self.assertAllClose(values, found[name], rtol=1e-5)

    @pytest.mark.slow
    def test_train_step_of_ones_own(self):
        def trained(steps):
            return _trained(
                _make(_Signs), lambda: keras.optimizers.SGD(0.01), steps, None
            )

        for a, b in zip(trained(1)[0], trained(4)[0], strict=True):
            self.assertAllEqual(a, b)

    @pytest.mark.slow
    def test_data_that_is_no_dataset(self):
        def trained(steps):
            model = _make()
            model.compile("sgd", "mse", steps_per_execution=steps)
            batches = [(_X[i : i + 8], _Y[i : i + 8]) for i in (0, 8, 16)]
            model.fit((x for x in batches), verbose=0)
            model.train_on_batch(*batches[0])
            return [np.asarray(v) for v in model.variables]

        for a, b in zip(trained(1), trained(2), strict=True):
            self.assertAllEqual(a, b)

    def test_callbacks_see_executions(self):
        model = _make()
        model.compile("sgd", "mse", steps_per_execution=4)
        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(batch)
        )
        model.fit(_X[:48], _Y[:48], 8, verbose=0, callbacks=[callback])
        # Keras counts batches like this.
        self.assertEqual(seen, [3, 7])

    @parameterized.parameters(
        *((1, 1), (2, 2), (8, 8), (12, 6), (13, 1), (100, 5), ("auto", 1)),
        (np.int64(8), 8),
    )
    def test_num_in_one_graph(self, steps, expected):
        self.assertEqual(several_steps.num_in_one_graph(steps), expected)

    @parameterized.parameters(
        ({}, False),
        ({"clipnorm": 0.1}, False),
        # Without `use_ema` Keras keeps this number, and does not use it.
        ({"ema_overwrite_frequency": 3}, False),
        ({"global_clipnorm": 1}, True),
    )
    def test_stages_wait_for_no_other_stage(self, options, waits):
        model = _make()
        model.compile(
            keras.optimizers.Adam(**options), "mse", steps_per_execution=2
        )
        model.train_on_batch(_X[:8], _Y[:8])
        texts = []
        model.summary(120, print_fn=lambda text, **_: texts.append(text))
        self.assertEqual("needs all gradients" in texts[-1], waits)

        @tf.function(autograph=False)
        def two_steps(x, y):
            with model._steps_in_one_graph():
                model.train_step((x, y))
                model.train_step((x, y))

        concrete = two_steps.get_concrete_function(_X[:8], _Y[:8])
        before = _ancestors(_second(concrete.graph, "F0.0"))
        first, last = (model.layers[i].kernel.value for i in (0, -1))
        handles = {id(outer): x for outer, x in concrete.graph.captures}

        def is_updated(variable):
            handle = handles[id(variable.handle)]
            return any(
                op.type.startswith("Assign") and op.inputs[0] is handle
                for op in before
            )

        self.assertTrue(is_updated(first))
        self.assertFalse(is_updated(last))
        norms = [
            op for op in before if op.type == "Sum" and "CPU:1" in op.device
        ]
        self.assertEqual(bool(norms), waits)
        # A device finishes a step before it begins the next one.
        self.assertTrue(any("B0.1/" in op.name for op in before))


def _second(graph, task):
    """Returns the operations of the second task of this name."""
    found = [op for op in graph.get_operations() if f"{task}_1/" in op.name]
    assert found, [op.name for op in graph.get_operations() if task in op.name]
    return found


def _ancestors(operations):
    found, rest = set(), list(operations)
    while rest:
        op = rest.pop()
        if op not in found:
            found.add(op)
            rest += [*(x.op for x in op.inputs), *op.control_inputs]
    return found


if __name__ == "__main__":
    tf.test.main()
