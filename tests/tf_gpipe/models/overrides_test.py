"""Pipelines of models that override Keras's methods, by class or instance."""

import pathlib
import pickle
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests.tf_gpipe import comparison

ARGUMENTS = {
    "num_stages": 2,
    "num_micro_batches": 2,
    "schedule": "gpipe",
    "devices": ["CPU:0", "CPU:1"],
}


def numbers(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype="float32")


def graph():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    x = L.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
    return inputs, L.Dense(2)(L.Add()([x, L.Dense(4)(x)]))


def stack():
    keras.utils.set_random_seed(1)
    return [
        keras.Input((3,)),
        L.Dense(4, activation="tanh", kernel_regularizer="l2"),
        L.Dense(2),
    ]


class Step:
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 4)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"fourth": loss}

    def test_step(self, data):
        return {"sum": ops.sum(self(data[0]))}

    def predict_step(self, data):
        return -super().predict_step(data)


class Own:
    """Overrides all that may be overridden but steps, and has attributes."""

    def prepare(self):
        self.power = 2.0
        self.tracker = keras.metrics.Mean(name="own")
        self.scale = self.add_weight(
            shape=(2,), initializer="ones", name="scale"
        )
        self.hidden = [{"power": 1.5}]
        self.function = self.double
        return self

    def double(self, x):
        return x * self.factor

    @property
    def factor(self):
        return 2.0

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        error = ops.abs(y - y_pred * self.scale)
        loss += ops.mean(error**self.power) * self.hidden[0]["power"]
        self.tracker.update_state(loss)
        return self.function(loss)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "mean": ops.mean(y_pred)}

    @property
    def metrics(self):
        return [*super().metrics, self.tracker]

    def evaluate(self, *args, **kwargs):
        return {"evaluated": super().evaluate(*args, **kwargs)}


class Penalty:
    def prepare(self):
        return self

    @property
    def losses(self):
        return [*super().losses, 0.1 * ops.sum(self.layers[-1].kernel ** 2)]


class WithHead:
    """Has a layer that only the loss uses."""

    def prepare(self):
        self.head = L.Dense(1)
        self.head.build((None, 2))
        return self

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + ops.mean(self.head(y_pred) ** 2)


class Adds(L.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(x**2))
        return x


class Holds(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = Adds()

    def call(self, x):
        return self.inner(x)


class OneLossInCompute:
    """Weighs the loss that one layer has added."""

    def one(self):
        (loss,) = self.get_layer("one").losses
        (inner,) = self.get_layer("two").inner.losses
        return loss + 3.0 * inner

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 10.0 * self.one()


class OneLossInStep(OneLossInCompute):
    """Weighs the loss that one layer has added, in a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)
            loss += 10.0 * self.one() + sum(self.losses)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def classes(mixin):
    """Returns a functional and a sequential class, and how to make each."""

    class Functional(mixin, keras.Model):
        pass

    class Sequential(mixin, keras.Sequential):
        pass

    return {
        "functional": lambda: Functional(*graph()),
        "sequential": lambda: Sequential(stack()),
    }


@keras.saving.register_keras_serializable("overrides_test")
class Configured(keras.Model):
    """A model with its own constructor and config."""

    def __init__(self, width, **kwargs):
        inputs = keras.Input((3,), name="x")
        x = L.Dense(width, name="a")(inputs)
        super().__init__(inputs, L.Dense(2, name="b")(x), **kwargs)
        self.width = width
        self.tracker = keras.metrics.Mean(name="own")
        self.head = L.Dense(1, name="head")
        self.head.build((None, 2))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = ops.mean((y - y_pred) ** 2) * self.width
        self.tracker.update_state(loss)
        return loss + ops.mean(self.head(y_pred) ** 2)

    def get_config(self):
        return {"width": self.width, "name": self.name}


@keras.saving.register_keras_serializable("overrides_test")
class Graph(Own, keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prepare()


@keras.saving.register_keras_serializable("overrides_test")
class Stack(Own, keras.Sequential):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prepare()


class OverridesTest(tf.test.TestCase, parameterized.TestCase):
    def fit(self, model, **kwargs):
        # Keras expects a step to use the metrics that `compile` gets.
        own = isinstance(model, Step) or "train_step" in vars(model)
        metrics = None if own else ["mae"]
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=metrics)
        x, y = numbers(6, 3), numbers(6, 2, seed=1)
        return model.fit(
            x, y, batch_size=6, epochs=2, verbose=0, **kwargs
        ).history

    def compare(self, make, **kwargs):
        found = []
        for plain in (True, False):
            model = make()
            cls = type(model)
            if not plain:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, **{**ARGUMENTS, **kwargs}
                )
                if cls.__module__ == __name__:
                    self.assertIsInstance(model, cls)
                    self.assertEqual(type(model).__name__, cls.__name__)
                self.assertLen(model.stages, 2)
            history = self.fit(model)
            x, y = numbers(6, 3), numbers(6, 2, seed=1)
            logs = [
                dict(zip(history, values, strict=True))
                for values in zip(*history.values(), strict=True)
            ]
            found.append((model, logs))
            found[-1][0].found = (
                model.evaluate(x, y, verbose=0, return_dict=True),
                model.predict(x, verbose=0),
            )
        comparison.assert_same(self, *found)
        self.assertAllClose(found[0][0].found, found[1][0].found, rtol=1e-5)
        return found[1][0]

    @parameterized.product(
        mixin=(Own, Penalty, WithHead), kind=("functional", "sequential")
    )
    @pytest.mark.slow_after(1)
    def test_kept(self, mixin, kind):
        make = classes(mixin)[kind]
        model = self.compare(lambda: make().prepare())
        self.assertIsInstance(
            model,
            tf_gpipe.PipelinedModel
            if kind == "functional"
            else tf_gpipe.PipelinedSequential,
        )

    @parameterized.product(
        schedule=("1f1b", "gpipe"), kind=("functional", "sequential")
    )
    @pytest.mark.slow_after(1)
    def test_steps(self, schedule, kind):
        self.compare(classes(Step)[kind], schedule=schedule)

    def test_one_micro_batch(self):
        make = classes(Own)["functional"]
        self.compare(
            lambda: make().prepare(), num_micro_batches=1, schedule="1f1b"
        )

    @parameterized.product(mixin=(Own, Penalty), batch_size=(1, None))
    @pytest.mark.slow_after(1)
    def test_one_row_with_1f1b(self, mixin, batch_size):
        """One row makes one micro-batch, whose loss is the mini-batch's."""
        found = []
        for pipelined in (False, True):
            model = classes(mixin)["functional"]().prepare()
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, **{**ARGUMENTS, "schedule": "1f1b"}
                )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            rows = 3 if batch_size else 1
            x, y = numbers(rows, 3), numbers(rows, 2, seed=1)
            history = model.fit(
                x, y, batch_size=batch_size, shuffle=False, verbose=0
            ).history
            found.append([*history.values(), *model.get_weights()])
        self.assertAllClose(*found)

    @pytest.mark.slow
    def test_own_call_on_one_row_with_1f1b(self):
        class Doubled(tf_gpipe.PipelinedSequential):
            def call(self, x, **kwargs):
                return 2.0 * super().call(x, **kwargs)

        model = Doubled(stack(), **{**ARGUMENTS, "schedule": "1f1b"})
        model.compile(keras.optimizers.SGD(0.1), "mse")
        plain = model.to_keras()
        x, y = numbers(1, 3), numbers(1, 2, seed=1)
        expected = ops.mean((2.0 * plain(x) - y) ** 2) + sum(plain.losses)
        self.assertAllClose(model.train_on_batch(x, y), expected)

    @parameterized.product(
        mixin=(Own, Penalty), kind=("functional", "sequential")
    )
    def test_whole_mini_batches_with_1f1b(self, mixin, kind):
        plain = classes(mixin)[kind]().prepare()
        model = tf_gpipe.PipelinedModel.from_model(
            plain, **{**ARGUMENTS, "schedule": "1f1b"}
        )
        name = "compute_loss" if mixin is Own else "losses"
        with self.assertRaisesRegex(
            ValueError, f"(?s){type(plain).__name__} overrides `{name}`.*gpipe"
        ):
            self.fit(model)

    @parameterized.product(
        mixin=(OneLossInCompute, OneLossInStep), num_micro_batches=(1, 2, 3)
    )
    @pytest.mark.slow_after(2)
    def test_loss_of_one_layer(self, mixin, num_micro_batches):
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((3,))
            x = Adds(name="one")(L.Dense(4, kernel_regularizer="l2")(inputs))
            x = Holds(name="two")(L.Dense(4, activity_regularizer="l2")(x))
            cls = type("Model", (mixin, keras.Model), {})
            model = cls(inputs, L.Dense(2)(x))
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model,
                    **{**ARGUMENTS, "num_micro_batches": num_micro_batches},
                )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            x, y = numbers(6, 3), numbers(6, 2, seed=1)
            history = model.fit(x, y, epochs=2, verbose=0).history
            model(x)
            found.append(
                [
                    *history.values(),
                    *model.get_weights(),
                    *(keras.ops.sum(loss) for loss in model.losses),
                ]
            )
        self.assertAllClose(*found)

    def test_attributes_set_before_the_graph(self):
        """As in KerasHub's tasks: weights keep the plain model's order."""

        class Task(keras.Model):
            def __init__(self, inputs, outputs):
                self.head = L.Dense(1)
                super().__init__(inputs, outputs)
                self.head.build((None, 2))

        plain = Task(*graph())
        names = [v.path for v in plain.variables]
        model = tf_gpipe.PipelinedModel.from_model(plain, **ARGUMENTS)
        self.assertEqual([v.path for v in model.variables], names)
        self.assertIs(model.head, plain.head)

    @parameterized.parameters("functional", "sequential")
    def test_methods_of_one_model(self, kind):
        """Methods that are set on an instance of Keras's own class."""

        def make():
            model = keras.Model(*graph())
            if kind == "sequential":
                model = keras.Sequential(stack())
            model.train_step = types.MethodType(Step.train_step, model)
            model.tag = "mine"
            return model

        model = self.compare(make)
        self.assertEqual(model.tag, "mine")
        if kind == "sequential":
            model = tf_gpipe.PipelinedSequential(make(), **ARGUMENTS)
            self.assertIn("fourth", self.fit(model))

    def test_compute_loss_of_one_model(self):
        model = tf_gpipe.PipelinedModel(
            *graph(), **{**ARGUMENTS, "schedule": "1f1b"}
        )
        model.compute_loss = lambda *args, **kwargs: ops.zeros(())
        with self.assertRaisesRegex(ValueError, "overrides `compute_loss`"):
            self.fit(model)

    @parameterized.parameters("call", "__call__")
    def test_refuses_calls(self, name):
        def call(self, *args, **kwargs):
            return 2 * getattr(super(type(self), self), name)(*args, **kwargs)

        for base, made, cut in (
            (keras.Model, graph, tf_gpipe.PipelinedModel.from_model),
            (
                keras.Sequential,
                lambda: [stack()],
                tf_gpipe.PipelinedModel.from_model,
            ),
            (keras.Sequential, lambda: [stack()], tf_gpipe.PipelinedSequential),
        ):
            cls = type("Twice", (base,), {name: call})
            model = cls(*made())
            with self.assertRaisesRegex(
                TypeError, f"(?s)Twice overrides `{name}`.*layers of the model"
            ):
                cut(model, **ARGUMENTS)

    def test_call_of_one_model(self):
        model = keras.Model(*graph())
        model.call = lambda x: x
        with self.assertRaisesRegex(TypeError, "overrides `call`"):
            tf_gpipe.PipelinedModel.from_model(model, **ARGUMENTS)

    @parameterized.parameters(
        *("_config", "stages", "rebalance", "_place", "_running")
    )
    def test_refuses_names_of_a_pipeline(self, name):
        by_class = type("Clash", (keras.Model,), {name: 3})(*graph())
        by_model = keras.Model(*graph())
        setattr(by_model, name, 3)
        for model in (by_class, by_model):
            with self.assertRaisesRegex(
                ValueError, f"(?s){type(model).__name__}.*`{name}`.*Rename"
            ):
                tf_gpipe.PipelinedModel.from_model(model, **ARGUMENTS)

    def test_subclass_of_a_pipeline(self):
        class Mine(keras.Model):
            def train_step(self, data):
                return {**super().train_step(data), "mine": 1.0}

        class Pipe(tf_gpipe.PipelinedModel):
            def train_step(self, data):
                return {**super().train_step(data), "pipe": 2.0}

        model = Pipe.from_model(Mine(*graph()), **ARGUMENTS)
        self.assertIsInstance(model, Mine)
        self.assertIsInstance(model, Pipe)
        self.assertContainsSubset({"loss", "mine", "pipe"}, self.fit(model))
        again = tf_gpipe.PipelinedModel.from_model(model, **ARGUMENTS)
        self.assertContainsSubset({"loss", "mine", "pipe"}, self.fit(again))

    def test_sequential_within_a_constructor(self):
        class Mine(Own, keras.Sequential):
            pass

        class Pipe(tf_gpipe.PipelinedSequential):
            def __init__(self):
                super().__init__(Mine(stack()), **ARGUMENTS)

        with self.assertRaisesRegex(TypeError, "Pipe would lose.*Mine"):
            Pipe()

        class Given(tf_gpipe.PipelinedSequential):
            def __init__(self, width, **kwargs):
                super().__init__([L.Dense(width), L.Dense(1)], **kwargs)

            def train_step(self, data):
                return {**super().train_step(data), "given": 1.0}

        given = Given(3, **ARGUMENTS)
        model = tf_gpipe.PipelinedSequential(given, **ARGUMENTS)
        self.assertIsInstance(model, Given)
        self.assertIn("given", self.fit(model))

    def test_frozen_model(self):
        plain = classes(Own)["functional"]().prepare()
        plain.trainable = False
        model = tf_gpipe.PipelinedModel.from_model(plain, **ARGUMENTS)
        self.assertFalse(model.trainable)

    def test_compiled_model(self):
        plain = classes(Own)["functional"]().prepare()
        self.fit(plain)
        model = tf_gpipe.PipelinedModel.from_model(plain, **ARGUMENTS)
        with self.assertRaisesRegex(ValueError, "compile"):
            model.fit(numbers(4, 3), numbers(4, 2))

    @parameterized.parameters(
        lambda: Configured(4), lambda: Graph(*graph()), lambda: Stack(stack())
    )
    @pytest.mark.slow_after(1)
    def test_saved_and_loaded(self, make):
        plain = make()
        model = tf_gpipe.PipelinedModel.from_model(plain, **ARGUMENTS)
        self.fit(model)
        path = pathlib.Path(self.get_temp_dir(), f"{model.name}.keras")
        model.save(path)
        weights = pathlib.Path(self.get_temp_dir(), f"{model.name}.weights.h5")
        model.save_weights(weights)
        config = model.get_config()
        copies = {
            "loaded": keras.saving.load_model(path),
            "pickled": pickle.loads(pickle.dumps(model)),
            "of config": type(model).from_config(config),
            "of json": keras.models.model_from_json(model.to_json()),
        }
        x, y = numbers(6, 3), numbers(6, 2, seed=1)
        before = model(x)
        logs = model.train_on_batch(x, y, return_dict=True)
        for name, copy in copies.items():
            with self.subTest(name):
                self.assertIsInstance(copy, type(plain))
                self.assertEqual(copy.name, model.name)
                self.assertLen(copy.stages, 2)
                self.assertEqual(copy._pipeline.schedule.name, "gpipe")
                # A loaded `Sequential` leaves its own name out of paths.
                for ours, theirs in zip(
                    copy.weights, model.weights, strict=True
                ):
                    self.assertEndsWith(theirs.path, ours.path)
                if name in ("loaded", "pickled"):
                    self.assertAllClose(before, copy(x))
                    self.assertAllClose(
                        logs, copy.train_on_batch(x, y, return_dict=True)
                    )

    @parameterized.parameters(
        lambda: Configured(4), lambda: Graph(*graph()), lambda: Stack(stack())
    )
    def test_hdf5(self, make):
        plain = make()
        model = tf_gpipe.PipelinedModel.from_model(plain, **ARGUMENTS)
        path = str(pathlib.Path(self.get_temp_dir(), "model.h5"))
        model.save(path)
        cls = type(plain)
        loaded = keras.saving.load_model(
            path, custom_objects={cls.__name__: cls}
        )
        self.assertIs(type(loaded), cls)
        x = numbers(6, 3)
        self.assertAllClose(model(x), loaded(x))

    def test_weights_of_the_plain_model(self):
        path = pathlib.Path(self.get_temp_dir(), "plain.weights.h5")
        plain = Configured(4)
        plain.save_weights(path)
        model = tf_gpipe.PipelinedModel.from_model(Configured(4), **ARGUMENTS)
        model.load_weights(path)
        for a, b in zip(plain.weights, model.weights, strict=True):
            self.assertAllClose(a, b)

    def test_export(self):
        model = tf_gpipe.PipelinedModel.from_model(Graph(*graph()), **ARGUMENTS)
        path = str(pathlib.Path(self.get_temp_dir(), "exported"))
        model.export(path, verbose=False)
        x = numbers(6, 3)
        loaded = tf.saved_model.load(path)
        self.assertAllClose(model(x), loaded.serve(x))


if __name__ == "__main__":
    tf.test.main()
