"""Inputs and outputs that Keras accepts although they are not as declared."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tests.tf_gpipe import comparison

# Plain Keras's, and the pipeline's with its arguments.
SEQUENTIAL_CLASSES = (
    (keras.Sequential, {}),
    (
        tf_gpipe.PipelinedSequential,
        {"num_stages": 2, "num_micro_batches": 2},
    ),
)


def numbers(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape, dtype="float32")


def two_inputs(structure):
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    inputs = {
        "dict": {"a": a, "b": b},
        "list": [a, b],
        "nested": {"a": a, "more": [b]},
    }[structure]
    x = L.Concatenate()([L.Dense(5)(a), L.Dense(5)(b)])
    return keras.Model(inputs, L.Dense(1)(x))


def one_input(sequential=False, **kwargs):
    inputs = keras.Input(kwargs.pop("shape", (4,)), name="a", **kwargs)
    model = keras.Sequential([inputs, L.Dense(3), L.Dense(1)])
    return model if sequential else keras.Model(inputs, model.layers[1].output)


def tokens():
    x = inputs = keras.Input((4,), dtype="int32")
    x = L.Flatten()(L.Embedding(9, 2)(x))
    return keras.Model(inputs, L.Dense(1)(x))


class More(L.Layer):
    """Returns one tensor more than its spec says."""

    def build(self, shape):
        self.w = self.add_weight(shape=(4, 4), initializer="glorot_uniform")

    def call(self, x):
        return x @ self.w, 2.0 * x

    def compute_output_shape(self, shape):
        return shape


class Fewer(L.Layer):
    """Returns one tensor less than its spec says."""

    def call(self, x):
        return (2.0 * x,)

    def compute_output_shape(self, shape):
        return [shape, shape]


def more(kind):
    if kind == "first":
        layers = [More(), L.Dense(1)]
    elif kind == "last":
        layers = [L.Dense(4), More()]
    else:
        layers = [L.Dense(4), More(), L.Dense(4), More(), L.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def fewer(used):
    inputs = keras.Input((4,))
    a, b = Fewer()(inputs)
    return keras.Model(inputs, L.Dense(1)(L.Add()([a, b]) if used else a))


class OneRow(L.Layer):
    """Gives what passes it a mask of one row, for all rows of a batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def compute_mask(self, x, mask=None):
        return tf.constant([[True, False, True, True, False]])

    def call(self, x):
        return x


class Eights(L.Layer):
    """Makes eight rows, however many it is given."""

    def call(self, x):
        return keras.ops.reshape(x, (8, -1))


class Joins(L.Layer):
    """Takes a dictionary, and uses an input beside a layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(3, name="inner", dtype=self.dtype_policy)

    def build(self, shapes):
        self.dense.build(shapes["a"])

    def call(self, x):
        return self.dense(x["a"]) + x["b"]


class Average(L.Layer):
    def call(self, x):
        return keras.ops.mean(x, axis=-1, keepdims=True)


def recurrent():
    x = inputs = keras.Input((5, 4))
    x = L.GRU(3, return_sequences=True)(x)
    return keras.Model(inputs, L.GRU(2)(x))


def two_sequences():
    inputs = {x: keras.Input((5, 4), name=x) for x in "ab"}
    x = [L.GRU(3, return_sequences=True)(x) for x in inputs.values()]
    return keras.Model(inputs, L.GRU(2)(L.Concatenate()(x)))


class OddInputsTest(tf.test.TestCase, parameterized.TestCase):
    def pair(self, make, **kwargs):
        found = []
        for plain in (True, False):
            keras.utils.set_random_seed(1)
            model = make()
            if not plain:
                cls = tf_gpipe.PipelinedModel.from_model
                if isinstance(model, keras.Sequential):
                    cls = tf_gpipe.PipelinedSequential
                model = cls(
                    model,
                    **{
                        "num_stages": 2,
                        "num_micro_batches": 2,
                        "devices": ["CPU:0", "CPU:1"],
                        **kwargs,
                    },
                )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            found.append(model)
        return found

    def compare(self, make, x, y=None, **kwargs):
        models = self.pair(make, **kwargs)
        y = numbers(6, 1, seed=9) if y is None else y
        results, caught = [], []
        for model in models:
            with warnings.catch_warnings(record=True) as raised:
                warnings.simplefilter("always")
                values = [
                    model(x),
                    model.predict(x, batch_size=3, verbose=0),
                    model.evaluate(x, y, batch_size=3, verbose=0),
                ]
                losses = model.fit(
                    x, y, batch_size=3, shuffle=False, verbose=0
                ).history["loss"]
            results.append((values, (model, [{"loss": losses[0]}])))
            caught.append(any("structure" in str(w.message) for w in raised))
        self.assertEqual(*caught)
        self.assertAllClose(results[0][0], results[1][0], rtol=1e-5)
        comparison.assert_same(self, results[0][1], results[1][1])

    @parameterized.product(
        structure=("dict", "list"), schedule=("1f1b", "gpipe")
    )
    @pytest.mark.slow_after(1)
    def test_other_columns(self, structure, schedule):
        x = {"a": numbers(6, 4), "b": numbers(6, 3, seed=1)}
        self.compare(
            lambda: two_inputs(structure),
            {**x, "id": numbers(6, 1)},
            schedule=schedule,
        )

    @parameterized.parameters(True, False)
    def test_other_columns_of_one_input(self, sequential):
        self.compare(
            lambda: one_input(sequential),
            {"a": numbers(6, 4), "id": numbers(6, 3)},
        )

    def test_too_many_in_a_list(self):
        x = [numbers(6, 4), numbers(6, 3), numbers(6, 3)]
        for model in self.pair(lambda: two_inputs("list")):
            for call in (model, model.predict, model.evaluate):
                with self.assertRaisesRegex(ValueError, "received 3"):
                    call(x)

    @parameterized.parameters(
        {"x": numbers(6, 4)},
        {"x": [numbers(6, 4)]},
        {"x": {"a": numbers(6, 4)}},
        {"x": {"a": numbers(6, 4), "more": []}},
    )
    def test_too_few(self, x):
        _, model = self.pair(lambda: two_inputs("nested"))
        for call in (model, model.predict, model.predict_on_batch):
            with self.assertRaisesRegex(
                ValueError, r"all of its 2 inputs(.|\n)*b(.|\n)*received 1"
            ):
                call(x)

    @parameterized.parameters(
        (True, [numbers(6, 4)]),
        (False, {"a": numbers(6, 4)}),
        (False, (numbers(6, 4),)),
        (True, numbers(6, 4, 1)),
        (False, numbers(6, 4).astype("float64")),
        (True, np.ones((6, 4), "int64")),
    )
    @pytest.mark.slow_after(1)
    def test_one_input(self, sequential, x):
        self.compare(lambda: one_input(sequential), x)

    @parameterized.parameters(True, False)
    def test_axis_left_out(self, sequential):
        self.compare(lambda: one_input(sequential, shape=(1,)), numbers(6))

    def test_integers_as_floats(self):
        self.compare(tokens, np.ones((6, 4)))

    @parameterized.product(
        kind=("first", "last", "between"), functional=(True, False)
    )
    @pytest.mark.slow_after(1)
    def test_more_than_its_spec(self, kind, functional):
        def make():
            model = more(kind)
            return model._functional if functional else model

        self.compare(
            make,
            numbers(6, 4),
            numbers(6, 4 if kind == "last" else 1, seed=9),
        )

    def test_fewer_than_its_spec(self):
        self.compare(lambda: fewer(used=False), numbers(6, 4))
        plain, model = self.pair(lambda: fewer(used=True))
        with self.assertRaisesRegex(ValueError, "not connected"):
            plain(numbers(6, 4))
        with self.assertRaisesRegex(
            ValueError, r"(?s)'fewer.*returned 1 tensors.*uses 2.*spec"
        ):
            model(numbers(6, 4))

    def test_returns_inputs_and_tensors_twice(self):
        def make():
            a, b = keras.Input((4,)), keras.Input((2,))
            x = L.Dense(1)(L.Dense(4)(a))
            return keras.Model([a, b], {"z": x, "b": b, "n": (x, [a])})

        plain, model = self.pair(make)
        x = [numbers(5, 4), numbers(5, 2)]
        for call in ("__call__", "predict"):
            expected, found = (getattr(m, call)(x) for m in (plain, model))
            keras.tree.assert_same_structure(expected, found)
            self.assertAllClose(expected, found)

    @parameterized.parameters(True, False)
    def test_sparse_tensors(self, sequential):
        """Dense inputs take them, as in Keras; sparse inputs are refused."""
        x = tf.sparse.from_dense(np.maximum(numbers(6, 4), 0))
        self.compare(lambda: one_input(sequential), x)
        _, model = self.pair(lambda: one_input(sequential, sparse=True))
        data = tf.data.Dataset.from_tensor_slices((x, numbers(6, 1))).batch(3)
        for call in (
            lambda: model(x),
            lambda: model.predict(x, verbose=0),
            lambda: model.fit(data, verbose=0),
            lambda: model.evaluate(data, verbose=0),
        ):
            with self.assertRaisesRegex(TypeError, "dense.*SparseTensor"):
                call()

    @parameterized.parameters(True, False)
    def test_sparse_tensors_before_the_build(self, run_eagerly):
        x = tf.sparse.from_dense(np.maximum(numbers(6, 4), 0))
        data = tf.data.Dataset.from_tensor_slices((x, numbers(6, 1))).batch(3)
        found = []
        for cls, kwargs in SEQUENTIAL_CLASSES:
            keras.utils.set_random_seed(1)
            model = cls([L.Dense(3), L.Dense(1)], **kwargs)
            model.compile("sgd", "mse", run_eagerly=run_eagerly)
            logs = model.fit(data, verbose=0).history
            found.append([logs["loss"], model.get_weights()])
        self.assertAllClose(*found)

    @parameterized.product(
        method=("__call__", "fit", "train_on_batch", "evaluate", "predict"),
        policy=("float32", "mixed_bfloat16"),
    )
    @pytest.mark.slow_after(4)
    def test_dictionaries_before_the_build(self, method, policy):
        """Inputs are cast, and weights named, whatever builds the layers."""
        x = {"a": numbers(6, 4), "b": numbers(6, 3)}
        x = {name: value.astype("float64") for name, value in x.items()}
        y = numbers(6, 2)
        found = []
        for cls, kwargs in SEQUENTIAL_CLASSES:
            keras.utils.set_random_seed(1)
            keras.config.set_dtype_policy(policy)
            try:
                # Layers in float32 show whether the model has cast its inputs.
                layers = [
                    Joins(name="joins", dtype="float32"),
                    L.Dense(2, name="last", dtype="float32"),
                ]
                model = cls(layers, name="model", **kwargs)
            finally:
                keras.config.set_dtype_policy("float32")
            model.compile("sgd", "mse")
            if method in ("__call__", "predict"):
                getattr(model, method)(x)
            else:
                getattr(model, method)(x, y)
            names = [v.path for v in model.variables]
            loss = model.fit(x, y, verbose=0).history["loss"]
            values = loss, model.predict(x, verbose=0), model.get_weights()
            found.append((names, values))
        (names, values), (other_names, other_values) = found
        self.assertEqual(names, other_names)
        self.assertAllClose(values, other_values, rtol=1e-5)

    @parameterized.parameters(True, False)
    def test_ragged_tensors(self, sequential):
        x = tf.RaggedTensor.from_tensor(numbers(6, 4))
        _, model = self.pair(lambda: one_input(sequential))
        data = tf.data.Dataset.from_tensor_slices((x, numbers(6, 1))).batch(3)
        for call in (
            lambda: model(x),
            lambda: model.predict(x, verbose=0),
            lambda: model.fit(data, verbose=0),
            lambda: model.evaluate(data, verbose=0),
        ):
            with self.assertRaisesRegex(TypeError, "(?s)dense.*Ragged"):
                call()

    @parameterized.parameters(
        lambda mask: mask,
        lambda mask: tf.constant(mask),
        lambda mask: mask[2:3],
        lambda mask: [mask],
        lambda mask: mask.astype("int32"),
    )
    def test_mask_of_a_call(self, convert):
        x, mask = numbers(6, 5, 4), numbers(6, 5, seed=1) > 0
        plain, model = self.pair(recurrent)
        for training in (False, True):
            self.assertAllClose(
                plain(x, mask=convert(mask), training=training),
                model(x, mask=convert(mask), training=training),
            )

    @parameterized.parameters(
        lambda a, b: {"a": a, "b": b},
        lambda a, b: [a, b],
        lambda a, b: [None, b],
        lambda a, b: [b],
    )
    def test_masks_of_a_call(self, convert):
        a, b = tf.constant(numbers(2, 6, 5, 4))
        x = {"a": a, "b": OneRow()(b)}
        masks = convert(*(numbers(2, 6, 5, seed=2) > 0))
        plain, model = self.pair(two_sequences)
        self.assertAllClose(plain(x, mask=masks), model(x, mask=masks))

    @parameterized.parameters(True, False)
    def test_mask_of_one_row_from_a_layer_before(self, compiled):
        found = [
            keras.Sequential([keras.Input((5, 4)), OneRow(), model])
            for model in self.pair(recurrent)
        ]
        x = numbers(6, 5, 4)
        plain, model = (x.predict if compiled else x for x in found)
        self.assertAllClose(plain(x), model(x))

    def test_mask_of_other_rows(self):
        _, model = self.pair(recurrent)
        with self.assertRaisesRegex(ValueError, r"(?s)row.*\(4, 5\).*\(6, 5"):
            model(numbers(6, 5, 4), mask=numbers(4, 5) > 0)

    @pairwise.product(
        declared=((8, 4), (None, 4)),
        last=("eights", "average"),
        schedule=("1f1b", "gpipe"),
        num_micro_batches=(2, 4),
    )
    @pytest.mark.slow_after(3)
    def test_layer_for_one_size_of_batches(self, declared, last, **kwargs):
        def make():
            layers = [L.Dense(12), Eights()]
            if last == "average":
                layers.append(Average())
            return keras.Sequential(
                [keras.Input(batch_shape=declared), *layers]
            )._functional

        plain, model = self.pair(make, **kwargs)
        x = numbers(8, 4)
        y = plain.predict(x, verbose=0)
        for call in (
            lambda: model(x),
            lambda: model.predict(x, batch_size=8, verbose=0),
            lambda: model.evaluate(x, y, batch_size=8, verbose=0),
            lambda: model.fit(x, y, batch_size=8, verbose=0),
        ):
            with self.assertRaisesRegex(
                ValueError, r"(?s)8 rows.*micro-batch.*keras.ops.shape\(x\)"
            ):
                call()

    def test_micro_batches_of_the_size_that_a_layer_is_for(self):
        def make():
            inputs = keras.Input((4,))
            return keras.Model(inputs, Eights()(L.Dense(6)(inputs)))

        plain, model = self.pair(make)
        x = numbers(16, 4)
        self.assertAllClose(
            plain.predict(x, batch_size=8, verbose=0),
            model.predict(x, batch_size=16, verbose=0),
        )

    def test_layer_that_fails_for_micro_batches(self):
        def make():
            x = inputs = keras.Input(batch_shape=(8, 4))
            x = keras.ops.reshape(L.Dense(6)(x), (8, 2, 3))
            return keras.Model(inputs, x)

        _, model = self.pair(make)
        with self.assertRaises(ValueError) as caught:
            model.predict(numbers(8, 4), batch_size=8, verbose=0)
        notes = " ".join(caught.exception.__notes__)
        for text in ("(4, 6)", "(8, 6)", "keras.ops.shape(x)"):
            self.assertIn(text, notes)

    @parameterized.parameters("1f1b", "gpipe")
    def test_sparse_labels(self, schedule):
        class Own(keras.losses.Loss):
            def __call__(self, y, y_pred, sample_weight=None):
                return tf.reduce_mean((tf.sparse.to_dense(y) - y_pred) ** 2)

        y = tf.sparse.from_dense(np.maximum(numbers(6, 1, seed=9), 0))
        data = tf.data.Dataset.from_tensor_slices((numbers(6, 4), y)).batch(3)
        found = []
        for model in self.pair(one_input, schedule=schedule):
            model.compile("sgd", Own())
            if schedule == "1f1b" and found:
                with self.assertRaisesRegex(TypeError, "Labels.*gpipe.*Sparse"):
                    model.fit(data, verbose=0)
                return
            found.append(model.fit(data, verbose=0).history["loss"])
        self.assertAllClose(*found)

    @parameterized.parameters(6, 3, None)
    def test_mask_of_the_rows_before(self, rows):
        """Of a layer that makes several rows of one, and hands on masks."""

        class Rows(L.Layer):
            supports_masking = True

            def call(self, x):
                return tf.reshape(x, (-1, x.shape[-1]))

            def compute_output_shape(self, shape):
                return None, shape[-1]

        def make():
            inputs = keras.Input((2, 4), batch_size=rows)
            outputs = Rows()(L.Dense(3)(L.Masking()(inputs)))
            return keras.Model(inputs, outputs)

        x = numbers(6, 2, 4)
        x[1, 1] = 0.0
        plain, model = self.pair(make, num_micro_batches=3)
        self.assertAllClose(
            plain.predict(x, batch_size=rows or 6, verbose=0),
            model.predict(x, batch_size=rows or 6, verbose=0),
        )

    @pairwise.product(
        kind=("ragged", "tf.Variable", "keras.Variable", "constant"),
        schedule=("1f1b", "gpipe"),
        rows=(6, None),
    )
    def test_labels_that_are_no_tensors(self, kind, schedule, rows):
        def loss(y, y_pred):
            if isinstance(y, tf.RaggedTensor):
                y = y.to_tensor(shape=(None, 1))
            return tf.reduce_mean(tf.square(y - y_pred), axis=-1)

        y = {
            "ragged": tf.RaggedTensor.from_tensor,
            "tf.Variable": tf.Variable,
            "keras.Variable": keras.Variable,
            "constant": tf.constant,
        }[kind](numbers(6, 1, seed=9))
        plain, piped = self.pair(one_input, schedule=schedule)
        for model in (plain, piped):
            model.compile("sgd", loss)

        def gradients(x):
            with tf.GradientTape() as tape:
                value = plain.compute_loss(x, y, plain(x, training=True))
            return value, tape.gradient(value, plain.trainable_variables)

        found = [
            tf.function(
                step,
                input_signature=[tf.TensorSpec((rows, 4))],
                autograph=False,
            )(numbers(6, 4))
            for step in (
                gradients,
                lambda x: piped.loss_and_gradients(x, y)[:2],
            )
        ]
        self.assertAllClose(*found, rtol=1e-5)


if __name__ == "__main__":
    tf.test.main()
