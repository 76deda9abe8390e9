"""Losses that layers add equal the plain model's, or a warning tells."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests.tf_gpipe import comparison
from tf_gpipe.stage import model_graph
from tf_gpipe.step.row_dependence import RowDependence

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = np.ones((10, 2), "float32")
# 10 rows do not divide into M=4 equal micro-batches, and 3 rows are fewer than
# M.
DATA = [(X, Y), (X[:3], Y[:3])]
ATTRIBUTE = "add_loss_reduction"
L2 = {"activity_regularizer": "l2"}


def _probabilities(layer, x):
    return ops.softmax(ops.matmul(x, layer.w))


def _balance(layer, x):
    """A loss of mixtures of experts: a product of two means over the batch."""
    p = _probabilities(layer, x)
    chosen = ops.one_hot(ops.argmax(p, -1), 3)
    return 3 * ops.sum(ops.mean(p, 0) * ops.mean(chosen, 0))


def _rows(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


def _noisy(layer, x):
    noise = keras.random.normal(ops.shape(x), seed=layer.seeds)
    return ops.sum(ops.square(x) + 0.0 * noise)


MEANS = {
    "mean": lambda layer, x: ops.mean(x * x),
    "mean of an axis": lambda layer, x: ops.mean(x * x, keepdims=True),
    "mean by hand": lambda layer, x: ops.sum(x * x) / _rows(x),
    "values by the rows": lambda layer, x: ops.mean(x * x, -1) / _rows(x),
    "penalty": lambda layer, x: ops.sum(layer.w**2),
    "penalty of shape (1,)": lambda layer, x: ops.reshape(
        ops.sum(layer.w**2), (1,)
    ),
    "constant": lambda layer, x: ops.convert_to_tensor(3.0),
    "mean beyond all pixels": lambda layer, x: ops.mean(ops.relu(x - 255.0)),
    "entropy": lambda layer, x: ops.mean(
        ops.sum(ops.log(_probabilities(layer, x)) ** 2, -1)
    ),
}
SUMS = {
    "sum": lambda layer, x: ops.sum(x * x),
    "values of rows": lambda layer, x: ops.mean(x * x, -1),
    "values of all": lambda layer, x: 0.1 * x * x,
    "annealed": lambda layer, x: layer.coefficient * ops.sum(x * x),
    "annealed by a tf.Variable": lambda layer, x: (
        layer.variable * ops.sum(x * x)
    ),
    "beyond a margin": lambda layer, x: ops.sum(ops.relu(ops.abs(x) - 9.0)),
    "beyond all pixels": lambda layer, x: ops.sum(ops.relu(x - 255.0)),
    "beyond a price": lambda layer, x: ops.sum(
        ops.where(ops.abs(x) > 20_000.0, x, 0.0)
    ),
    "with noise": _noisy,
    "one row's": lambda layer, x: ops.sum(x[:, 0]),
}
OTHERS = {
    "balance": _balance,
    "norm": lambda layer, x: ops.norm(x),
    "of a mean": lambda layer, x: ops.sum(ops.mean(x, 0) ** 2),
    "masked mean": lambda layer, x: ops.divide_no_nan(
        ops.sum(ops.where(x > 0.5, x, 0.0)),
        ops.sum(ops.cast(x > 0.5, x.dtype)),
    ),
    "pairs": lambda layer, x: ops.sum(ops.matmul(x, ops.transpose(x)) ** 2),
    "most": lambda layer, x: ops.max(ops.relu(x - 255.0)),
}
# Zero, whatever the numbers are: its gradient may be that of a mean or a sum.
UNKNOWN = {
    "gradient alone": lambda layer, x: ops.sum(x - ops.stop_gradient(x)),
    "far beyond": lambda layer, x: ops.sum(ops.relu(x - 1e9)),
}


class Adds(L.Layer):
    """Passes its inputs on, and adds losses."""

    def __init__(self, *losses, **kwargs):
        super().__init__(**kwargs)
        self.functions = losses
        self.seeds = keras.random.SeedGenerator(3)
        self.variable = tf.Variable(0.0, trainable=False)

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3))
        self.coefficient = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        for function in self.functions:
            self.add_loss(function(self, x))
        return x


class Table(L.Layer):
    """A look-up in a table of one row."""

    def build(self, shape):
        self.w = self.add_weight(shape=(1, 4))

    def call(self, x):
        found = ops.take(self.w, x, axis=0)
        self.add_loss(ops.mean(found**2))
        return found


class Counts(L.Layer):
    """Adds the mean of its inputs, or the sum, and returns floats."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        found = ops.cast(x, "float32")
        self.add_loss(self.reduce(found))
        return found


class Kept(L.Layer):
    """Adds a loss of labels, all but one, and returns floats."""

    def __init__(self, keep, reduce, **kwargs):
        super().__init__(**kwargs)
        self.keep = keep
        self.reduce = reduce

    def call(self, x):
        keep = self.keep(x)
        kept = ops.cast(keep, "float32")
        found = ops.where(keep, ops.cast(x, "float32"), 0.0)
        self.add_loss(self.reduce(found**2, kept))
        return found


def _mean_of_kept(values, kept):
    return ops.sum(values) / ops.maximum(ops.sum(kept), 1.0)


class Outer(L.Layer):
    """A layer with inner layers, some of which add losses."""

    def __init__(self, *inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = list(inner)

    def build(self, shape):
        for layer in self.inner:
            layer.build(shape)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def stack(*layers):
    return lambda: [
        keras.Input((4,)),
        L.Dense(5, "tanh"),
        *(make() for make in layers),
        L.Dense(2),
    ]


def adding(*losses):
    return stack(lambda: Adds(*losses, name="adds"))


def train(make, *, data=DATA, **kwargs):
    kwargs = {"num_micro_batches": 4, **kwargs} if kwargs else {}
    return comparison.train(
        make,
        data,
        loss="mse",
        optimizer=lambda: keras.optimizers.SGD(0.01),
        **kwargs,
    )


def dependence(make, training=True):
    """Returns how the losses of the layer "adds" depend on rows."""
    layers = make()
    model = keras.Sequential(layers)
    graph = model_graph.of_layers(model.layers, model.inputs[0])
    found = RowDependence(graph, [tf.zeros((6, 4))], training)
    node = next(x for x in graph.nodes if x.layer.name == "adds")
    return found.of_losses(node)


class KindTest(parameterized.TestCase, tf.test.TestCase):
    def test_kinds(self):
        for kind, functions in (("mean", MEANS), ("sum", SUMS)):
            found = dependence(adding(*functions.values()))
            for name, x in zip(functions, found, strict=True):
                self.assertEqual((x.kind, x.exact), (kind, True), name)

    def test_others(self):
        found = dependence(adding(*OTHERS.values()))
        for name, x in zip(OTHERS, found, strict=True):
            self.assertFalse(x.exact, name)

    def test_unknown(self):
        found = dependence(adding(*UNKNOWN.values()))
        self.assertEqual(found, [None] * len(UNKNOWN))

    @parameterized.parameters("float64", "float16", "bfloat16")
    def test_dtypes(self, dtype):
        functions = MEANS["mean"], SUMS["sum"], OTHERS["of a mean"]
        mean, total, other = dependence(
            stack(lambda: Adds(*functions, dtype=dtype, name="adds"))
        )
        self.assertEqual((mean.kind, mean.exact), ("mean", True))
        self.assertEqual((total.kind, total.exact), ("sum", True))
        self.assertFalse(other.exact)

    def test_no_trace_is_left(self):
        make = adding(*SUMS.values())
        layers = make()
        model = keras.Sequential(layers)
        model(X)
        adds = model.get_layer("adds")
        variables = [np.array(v) for v in model.variables]
        losses = [float(tf.reduce_sum(x)) for x in model.losses]
        ids = set(adds._loss_ids)
        graph = model_graph.of_layers(model.layers, model.inputs[0])
        RowDependence(graph, [X], True).of_losses(graph.nodes[1])
        self.assertAllClose(
            [float(tf.reduce_sum(x)) for x in model.losses], losses
        )
        self.assertEqual(adds._loss_ids, ids)
        for v, before in zip(model.variables, variables, strict=True):
            self.assertAllEqual(v, before)

    def test_batch_normalization_is_of_micro_batches(self):
        # A loss after it is not strictly a mean, but the numerical contract
        # counts it as one.
        make = stack(
            lambda: Outer(
                L.BatchNormalization(), Adds(MEANS["mean"]), name="adds"
            )
        )
        (found,) = dependence(make)
        self.assertTrue(found.exact)
        make = stack(
            lambda: Outer(L.BatchNormalization(), Adds(_balance), name="adds")
        )
        (found,) = dependence(make)
        self.assertFalse(found.exact)

    def test_mean_made_by_another_layer(self):
        # The square of a mean, though the layer that adds it sees no rows.
        make = stack(
            lambda: L.Lambda(lambda x: ops.mean(x, 0, keepdims=True)),
            lambda: Adds(lambda layer, x: ops.sum(x * x), name="adds"),
        )
        (found,) = dependence(make)
        self.assertFalse(found.exact)

    def test_padding(self):
        # A mean over steps that are not padding, whose number varies.
        def masked(layer, x):
            there = ops.cast(ops.any(x != 0, -1, keepdims=True), x.dtype)
            return ops.sum(there * x * x) / ops.maximum(ops.sum(there), 1)

        layers = [keras.Input((4,)), Adds(masked, name="adds"), L.Dense(2)]
        (found,) = dependence(lambda: layers)
        self.assertFalse(found.exact)


class AddedLossesTest(parameterized.TestCase, tf.test.TestCase):
    def assert_same(self, make, warns=False, data=DATA, **kwargs):
        plain = train(make, data=data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            piped = train(make, data=data, **kwargs)
        messages = [str(x.message) for x in caught]
        messages = [x for x in messages if "adds a loss" in x]
        self.assertEqual(bool(messages), warns, messages)
        comparison.assert_same(self, plain, piped)
        return plain[0], piped[0]

    @parameterized.parameters(
        {"schedule": "gpipe"},
        {"schedule": "zero_bubble", "remat": "never"},
        {"schedule": "interleaved", "num_stages": 4},
    )
    @pytest.mark.slow_after(1)
    def test_kinds(self, num_stages=2, **kwargs):
        # All kinds of losses in one layer, in two stages.
        functions = [*MEANS.values(), *SUMS.values()]
        make = stack(
            lambda: Adds(*functions),
            lambda: L.Dense(4, "tanh", activity_regularizer="l2"),
            lambda: Outer(Adds(*functions), Adds(SUMS["sum"])),
        )
        plain, piped = self.assert_same(
            make,
            num_stages=num_stages,
            devices=["CPU:0", "CPU:1"],
            **kwargs,
        )
        results = [
            x.evaluate(X, Y, batch_size=8, verbose=0) for x in (plain, piped)
        ]
        self.assertAllClose(*results, rtol=1e-5)

    @parameterized.named_parameters(
        ("one row", "int32", 1, lambda: L.Embedding(1, 4, **L2)),
        ("one row of its own", "int64", 1, Table),
        ("two rows", "int32", 2, lambda: L.Embedding(2, 4, **L2)),
        ("mean", "int32", 5, lambda: Counts(ops.mean)),
        ("sum", "int64", 5, lambda: Counts(ops.sum)),
        ("mean of bools", "bool", 2, lambda: Counts(ops.mean)),
        ("sum of bools", "bool", 2, lambda: Counts(ops.sum)),
    )
    @pytest.mark.slow_after(4)
    def test_integers(self, dtype, count, make_layer):
        def make():
            return [
                keras.Input((3,), dtype=dtype),
                make_layer(),
                L.Flatten(),
                L.Dense(2),
            ]

        numbers = np.random.default_rng(0).integers(0, count, (10, 3))
        x = numbers.astype(dtype)
        self.assert_same(
            make,
            data=[(x, Y), (x[:3], Y[:3])],
            num_stages=2,
            devices=["CPU:0", "CPU:1"],
        )

    @parameterized.parameters(
        ("int32", lambda x: ops.not_equal(x, -100), _mean_of_kept, True),
        ("int64", lambda x: x >= 0, _mean_of_kept, True),
        ("int32", lambda x: 254 >= x, _mean_of_kept, True),
        ("float32", lambda x: x != -1, _mean_of_kept, True),
        ("float32", lambda x: ops.abs(x) < 1e3, _mean_of_kept, True),
        ("float32", lambda x: ~ops.isnan(x), _mean_of_kept, True),
        ("float32", ops.isfinite, _mean_of_kept, True),
        ("int32", lambda x: x >= 0, lambda x, kept: ops.mean(x), False),
        ("int32", lambda x: x != 255, lambda x, kept: ops.sum(x), False),
        ("float32", lambda x: x != -1, lambda x, kept: ops.sum(x), False),
        ("float32", lambda x: x < 7, lambda x, kept: ops.mean(x), False),
        ("float32", ops.isfinite, lambda x, kept: ops.mean(kept), False),
    )
    def test_a_label_to_ignore(self, dtype, keep, reduce, warns):
        layers = [
            keras.Input((3,), dtype=dtype),
            Kept(keep, reduce, name="kept"),
            L.Dense(2),
        ]
        model = keras.Sequential(layers)
        graph = model_graph.of_layers(model.layers, model.inputs[0])
        x = tf.zeros((6, 3), dtype)
        found = RowDependence(graph, [x], True).of_losses(graph.nodes[0])
        self.assertEqual([not x.exact for x in found], [warns])

    def test_eager(self):
        functions = [MEANS["mean"], SUMS["sum"], SUMS["values of rows"]]
        make = adding(*functions, MEANS["penalty of shape (1,)"])
        plain, _ = train(make)
        keras.utils.set_random_seed(1)
        piped = tf_gpipe.PipelinedSequential(
            make(),
            num_stages=2,
            num_micro_batches=4,
            devices=["CPU:0", "CPU:1"],
        )
        piped.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
        for _ in range(2):
            for x, y in DATA:
                piped.train_on_batch(x, y)
        for a, b in zip(plain.weights, piped.weights, strict=True):
            self.assertAllClose(a, b, rtol=2e-5, atol=2e-6)

    @pytest.mark.slow
    def test_shared_layer(self):
        def make():
            x = keras.Input((4,))
            adds = Adds(SUMS["sum"], MEANS["mean"])
            h = L.Dense(4)(adds(L.Dense(4, "tanh")(x)))
            return keras.Model(x, L.Dense(2)(adds(h)))

        self.assert_same(make, num_stages=3, devices=["CPU:0"] * 3)

    def test_within_another_model(self):
        keras.utils.set_random_seed(1)
        plain = keras.Sequential(adding(SUMS["sum"], MEANS["mean"])())
        piped = tf_gpipe.PipelinedSequential(
            adding(SUMS["sum"], MEANS["mean"])(),
            num_stages=2,
            num_micro_batches=4,
            devices=["CPU:0", "CPU:1"],
        )
        piped.set_weights(plain.get_weights())
        found = []
        for model in (plain, piped):
            for training in (True, False):
                with tf.GradientTape() as tape:
                    y = model(X, training=training)
                    loss = tf.add_n(model.losses) + tf.reduce_sum(y)
                found.append(
                    (loss, *tape.gradient(loss, [model.trainable_weights[0]]))
                )
        for a, b in ((0, 2), (1, 3)):
            for x, y in zip(found[a], found[b], strict=True):
                self.assertAllClose(x, y, rtol=1e-5, atol=1e-5)

    @parameterized.parameters("1f1b", "gpipe")
    def test_others_warn_once_a_layer(self, schedule):
        make = stack(
            lambda: Adds(_balance, OTHERS["norm"], name="router"),
            lambda: Outer(Adds(_balance, name="inner"), name="outer"),
        )
        with self.assertWarnsRegex(
            UserWarning, "'router' .* stage 1"
        ) as caught:
            train(
                make,
                data=DATA[:1],
                num_stages=2,
                devices=["CPU:0", "CPU:1"],
                schedule=schedule,
                balance=[1, 3],
            )
        found = [str(x.message) for x in caught.warnings]
        found = [x for x in found if "adds a loss" in x]
        self.assertLen(found, 2)
        for name, message in zip(("router", "inner"), found, strict=True):
            self.assertIn(f"'{name}'", message)
            self.assertIn("counts as the mean", message)
            self.assertIn("num_micro_batches=1", message)
            self.assertIn("schedule='gpipe'", message)
            self.assertIn(ATTRIBUTE, message)

    def test_one_micro_batch_is_exact(self):
        make = adding(*OTHERS.values())
        self.assert_same(
            make, num_stages=2, num_micro_batches=1, devices=["CPU:0"] * 2
        )

    def test_attribute(self):
        # For a loss that is neither, the attribute decides, also that of an
        # inner layer.
        found = {}
        for said in ("mean", "sum"):

            def make(said=said):
                inner = Adds(OTHERS["of a mean"])
                setattr(inner, ATTRIBUTE, said)
                return [keras.Input((4,)), Outer(inner), L.Dense(2)]

            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*adds a loss")
                _, logs = train(
                    make,
                    data=[(X[:8], Y[:8])],
                    num_stages=2,
                    num_micro_batches=2,
                    devices=["CPU:0"] * 2,
                )
            found[said] = logs[0]["loss"]
        parts = [np.sum(np.mean(x, 0) ** 2) for x in (X[:4], X[4:8])]
        self.assertAllClose(
            found["sum"] - found["mean"], sum(parts) / 2, rtol=1e-5
        )

    def test_attribute_that_is_unknown(self):
        adds = Adds(MEANS["mean"], name="adds")
        setattr(adds, ATTRIBUTE, "average")
        with self.assertRaisesRegex(ValueError, "'average', of layer 'adds'"):
            train(stack(lambda: adds), num_stages=2, devices=["CPU:0"] * 2)

    @pytest.mark.slow
    def test_replicas(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        make = adding(SUMS["sum"], MEANS["mean"], MEANS["penalty"])

        def run(**kwargs):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                if kwargs:
                    model = tf_gpipe.PipelinedSequential(make(), **kwargs)
                else:
                    model = keras.Sequential(make())
                model.compile(keras.optimizers.SGD(0.01), "mse")
            logs = model.fit(X, Y, batch_size=10, verbose=0, shuffle=False)
            return model.get_weights(), logs.history["loss"]

        expected = run()
        received = run(
            num_stages=2,
            num_micro_batches=2,
            devices=[["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]],
        )
        for a, b in zip(expected, received, strict=True):
            for x, y in zip(a, b, strict=True):
                self.assertAllClose(x, y, rtol=1e-5, atol=1e-6)
