"""Gradients of embeddings under optimizers that square them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L
from keras import ops

import tf_gpipe
from tests import pairwise

STEPS = 5
X = np.random.default_rng(0).normal(size=(8, STEPS, 4)).astype("float32")
TOKENS = np.random.default_rng(0).integers(0, 9, (8, STEPS))
Y = np.random.default_rng(1).normal(size=(8, 1)).astype("float32")


class Positions(L.Layer):
    """Adds an embedding that is looked up with what `positions` returns.

    Pairs of positions add the mean over the second position.
    """

    def __init__(self, positions, **kwargs):
        super().__init__(**kwargs)
        self.positions = positions
        self.table = L.Embedding(9, 4)

    def build(self, shape):
        self.table.build((None,))

    def call(self, x):
        found = self.table(self.positions(x))
        return x + (found if len(found.shape) < 4 else ops.mean(found, 2))


class Tokens(L.Layer):
    """Looks up tokens and positions in one embedding."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = L.Embedding(9, 4)

    def build(self, shape):
        self.table.build((None,))

    def call(self, x):
        types = self.table(ops.zeros_like(x))
        return self.table(x) + self.table(ops.arange(STEPS)) + types


class Words(L.Layer):
    """Looks up words whose number TensorFlow does not infer.

    As behind `TextVectorization`.

    Args:
        times: Integer, how often they are looked up in the one table.
        position: Boolean, whether the first row of it is added as well.
    """

    def __init__(self, times, position=False, **kwargs):
        super().__init__(**kwargs)
        self.times = times
        self.position = position
        self.table = L.Embedding(9, 4)

    def build(self, shape):
        self.table.build((None,))

    def call(self, x):
        total = 0.0
        for _ in range(self.times):
            shape = tf.TensorShape([None, None])
            words = tf.raw_ops.PlaceholderWithDefault(input=x, shape=shape)
            words = tf.reshape(words, (-1,))
            total += ops.reshape(self.table(words), (-1, STEPS, 4))
        return total + self.table(ops.arange(1)) if self.position else total

    def compute_output_shape(self, shape):
        return (*shape, 4)


def with_words(*args):
    def make():
        i = keras.Input((STEPS,), dtype="int32")
        h = L.Dense(4, "tanh")(Words(*args)(i))
        return keras.Model(i, L.Dense(1)(L.GlobalAveragePooling1D()(h)))

    return make


def of_rows(x):
    """Returns positions for each row."""
    return ops.tile(ops.arange(STEPS)[None], (ops.shape(x)[0], 1))


POSITIONS = {
    "fixed": lambda x: ops.arange(STEPS),
    "of the length": lambda x: ops.arange(ops.shape(x)[1]),
    "one axis more": lambda x: ops.arange(STEPS)[None],
    "of rows": of_rows,
    # Positions that repeat, come from pairs, or depend on the inputs' values.
    "one": lambda x: ops.zeros((x.shape[1],), "int32"),
    "twice": lambda x: ops.arange(STEPS) // 2,
    # These are 20, as many as four rows would have with five each.
    "pairs of positions": lambda x: ops.abs(
        ops.arange(STEPS)[:, None] - ops.arange(4)
    )[None],
    "of values": lambda x: ops.cast(x[..., 0] > 0, "int32"),
}


def with_positions(kind, length=STEPS):
    def make():
        i = keras.Input((length, 4))
        h = L.Dense(4, "tanh")(Positions(POSITIONS[kind])(i))
        return keras.Model(i, L.Dense(1)(L.GlobalAveragePooling1D()(h)))

    return make


def with_tokens():
    i = keras.Input((STEPS,), dtype="int32")
    h = L.Dense(4, "tanh")(Tokens()(i))
    return keras.Model(i, L.Dense(1)(L.GlobalAveragePooling1D()(h)))


def with_tables(*kinds):
    """Returns a model of a table for each kind, and the first one once more."""
    i = x = keras.Input((STEPS, 4))
    tables = [Positions(POSITIONS[kind]) for kind in kinds]
    for table in [*tables, tables[0]]:
        x = table(x)
    x = L.GlobalAveragePooling1D()(L.Dense(4, "tanh")(x))
    return keras.Model(i, L.Dense(1)(x))


def shared_by_stages():
    table = Positions(POSITIONS["fixed"])
    i = keras.Input((STEPS, 4))
    h = L.Dense(4, "tanh")(L.Dense(4, "tanh")(table(i)))
    return keras.Model(i, L.Dense(1)(L.GlobalAveragePooling1D()(table(h))))


class LookupsTest(tf.test.TestCase, parameterized.TestCase):
    def assert_trains_alike(self, make, x, batch_size=8, eager=False, **kwargs):
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(0)
            model = make()
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, num_stages=2, devices=["CPU:0", "CPU:1"], **kwargs
                )
            # The large epsilon hides rounding.
            model.compile(
                keras.optimizers.Adam(0.01, epsilon=1e-3),
                "mse",
                run_eagerly=eager,
            )
            model.fit(
                x, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
            )
            found.append(model.get_weights())
        self.assertAllClose(*found, rtol=1e-5, atol=1e-5)

    @pairwise.each(
        kind=tuple(POSITIONS), num_micro_batches=(2, 3), eager=(False, True)
    )
    @pytest.mark.slow_after(1)
    def test_positions(self, kind, num_micro_batches, eager):
        self.assert_trains_alike(
            with_positions(kind),
            X,
            num_micro_batches=num_micro_batches,
            eager=eager,
        )

    @parameterized.parameters("of the length", "of rows", "fixed")
    @pytest.mark.slow_after(1)
    def test_unknown_length(self, kind):
        self.assert_trains_alike(
            with_positions(kind, None), X, num_micro_batches=4
        )

    @parameterized.parameters("fixed", "of rows", "of values")
    @pytest.mark.slow_after(1)
    def test_last_batch_of_another_size(self, kind):
        self.assert_trains_alike(
            with_positions(kind), X, batch_size=5, num_micro_batches=4
        )

    @pairwise.each(
        schedule=("1f1b", "zero_bubble", "gpipe", "eager_zero_bubble"),
        remat=("always", "never"),
        eager=(False, True),
    )
    @pytest.mark.slow_after(1)
    def test_tokens_and_positions(self, schedule, remat, eager):
        self.assert_trains_alike(
            with_tokens,
            TOKENS,
            schedule=schedule,
            remat=remat,
            num_micro_batches=4,
            eager=eager,
        )

    @pairwise.product(
        kinds=(("fixed", "twice"), ("of values", "fixed", "fixed")),
        num_micro_batches=(4, 1),
        xla=(False, True),
        remat=("never", "always"),
    )
    @pytest.mark.slow_after(2)
    def test_several_tables_in_one_inline_stage(
        self, kinds, num_micro_batches, xla, remat
    ):
        plain = with_tables(*kinds)
        model = tf_gpipe.PipelinedModel.from_model(
            plain,
            num_stages=2,
            balance=[len(kinds) + 2, 2],
            num_micro_batches=num_micro_batches,
            schedule="gpipe",
            remat=remat,
            # XLA compiles for one device.
            devices=["CPU:0", "CPU:0"],
        )
        model.compile("sgd", "mse", run_eagerly=not xla)

        def gradients():
            found = model.loss_and_gradients(tf.constant(X), tf.constant(Y))[1]
            return [tf.convert_to_tensor(g) for g in found]

        if xla:
            gradients = tf.function(gradients, jit_compile=True)
        with tf.GradientTape() as tape:
            loss = ops.mean((plain(X) - Y) ** 2)
        self.assertAllClose(
            gradients(),
            [
                tf.convert_to_tensor(g)
                for g in tape.gradient(loss, model.trainable_weights)
            ],
        )

    @pairwise.each(
        kinds=(("of values", "fixed", "of rows"), ("fixed",)),
        num_micro_batches=(3, 1),
        remat=("never", "always"),
    )
    @pytest.mark.slow_after(1)
    def test_eager_step_in_a_function(self, kinds, num_micro_batches, remat):
        """Then micro-batches may be of sizes that are not known."""
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(0)
            model = with_tables(*kinds)
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model,
                    num_stages=2,
                    num_micro_batches=num_micro_batches,
                    remat=remat,
                    devices=["CPU:0", "CPU:1"],
                )
            model.compile("sgd", "mse", run_eagerly=True)
            model.optimizer.build(model.trainable_variables)
            step = tf.function(model.train_step)
            for _ in range(2):
                step((tf.constant(X), tf.constant(Y)))
            found.append(model.get_weights())
        self.assertAllClose(*found, rtol=1e-5, atol=1e-5)

    @pairwise.each(
        of=((1, False), (2, False), (1, True)),
        num_micro_batches=(2, 3),
        eager=(True, False),
    )
    @pytest.mark.slow_after(2)
    def test_unknown_number_of_words(self, of, num_micro_batches, eager):
        self.assert_trains_alike(
            with_words(*of),
            TOKENS,
            num_micro_batches=num_micro_batches,
            eager=eager,
        )

    def test_lookups_that_cannot_be_told_apart(self):
        with self.assertRaisesRegex(
            ValueError, "no static sizes.*run_eagerly=False"
        ):
            self.assert_trains_alike(
                with_words(2, True), TOKENS, num_micro_batches=2, eager=True
            )

    @parameterized.parameters(4, 8, 12)
    @pytest.mark.slow_after(1)
    def test_one_row_for_all_positions(self, length):
        """As many positions as rows of a micro-batch, or twice as many."""
        x = np.tile(X, (1, 3, 1))[:, :length]
        kwargs = {"num_micro_batches": 4 if length == 4 else 2}
        self.assert_trains_alike(with_positions("one", length), x, **kwargs)

    @parameterized.parameters("1f1b", "gpipe")
    @pytest.mark.slow
    def test_layer_of_several_stages(self, schedule):
        self.assert_trains_alike(
            shared_by_stages,
            X,
            schedule=schedule,
            num_micro_batches=2,
            balance=[2, 4],
        )
