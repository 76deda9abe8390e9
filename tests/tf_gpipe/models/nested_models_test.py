"""Nested models are cut into stages, and numbers equal the plain model's."""

import functools
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison
from tf_gpipe.stage import model_graph

ROWS = 6


def numbers(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype="float32")


def block(units=4, **kwargs):
    """A functional model of two layers."""
    x = inputs = keras.Input((4,))
    x = L.Dense(4, activation="tanh", **kwargs)(x)
    return keras.Model(inputs, L.Dense(units)(x))


def stack(*layers):
    return keras.Sequential(
        [*layers] or [L.Dense(4, activation="tanh"), L.Dense(4)]
    )


def functional():
    x = inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(2)(block()(x)))


def sequential():
    x = inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(2)(stack()(x)))


def sequential_alone():
    """A nested `Sequential` with no layer around it."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, stack()(inputs))


def three_levels():
    inner = stack(
        L.Dense(4, activation="relu"), block(), L.LayerNormalization()
    )
    x = middle = keras.Input((4,))
    x = L.Add()([inner(x), x])
    middle = keras.Model(middle, [L.Dense(4)(x), x])
    inputs = keras.Input((4,))
    a, b = middle(inputs)
    return keras.Model(inputs, L.Dense(2)(stack()(a) + 2.0 * b))


def siamese():
    tower = stack(
        L.Dense(4, activation="tanh", kernel_regularizer="l2"), block()
    )
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    both = L.Concatenate()([tower(a), tower(2.0 * b)])
    return keras.Model([a, b], L.Dense(2)(both))


def siamese_of_one_input():
    """One tower is called three times, twice in a row with a layer between."""
    tower = block()
    inputs = keras.Input((4,))
    a, b = tower(inputs), tower(L.Dense(4)(tower(-inputs)))
    return keras.Model(inputs, L.Dense(2)(ops.abs(a - b)))


def in_a_row():
    tower = block()
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(2)(tower(tower(tower(inputs)))))


def dictionaries():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    h = L.Concatenate()([L.Dense(4)(b), a])
    inner = keras.Model({"b": b, "a": a}, {"z": L.Dense(4)(h), "h": [h, h]})
    x, y = keras.Input((4,), name="x"), keras.Input((3,), name="y")
    made = inner({"a": x, "b": y})
    return keras.Model(
        [x, y], L.Dense(2)(L.Concatenate()([*made["h"], made["z"]]))
    )


def dictionary_for_a_list():
    """The nested model's inputs are not in the order of their names."""
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    inner = keras.Model([b, a], L.Dense(4)(a) + 2.0 * L.Dense(4)(b))
    x, y = keras.Input((4,), name="x"), keras.Input((4,), name="y")
    return keras.Model([x, y], L.Dense(2)(inner([x, y])))


def lists_of_one():
    inputs = keras.Input((4,))
    inner = keras.Model([inputs], [L.Dense(4)(inputs)])
    x = keras.Input((4,))
    return keras.Model([x], [L.Dense(2)(inner(inner([x]))[0])])


def passes_on():
    """The nested model returns an input, too, and one tensor twice."""
    a = keras.Input((4,))
    h = L.Dense(4)(a)
    inner = keras.Model(a, [a, h, h])
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(L.Concatenate()(inner(x))))


def returned_as_it_is():
    """The nested model's outputs are outputs of the model."""
    x = keras.Input((4,))
    a, b = three_outputs()(x)[:2]
    return keras.Model(x, L.Add()([a, b]))


def three_outputs():
    x = keras.Input((4,))
    h = L.Dense(2, activation="relu")(x)
    return keras.Model(x, [h, L.Dense(2)(h), L.Dense(3)(h)])


def normalized(**call):
    inner = stack(L.Dense(4), L.BatchNormalization(), block())
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(2)(inner(inputs, **call)))


def frozen():
    """Keras's recipe for transfer learning."""
    x = inputs = keras.Input((4,))
    base = stack(L.Dense(4), L.BatchNormalization(momentum=0.5), block())
    base.trainable = False
    return keras.Model(inputs, L.Dense(2)(base(x, training=False)))


def partly_frozen():
    model = frozen()
    model.layers[1].layers[0].trainable = True
    return model


def losses_within():
    class Penalty(L.Layer):
        def call(self, x):
            self.add_loss(0.1 * ops.mean(ops.square(x)))
            return x

    inner = stack(
        L.Dense(4, activity_regularizer="l2", bias_regularizer="l1"),
        Penalty(),
        block(kernel_regularizer="l2"),
    )
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(2)(inner(inner(inputs))))


def regularized_itself():
    """Keras supports such a regularizer only on a nested `Sequential`."""
    inner = stack()
    inner.activity_regularizer = keras.regularizers.L2(0.1)
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(2)(inner(inner(inputs))))


def wide_to_narrow():
    """A float64 tensor is the input of a float32 model."""
    x = keras.Input((4,), dtype="float64")
    return keras.Model(x, L.Dense(2)(block()(x)))


def flat_to_column():
    """Keras adds the last axis of the nested model's input."""
    a = keras.Input((4, 1))
    inner = keras.Model(a, L.Rescaling(2.0)(L.Activation("tanh")(a)))
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(L.Flatten()(inner(x))))


def own_call():
    class Doubled(keras.Model):
        def call(self, x, **kwargs):
            return 2.0 * super().call(x, **kwargs)

    a = keras.Input((4,))
    inner = Doubled(a, L.Dense(4)(L.Dense(4)(a)))
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(stack(inner, L.Dense(4))(x)))


def own_class():
    """The nested model is of a subclass without its own `call`."""

    class Named(keras.Model):
        def __init__(self):
            a = keras.Input((4,))
            super().__init__(a, L.Dense(4)(L.Dense(4)(a)))

    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(Named()(x)))


def wrapped():
    """A model in a layer is a part of that layer."""
    x = keras.Input((4, 4))
    y = L.TimeDistributed(block())(x)
    return keras.Model(x, L.Dense(2)(L.Bidirectional(L.LSTM(3))(y)))


def given_a_constant():
    """A constant is no tensor of the graph: the model stays one layer."""
    a, b = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model([a, b], L.Dense(4)(L.Add()([a, b])))
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(inner([x, ops.ones((1, 4))])))


def optional_input():
    class Either(L.Layer):
        def call(self, x, other=None):
            return x if other is None else x + other

    a, b = keras.Input((4,)), keras.Input((4,), optional=True)
    inner = keras.Model([a, b], L.Dense(4)(Either()(a, other=b)))
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(inner([x, -x])))


def tied():
    """A weight of the nested model is used outside of it, too."""
    a = keras.Input((4,))
    table = L.Dense(5)
    inner = keras.Model(a, L.Dense(5, activation="tanh")(table(a)))
    x = keras.Input((4,))
    h = L.LayerNormalization()(inner(x))
    return keras.Model(x, ops.add(h, table.bias))


def of_tensors_in_between():
    """The nested model is made from tensors within another model."""
    a = keras.Input((4,))
    h = L.Dense(4, activation="relu")(a)
    z = L.Dense(4)(L.Dense(4)(h))
    inner = keras.Model(h, z)
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(inner(keras.Model(a, [h, z])(x)[0])))


def part_that_is_not_used():
    """Keras computes an unused output, too, and adds its losses."""
    a = keras.Input((4,))
    h = L.Dense(4)(a)
    other = L.Dense(3, activity_regularizer="l2")(h)
    inner = keras.Model(a, {"h": h, "other": other})
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(inner(x)["h"]))


def handed_on_as_told():
    """An input that the nested model returns has the dtype of its spec."""

    class Wide(L.Layer):
        def call(self, x):
            return tf.cast(x, "float64")

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, "float32")

    class ByType(L.Layer):
        def __init__(self):
            super().__init__(autocast=False)

        def call(self, x):
            return tf.cast(x, "float32") * (
                2.0 if x.dtype == "float64" else 3.0
            )

    a = keras.Input((4,))
    inner = keras.Model(a, [a, L.Dense(4)(a)])
    x = keras.Input((4,))
    y, z = inner(Wide()(L.Dense(4)(x)))
    return keras.Model(x, L.Dense(2)(ByType()(y) + z))


MODELS = {
    functional: 3,
    sequential: 3,
    sequential_alone: 2,
    three_levels: 11,
    siamese: 9,
    siamese_of_one_input: 11,
    in_a_row: 7,
    dictionaries: 5,
    dictionary_for_a_list: 5,
    lists_of_one: 3,
    passes_on: 3,
    returned_as_it_is: 4,
    frozen: 5,
    partly_frozen: 5,
    losses_within: 9,
    regularized_itself: 3,
    wide_to_narrow: 3,
    flat_to_column: 4,
    own_call: 3,
    own_class: 3,
    wrapped: 3,
    given_a_constant: 2,
    optional_input: 4,
    tied: 4,
    of_tensors_in_between: 6,
    part_that_is_not_used: 3,
    handed_on_as_told: 6,
}


def data_of(model, rows=ROWS):
    """Returns a mini-batch for a model."""
    x = [
        numbers(rows, *t.shape[1:], seed=i).astype(t.dtype)
        for i, t in enumerate(model.inputs)
    ]
    y = numbers(rows, model.outputs[0].shape[-1], seed=9)
    return x[0] if len(x) == 1 else x, y


@functools.cache
def named_alike(make):
    """Returns a function that makes models whose layers have the same names."""

    def named():
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        return make()

    return named


class Case(tf.test.TestCase, parameterized.TestCase):
    def assertNoModels(self, model):
        """Checks that no stage has a nested model as a layer."""
        for stage in model.stages:
            for layer in stage.layers:
                self.assertNotIsInstance(layer, keras.Model)

    def compare(self, make, num_stages=2, num_micro_batches=3, data=None, **kw):
        """Trains a model and its pipeline alike. Returns the pipeline."""
        data = data or [data_of(make())]
        devices = [f"CPU:{i}" for i in range(num_stages)]

        plain = comparison.train_plain(named_alike(make), data, loss="mse")
        piped = comparison.train(
            named_alike(make),
            data,
            loss="mse",
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            devices=devices,
            **kw,
        )
        comparison.assert_same(self, plain, piped)
        x, models = data[0][0], (plain[0], piped[0])
        for call in (lambda m: m(x), lambda m: m.predict(x, verbose=0)):
            self.assertAllClose(*(keras.tree.flatten(call(m)) for m in models))
        self.assertEqual(*([v.path for v in m.variables] for m in models))
        return piped[0]


class NumbersTest(Case):
    @parameterized.parameters(*MODELS.items())
    @pytest.mark.slow_after(1)
    def test_every_call_a_stage(self, make, num_calls):
        """Each call is a stage, as far as there are devices."""
        model = self.compare(make, min(num_calls, 8))
        self.assertEqual(
            sum(len(stage.nodes) for stage in model.stages), num_calls
        )

    @pairwise.product(
        make=(siamese, three_levels, losses_within),
        schedule=("gpipe", "zero_bubble"),
        remat=("always", "never"),
    )
    @pytest.mark.slow_after(1)
    def test_schedules(self, make, schedule, remat):
        self.compare(make, 3, schedule=schedule, remat=remat)


def mask_from_outside(mask_zero=True):
    x = keras.Input((5,), dtype="int32")
    h = L.Embedding(7, 4, mask_zero=mask_zero)(x)
    return x, h


def masked_sequence():
    """The mask goes through nested models to one that uses it."""
    x, h = mask_from_outside()
    h = stack(L.Dense(4), L.LSTM(4, return_sequences=True))(h)
    a = keras.Input((5, 4))
    inner = keras.Model(a, stack(L.Dense(3), L.GRU(3))(a))
    return keras.Model(x, L.Dense(2)(inner(h)))


def mask_made_within():
    a = keras.Input((5,), dtype="int32")
    inner = keras.Model(a, L.Dense(4)(L.Embedding(7, 4, mask_zero=True)(a)))
    x = keras.Input((5,), dtype="int32")
    h = stack(L.LSTM(3))(inner(x))
    return keras.Model(x, L.Dense(2)(h))


def explicit_mask():
    """A mask replaces the one that a tensor has, or is its first one."""
    x, h = mask_from_outside()
    plain = L.Embedding(7, 4)(x)
    a = keras.Input((5, 4))
    inner = keras.Model(a, L.LSTM(3)(L.Dense(4)(a)))
    mask = ops.greater(x, 2)
    made = [inner(h, mask=mask), inner(plain, mask=mask), inner(h)]
    y = keras.Input((5, 4))
    two = keras.Model([a, y], L.Add()([L.LSTM(2)(a), L.LSTM(2)(y)]))
    plain_2 = keras.layers.Identity()(plain)
    made.append(two([h, plain_2], mask=[mask, ops.not_equal(x, 1)]))
    return keras.Model(x, L.Dense(2)(L.Concatenate()(made)))


def mask_of_the_output():
    """A loss is a mean over the steps that are not masked."""
    x, h = mask_from_outside()
    h = stack(L.Dense(4), L.LSTM(4, return_sequences=True))(h)
    return keras.Model(x, stack(L.Dense(2), L.Activation("tanh"))(h))


def mask_that_is_cast():
    """A model of float64 within one of float32, and back."""
    x, h = mask_from_outside()
    a = keras.Input((5, 4), dtype="float64")
    inner = keras.Model(a, L.LSTM(4, return_sequences=True, dtype="float64")(a))
    b = keras.Input((5, 4), dtype="float32")
    outer = keras.Model(b, L.LSTM(3)(b))
    return keras.Model(x, L.Dense(2)(outer(inner(h))))


MASKED = (
    masked_sequence,
    mask_made_within,
    explicit_mask,
    mask_of_the_output,
    mask_that_is_cast,
)


def tokens_of(model, rows=ROWS):
    x = np.random.default_rng(0).integers(0, 5, (rows, 5)).astype("int32")
    x[:, 3:] *= np.arange(rows)[:, None] % 2
    return x, numbers(rows, *model.outputs[0].shape[1:], seed=9)


class MasksTest(Case):
    @pairwise.each(make=MASKED, schedule=("1f1b", "gpipe"))
    @pytest.mark.slow_after(1)
    def test_numbers(self, make, schedule):
        data = [tokens_of(make())]
        model = self.compare(make, 4, data=data, schedule=schedule)
        self.assertNoModels(model)
        # The masks matter.
        x, y = data[0]
        others = np.where(x == 0, 1, x)
        self.assertNotAllClose(model(x), model(others))

    def test_of_a_call(self):
        """A mask that is given to the call of the pipeline."""

        def make():
            x = keras.Input((5, 4))
            h = stack(L.Dense(4), block_of_sequences())(x)
            return keras.Model(x, L.LSTM(2)(h))

        x, mask = numbers(ROWS, 5, 4), np.arange(5) < np.arange(1, 7)[:, None]
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(0)
            model = make()
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, num_stages=4, devices=["CPU:0"] * 4
                )
            found.append(model(x, mask=tf.constant(mask)))
            self.assertNotAllClose(found[-1], model(x))
        self.assertAllClose(*found)


def block_of_sequences():
    a = keras.Input((5, 4))
    return keras.Model(a, L.Dense(4)(L.LSTM(4, return_sequences=True)(a)))


def drops(inner_training=None, **call):
    def make():
        a = keras.Input((4,))
        h = L.Dropout(0.5, seed=3)(L.Dense(4)(a), training=inner_training)
        inner = stack(keras.Model(a, h), L.BatchNormalization())
        x = keras.Input((4,))
        return keras.Model(x, L.Dense(2)(inner(L.Dense(4)(x), **call)))

    return make


@keras.saving.register_keras_serializable(package="nested_models_test")
class Doubled(L.Layer):
    """Has no mode, and Keras infers its spec from `call`."""

    def call(self, x):
        return 2 * x


@keras.saving.register_keras_serializable(package="nested_models_test")
class Moded(L.Layer):
    """Has a mode, which its spec does not depend on."""

    def call(self, x, training=None):
        return 2 * x if training else x

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class TrainingTest(Case):
    """`training=` has the effect that it has in Keras."""

    @parameterized.product(
        inner_training=(None, False, True),
        call=({}, {"training": False}, {"training": True}),
    )
    @pytest.mark.slow_after(1)
    def test_numbers(self, inner_training, call):
        model = self.compare(
            drops(inner_training, **call), 3, num_micro_batches=1
        )
        self.assertNoModels(model)
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(1)
            model = drops(inner_training, **call)()
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model,
                    num_stages=2,
                    num_micro_batches=1,
                    devices=["CPU:0"] * 2,
                )
            x = numbers(ROWS, 4)
            found.append([model(x, training=t) for t in (None, False, True)])
        self.assertAllClose(*found)

    @parameterized.product(
        layer=(lambda: L.Reshape((4,)), Doubled, Moded),
        balance=(lambda *_: 1, "time"),
    )
    @pytest.mark.slow_after(4)
    def test_cut_by_costs(self, layer, balance):
        """Layers whose spec takes no `training` have one in such a call."""

        def make():
            base = stack(layer(), L.Dense(4))
            x = keras.Input((4,))
            return keras.Model(x, L.Dense(2)(base(x, training=False)))

        self.compare(make, 2, balance=balance)

    @parameterized.parameters(lambda: L.Reshape((4,)), Doubled, Moded)
    def test_several_rows_for_each_row(self, layer):
        x = inputs = keras.Input((4,))
        base = keras.Model(x, layer()(ops.concatenate([x, x], axis=0)))
        graphs = [
            model_graph.of_model(keras.Model(inputs, base(inputs, **kwargs)))
            for kwargs in ({}, {"training": True})
        ]
        for graph in graphs:
            self.assertContainsSubset(graph.returned, graph.multiplied)

    @pytest.mark.slow
    def test_draws_of_a_tower_that_is_called_twice(self):
        """Draws come in Keras's order, even if one call is nested deeper."""

        def make():
            tower = stack(L.Dense(4), L.Dropout(0.5), L.BatchNormalization())
            deeper = stack(L.Dense(4), tower, L.Dropout(0.5), L.Dense(4))
            x = keras.Input((4,))
            made = [tower(x), deeper(tower(x)), tower(L.Dense(4)(x))]
            return keras.Model(x, L.Dense(2)(L.Concatenate()(made)))

        self.assertNoModels(self.compare(make, 8, num_micro_batches=1))

    def test_lora_later(self):
        """Layers get weights after the pipeline was made."""
        found = []
        x, y = numbers(ROWS, 4), numbers(ROWS, 2, seed=1)
        for pipelined in (False, True):
            keras.utils.set_random_seed(1)
            model = sequential()
            inner = model.layers[1]
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, num_stages=3, devices=["CPU:0"] * 3
                )
            for layer in inner.layers:
                layer.enable_lora(2)
            model.compile("adam", "mse")
            model.optimizer.build(model.trainable_variables)
            logs = [model.train_on_batch(x, y, return_dict=True)]
            found.append((model, logs))
        comparison.assert_same(self, *found)

    @parameterized.parameters(
        lambda model: model.add(L.Dense(4)), lambda model: model.pop()
    )
    def test_other_layers_later(self, change):
        model = sequential()
        inner = model.layers[1]
        model = tf_gpipe.PipelinedModel.from_model(
            model, num_stages=2, devices=["CPU:0"] * 2
        )
        model.compile("sgd", "mse")
        x = numbers(ROWS, 4)
        model.predict(x, verbose=0)
        change(inner)
        for use in (model, model.evaluate, lambda x: model.fit(x, x)):
            with self.assertRaisesRegex(
                ValueError, f"'{inner.name}', .* got or lost layers"
            ):
                use(x)

    @pytest.mark.slow
    def test_base_of_keras_applications(self):
        def make():
            base = keras.applications.MobileNetV2(
                weights=None,
                include_top=False,
                pooling="avg",
                input_shape=(32, 32, 3),
                alpha=0.35,
            )
            base.trainable = False
            x = keras.Input((32, 32, 3))
            h = L.Rescaling(2.0, -1.0)(x)
            return keras.Model(x, L.Dense(2)(base(h, training=False)))

        model = self.compare(make, 4, num_micro_batches=2, balance="parameters")
        sizes = [stage.count_params() for stage in model.stages]
        self.assertLess(max(sizes), 0.4 * sum(sizes))

    @parameterized.parameters(
        (normalized, {}), (normalized, {"training": False}), (frozen, {})
    )
    def test_batch_normalisation(self, make, call):
        """Statistics move once a mini-batch, unless the layer is frozen."""

        def made():
            return make(**call)

        model = self.compare(made, 4, num_micro_batches=1)
        self.assertNoModels(model)

    def test_other_arguments_of_a_context(self):
        """Only a model can pass them on to its layers: it stays one layer."""

        class Scaled(L.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self._register_call_context_args("scale")

            def call(self, x, scale=1.0):
                return x * scale

        class Holder(keras.Sequential):
            def __init__(self, layers):
                super().__init__(layers)
                self._register_call_context_args("scale")

        def make():
            x = keras.Input((4,))
            inner = Holder([L.Dense(4), Scaled(), Scaled()])
            return keras.Model(x, L.Dense(2)(inner(x, scale=2.0)))

        self.compare(make, 2)

    @parameterized.parameters(True, False)
    def test_frozen_and_thawed_later(self, first):
        found = []
        x, y = numbers(ROWS, 4), numbers(ROWS, 2, seed=1)
        for pipelined in (False, True):
            keras.utils.set_random_seed(1)
            model = normalized()
            inner = model.layers[1]
            inner.trainable = first
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model,
                    num_stages=4,
                    num_micro_batches=1,
                    devices=["CPU:0"] * 4,
                )
            logs = []
            for trainable in (first, not first):
                inner.trainable = trainable
                model.compile("adam", "mse")
                model.optimizer.build(model.trainable_variables)
                logs.append(model.train_on_batch(x, y, return_dict=True))
            found.append((model, logs))
        comparison.assert_same(self, *found)


class DtypesTest(Case):
    @parameterized.parameters("mixed_bfloat16", "float64")
    def test_policies(self, policy):
        """The nested model's inputs and layers keep their dtypes."""

        def make():
            keras.config.set_dtype_policy(policy)
            try:
                inner = stack(keras.Input((4,)), L.Dense(4), block())
                x = keras.Input((4,))
                return keras.Model(
                    x, L.Dense(2, dtype="float32")(block()(inner(x)))
                )
            finally:
                keras.config.set_dtype_policy("float32")

        plain, piped = [], []
        data = [data_of(make())]
        for found, kwargs in (
            (plain, {}),
            (piped, dict(num_stages=4, devices=["CPU:0"] * 4)),
        ):
            found += comparison.train(make, data, loss="mse", **kwargs)
        self.assertNoModels(piped[0])
        tolerance = 1e-5 if policy == "float64" else 2e-2
        comparison.assert_same(self, plain, piped, tolerance, tolerance)

    @parameterized.parameters(True, False)
    def test_input_of_a_lower_precision(self, sequential):
        """The layers get a rounded input."""

        def make():
            a = keras.Input((4,), dtype="bfloat16")
            layers = [L.Rescaling(1.0, dtype="float32"), L.Dense(2)]
            inner = keras.Sequential([a, *layers])
            if not sequential:
                inner = keras.Model(a, layers[1](layers[0](a)))
            x = keras.Input((4,))
            return keras.Model(x, inner(x))

        model = make()
        x = np.full((2, 4), 257.0, "float32")
        expected = model(x)
        pipeline = tf_gpipe.PipelinedModel.from_model(
            model, num_stages=2, devices=["CPU:0"] * 2
        )
        self.assertAllEqual(pipeline(x), expected)
        self.assertAllEqual(pipeline(x), pipeline(np.full_like(x, 256.0)))


class SequentialTest(tf.test.TestCase, parameterized.TestCase):
    """Models among the layers of a `PipelinedSequential`."""

    def make_layers(self, built):
        inner = [L.Dense(4, "tanh"), keras.Sequential([L.Dense(4)]), block()]
        layers = [keras.Sequential(inner), L.Dropout(0.0), block(2)]
        return [keras.Input((4,)), *layers] if built else layers

    @parameterized.product(built=(True, False), num_stages=(2, 7, None))
    @pytest.mark.slow_after(1)
    def test_numbers(self, built, num_stages):
        data = [(numbers(ROWS, 4), numbers(ROWS, 2, seed=1))]

        def make():
            keras.backend.clear_session(free_memory=False)
            keras.utils.set_random_seed(1)
            return self.make_layers(built)

        if not built:
            found = []
            for kwargs in ({}, {"num_stages": num_stages}):
                layers = make()
                model = (
                    tf_gpipe.PipelinedSequential(layers, **kwargs)
                    if kwargs
                    else keras.Sequential(layers)
                )
                model.build((None, 4))
                found.append(model)
            found[1].set_weights(found[0].get_weights())
            for model in found:
                model.compile("adam", "mse")
            found = [
                (m, [m.train_on_batch(*data[0], return_dict=True)])
                for m in found
            ]
            comparison.assert_same(self, *found)
            model = found[1][0]
        else:
            plain = comparison.train(make, data, loss="mse")
            piped = comparison.train(
                make, data, loss="mse", num_stages=num_stages
            )
            comparison.assert_same(self, plain, piped)
            model = piped[0]
        self.assertEqual(sum(len(x.nodes) for x in model.stages), 7)
        self.assertLen(model.layers, 3)

    def test_error_of_the_build(self):
        """The error names the layer, and its stage if that is known."""
        layers = [*self.make_layers(True), L.Reshape((3,), name="odd")]
        for balance, where in (
            ([3, 2, 3], "stage 2 on"),
            ("parameters", "a stage not yet known"),
        ):
            with self.assertRaises(ValueError) as caught:
                tf_gpipe.PipelinedSequential(
                    layers, num_stages=3, balance=balance
                )
            (note,) = caught.exception.__notes__
            self.assertRegex(note, f"layer 'odd' .* {where}")

    def test_too_many_stages(self):
        with self.assertRaisesRegex(ValueError, "num_stages=8, 7 layers"):
            tf_gpipe.PipelinedSequential(self.make_layers(True), num_stages=8)

    def test_inputs_in_a_structure(self):
        """The layers are called one after another, without a graph."""
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        h = L.Dense(4)(L.Add()([L.Dense(4)(a), b]))
        layers = [
            keras.Model({"a": a, "b": b}, [h, L.Dense(3)(h)]),
            L.Concatenate(),
            stack(L.Dense(4)),
            block(2),
        ]
        x = {"a": numbers(ROWS, 4), "b": numbers(ROWS, 4, seed=1)}
        plain = keras.Sequential(layers)
        expected = plain(x)
        model = tf_gpipe.PipelinedSequential(
            layers, num_stages=8, devices=["CPU:0"] * 8
        )
        self.assertAllClose(model(x), expected)
        self.assertEqual([len(x.nodes) for x in model.stages], [1] * 8)
        before = model.get_weights()
        found = []
        for each in (plain, model):
            each.set_weights(before)
            each.compile(keras.optimizers.SGD(0.1), "mse")
            logs = each.train_on_batch(x, numbers(ROWS, 2), return_dict=True)
            found.append((each, [logs]))
        comparison.assert_same(self, *found)

    @parameterized.parameters(True, False)
    def test_plan(self, built):
        """A plan has the layers of the pipeline."""
        plan = tf_gpipe.plan(self.make_layers(built), (ROWS, 4), num_stages=3)
        model = tf_gpipe.PipelinedSequential(
            self.make_layers(built), num_stages=3
        )
        model.build((None, 4))
        self.assertEqual(
            [len(x.layers) for x in plan.stages],
            [len(x.nodes) for x in model.stages],
        )
        self.assertEqual(
            [x.parameters for x in plan.stages],
            [x.count_params() for x in model.stages],
        )

    @parameterized.parameters("flops", "memory", "time", lambda *_: 1)
    @pytest.mark.slow_after(1)
    def test_balance(self, balance):
        data = [(numbers(ROWS, 4), numbers(ROWS, 2, seed=1))]

        def make():
            keras.backend.clear_session(free_memory=False)
            return self.make_layers(True)

        plain = comparison.train(make, data, loss="mse")
        piped = comparison.train(
            make, data, loss="mse", num_stages=3, balance=balance
        )
        comparison.assert_same(self, plain, piped)

    @pytest.mark.slow
    def test_verify(self):
        model = tf_gpipe.PipelinedModel.from_model(
            three_levels(), num_stages=3, devices=["CPU:0"] * 3
        )
        model.compile("adam", "mse")
        report = tf_gpipe.verify(model, numbers(ROWS, 4), numbers(ROWS, 2))
        self.assertTrue(report.ok, report)


class FilesTest(Case):
    """Pipelines and plain models load each other's files."""

    def make(self, pipelined, seed):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed)
        model = three_levels()
        if pipelined:
            model = tf_gpipe.PipelinedModel.from_model(
                model, num_stages=4, devices=["CPU:0"] * 4
            )
        model.compile("adam", "mse")
        model.fit(numbers(ROWS, 4), numbers(ROWS, 2), verbose=0)
        return model

    @parameterized.product(
        name=("a.weights.h5", "a.keras"), to_pipeline=(True, False)
    )
    @pytest.mark.slow_after(1)
    def test_weights(self, name, to_pipeline):
        path = str(pathlib.Path(self.get_temp_dir(), name))
        model, other = self.make(not to_pipeline, 1), self.make(to_pipeline, 2)
        (model.save_weights if "weights" in name else model.save)(path)
        other.load_weights(path)
        for a, b in zip(model.variables, other.variables, strict=True):
            self.assertEqual(a.path, b.path)
            self.assertAllEqual(a, b)
        for a, b in zip(
            model.optimizer.variables, other.optimizer.variables, strict=True
        ):
            self.assertAllEqual(a, b)

    @pytest.mark.slow
    def test_saved_and_loaded(self):
        path = str(pathlib.Path(self.get_temp_dir(), "a.keras"))
        model = self.make(True, 1)
        model.save(path)
        other = keras.models.load_model(path)
        self.assertIsInstance(other, tf_gpipe.PipelinedModel)
        x = numbers(ROWS, 4)
        self.assertAllClose(model(x), other(x))
        self.assertEqual(model.balance, other.balance)
        for a in (model, other):
            a.fit(x, numbers(ROWS, 2), verbose=0)
        for a, b in zip(model.variables, other.variables, strict=True):
            self.assertAllClose(a, b)

    @pytest.mark.slow
    def test_what_keras_shows(self):
        model, plain = self.make(True, 1), self.make(False, 1)
        config = model.get_config()
        self.assertEqual(
            plain.get_config(),
            {name: config[name] for name in plain.get_config()},
        )
        self.assertEqual(
            [x.name for x in model.layers], [x.name for x in plain.layers]
        )
        for x in plain.layers:
            self.assertIsInstance(model.get_layer(x.name), type(x))
        lines = []
        model.summary(print_fn=lambda x, *_: lines.append(x))
        others = []
        plain.summary(print_fn=lambda x, *_: others.append(x))
        self.assertEqual(others[0].splitlines()[1:], lines[0].splitlines()[1:])
