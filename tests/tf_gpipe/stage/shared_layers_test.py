"""Layers that are alike share a trace, with the numbers of plain Keras."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tf_gpipe.stage import likeness
from tf_gpipe.stage import model_graph

L = keras.layers
_DIM = 8


class Block(L.Layer):
    """A Transformer block that also has a weight and a float attribute."""

    def __init__(self, dropout=0.0, norm="layer", activation="gelu", **kwargs):
        super().__init__(**kwargs)
        dtype = self.dtype_policy
        self.attention = L.MultiHeadAttention(
            2, 4, dropout=dropout, dtype=dtype
        )
        self.norms = [
            L.BatchNormalization(dtype=dtype)
            if norm == "batch"
            else L.LayerNormalization(dtype=dtype)
            for _ in range(2)
        ]
        self.inner = L.Dense(
            2 * _DIM, activation, kernel_regularizer="l2", dtype=dtype
        )
        self.outer = L.Dense(_DIM, dtype=dtype)
        self.dropout = L.Dropout(dropout, dtype=dtype)
        self.factor = 0.5

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)
        for norm in self.norms:
            norm.build(input_shape)
        self.inner.build(input_shape)
        self.outer.build((*input_shape[:-1], 2 * _DIM))
        self.scale = self.add_weight(shape=(_DIM,), initializer="ones")

    def call(self, x, training=None):
        h = self.norms[0](x, training=training)
        x = x + self.attention(h, h, training=training)
        h = self.norms[1](x, training=training)
        h = self.dropout(self.outer(self.inner(h)), training=training)
        return x + self.scale * self.factor * h


class Noting(Block):
    """Counts its calls, and scales its outputs by the count."""

    calls = 0

    def call(self, x, training=None):
        self.calls += 1
        return super().call(x, training=training) * (1.0 + self.calls / 10)


class Named(Block):
    """Scales its outputs by the length of its name."""

    def call(self, x, training=None):
        x = super().call(x, training=training)
        return x * (1.0 + len(self.name) / 10)


class Adding(Block):
    def call(self, x, training=None):
        x = super().call(x, training=training)
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


class Rectified(Block):
    """Calls a Python function that reads an attribute of the layer."""

    def call(self, x, training=None):
        x = super().call(x, training=training)
        scaled = tf.numpy_function(
            lambda x: x * np.float32(1 + self.factor), [x], x.dtype, False
        )
        return x + tf.stop_gradient(tf.ensure_shape(scaled, x.shape))


def _numbered(i):
    """Returns a class whose `call` differs from others only in its closure."""

    class Numbered(Block):
        def call(self, x, training=None):
            return super().call(x, training=training) * (1.0 + i / 10)

    return Numbered


_FACTORS = {"a": 0.3, "aa": 0.6, "aaa": 0.9, "aaaa": 1.2}


def _scaled_by_name(layer, x):
    return _FACTORS[layer.name] * layer(x)


class Helped(Block):
    """Calls a function that looks an inner layer up by its name."""

    def __init__(self, number):
        super().__init__()
        self.last = L.Dense(_DIM, name="a" * number)

    def build(self, input_shape):
        super().build(input_shape)
        self.last.build(input_shape)

    def call(self, x, training=None):
        return _scaled_by_name(self.last, super().call(x, training=training))


class Waves(keras.initializers.Initializer):
    """Has no config, as Keras allows."""

    def __init__(self, number):
        self.number = number

    def __call__(self, shape, dtype=None):
        return keras.ops.sin(self.number * keras.ops.ones(shape, dtype))


class Initializing(Block):
    """Uses an initializer in its call."""

    def __init__(self, number):
        super().__init__()
        self.waves = Waves(number)

    def call(self, x, training=None):
        x = super().call(x, training=training)
        return x + self.waves(x.shape[1:], x.dtype)


class Bent(Block):
    """Has a gradient of its own, which only its name decides."""

    def call(self, x, training=None):
        number = len(self.name)

        @tf.custom_gradient
        def bent(x):
            return tf.identity(x), lambda dy: number * dy

        return bent(super().call(x, training=training))


# Read as configurations of models are: its classes are of no module.
_READ = {"Block": Block}
exec(
    """
class Read(Block):
    def call(self, x, training=None):
        return super().call(x, training=training) * (1 + len(self.name) / 10)
""",
    _READ,
)


def _skipping():
    """Layers that hand tensors to later ones past Keras, in a list."""
    kept = []

    class Saving(Block):
        def call(self, x, training=None):
            kept.append(x)
            return super().call(x, training=training)

    class Using(Block):
        def call(self, x, training=None):
            return super().call(x, training=training) + kept.pop()

    return [Saving(), Saving(), Block(), Using(), Using()]


def _held(layer=Block):
    """As `_skipping`, with the list held by the layers."""

    class Taps:
        def __init__(self):
            self.kept = []

    taps = Taps()

    class Saving(layer):
        def call(self, x, training=None):
            self.taps.kept.append(x)
            return super().call(x, training=training)

    class Using(layer):
        def call(self, x, training=None):
            return super().call(x, training=training) + self.taps.kept.pop()

    layers = [Saving(), Saving(), layer(), Using(), Using()]
    for each in (*layers[:2], *layers[3:]):
        each.taps = taps
    return layers


def _tapped():
    """One layer of several notes a tensor, which a later one uses."""

    class Tapped(Block):
        def call(self, x, training=None):
            if self.name == "noting":
                self.feature = x
            return super().call(x, training=training)

    class Using(Block):
        def call(self, x, training=None):
            return super().call(x, training=training) + taps[0].feature

    taps = [Tapped(name="noting")]
    return [Tapped(), *taps, Tapped(), Using()]


class Holding(L.Layer):
    """Calls a model that it holds, as Keras's Transformer examples do."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x, training=None):
        return x + self.inner(x, training=training)


def _holding(activation="gelu"):
    dense = [L.Dense(2 * _DIM, activation), L.Dropout(0.0), L.Dense(_DIM)]
    return Holding(keras.Sequential(dense))


class Scaled(Holding):
    """Scales by an attribute of the model that it holds."""

    def call(self, x, training=None):
        return x + self.inner.factor * self.inner(x, training=training)


def _held_apart():
    blocks = []
    for i in range(4):
        layers = [L.Dense(2 * _DIM, "gelu"), L.Dense(_DIM)]
        layers += [Block() for _ in range(2)]
        blocks.append(Scaled(keras.Sequential(layers)))
        blocks[-1].inner.factor = 0.2 * i
    return blocks


def _nested(normalized=0):
    """A functional model of a few layers."""
    inputs = keras.Input((3, _DIM))
    layers = L.Dense(_DIM, "gelu"), L.Dense(_DIM)
    outputs = layers[1](layers[0](inputs))
    outputs = L.LayerNormalization()([outputs, inputs][normalized] + outputs)
    return keras.Model(inputs, outputs)


def _different(make):
    """Returns blocks that differ in attributes set after they were made."""
    blocks = [make() for _ in range(4)]
    for i, block in enumerate(blocks):
        block.factor = 0.2 * i
    blocks[2].inner.activation = keras.activations.tanh
    blocks[3].norms[0].epsilon = 0.3
    return blocks


def _frozen():
    blocks = [Block() for _ in range(6)]
    for block in blocks[1::2]:
        block.inner.trainable = False
    return blocks


def _one_thrice():
    one = Block()
    return [one, Block(), one, Block(), one]


def _small(dropout=0.0, norm=L.LayerNormalization):
    layers = []
    for _ in range(8):
        layers += [L.Dense(_DIM, "tanh"), norm(), L.Dropout(dropout)]
    layers[4].trainable = False
    return layers


class Turns(L.Layer):
    def build(self, input_shape):
        self.angles = self.add_weight(shape=(_DIM // 2,))

    def call(self, x):
        steps = tf.range(tf.cast(x.shape[1], x.dtype))
        return tf.exp(tf.complex(0.0, steps[:, None] * self.angles))

    def compute_output_spec(self, x):
        return keras.KerasTensor((x.shape[1], _DIM // 2), "complex64")


class Turned(Block):
    def __init__(self):
        super().__init__(autocast=False)

    def build(self, x_shape, turns_shape):
        super().build(x_shape)

    def call(self, x, turns, training=None):
        x = super().call(x, training=training)
        turned = tf.complex(x[..., ::2], x[..., 1::2]) * turns
        return tf.concat([tf.math.real(turned), tf.math.imag(turned)], -1)

    def compute_output_spec(self, x, turns):
        return keras.KerasTensor(x.shape, x.dtype)


class Renormed(Block):
    """Assigns a weight as it is called, as spectral normalisation does."""

    def build(self, input_shape):
        super().build(input_shape)
        self.kernel = self.add_weight(shape=(_DIM, _DIM))

    def call(self, x, training=None):
        self.kernel.assign(0.5 * self.kernel)
        x = super().call(x, training=training)
        return x + 0.1 * keras.ops.matmul(x, self.kernel)


def _renormed(trainable=True, again=False):
    """Layers that assign weights, each called twice."""
    blocks = [Renormed() for _ in range(3)]
    for block in blocks:
        block.trainable = trainable
    return [*blocks, *(blocks[::-1] if again else blocks)]


def _residual(x):
    h = L.BatchNormalization()(L.Dense(_DIM, "gelu")(x))
    return L.Activation("tanh")(x + 0.5 * h)


class Counting(L.Layer):
    """Assigns a variable."""

    def build(self, input_shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.count.assign_add(keras.ops.mean(x))
        return 0.5 * x


def _with_aside(kind, depth):
    """A model of two outputs. Deep ones have enough operations to share."""
    inputs = h = keras.Input((_DIM,))
    for _ in range(depth):
        h = L.Dense(_DIM, "tanh")(h)
    if kind == "batch_norm":
        aside = L.BatchNormalization(center=False, scale=False)(h)
    elif kind == "loss":
        aside = L.ActivityRegularization(l2=0.01)(h)
    elif kind == "state":
        aside = Counting()(h)
    else:
        aside = Counting()(L.UnitNormalization()(Counting()(h)))
    return keras.Model(inputs, [h, aside])


_SHARED = {
    "plain": lambda: [Block() for _ in range(6)],
    "dropout": lambda: [Block(0.3) for _ in range(5)],
    "batch_norm": lambda: [Block(norm="batch") for _ in range(5)],
    "mixed": lambda: [Block(dtype="mixed_bfloat16") for _ in range(4)],
    "frozen": _frozen,
    "holding": lambda: [_holding() for _ in range(5)],
    "nested": lambda: [_nested() for _ in range(5)],
    "recurrent": lambda: [
        L.LSTM(_DIM, return_sequences=True) for _ in range(4)
    ],
    "one_thrice": _one_thrice,
    "small": _small,
    "small_dropout": lambda: _small(0.3),
    "small_batch_norm": lambda: _small(norm=L.BatchNormalization),
}
_ALONE = {
    "different": lambda: _different(Block),
    "named": lambda: [Named(name="a" * i) for i in range(1, 5)],
    "adding": lambda: [Adding() for _ in range(4)],
    "numbered": lambda: [_numbered(i)() for i in range(4)],
    "rectified": lambda: _different(Rectified),
    "helped": lambda: [Helped(i) for i in range(1, 5)],
    "held": _held_apart,
    "initializing": lambda: [Initializing(i) for i in range(4)],
    "bent": lambda: [Bent(name="a" * i) for i in range(1, 5)],
    "renormed": _renormed,
    "frozen_renormed": lambda: _renormed(trainable=False),
    "frozen_renormed_again": lambda: _renormed(False, again=True),
    "read": lambda: [_READ["Read"](name="a" * i) for i in range(1, 5)],
}


def _layers(blocks):
    return [keras.Input((3, _DIM)), *blocks(), L.Dense(1)]


def _policies(default):
    """Returns a map of policies: float32 for layers that are called late."""
    late = keras.DTypePolicy("float32")
    return keras.dtype_policies.DTypePolicyMap(default, {"late.*": late})


def _set_weights(model):
    random = np.random.default_rng(1)
    for v in model.trainable_variables:
        v.assign(v + 0.1 * random.normal(size=v.shape))
    for layer in model._flatten_layers():
        for seed in layer._seed_generators:
            seed.state.assign([7, 0])


def _fit(model, x):
    """Trains a model from the same weights, and returns its losses."""
    _set_weights(model)
    model.compile(keras.optimizers.SGD(1e-2, 0.9), "mse")
    return model.fit(
        x, x, batch_size=8, epochs=3, shuffle=False, verbose=0
    ).history["loss"]


def _trained(make, blocks):
    """Returns the losses and the weights of a model after three steps."""
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 3, _DIM)).astype("float32")
    y = random.normal(size=(8, 3, 1)).astype("float32")
    keras.utils.set_random_seed(3)
    model = make(_layers(blocks))
    _set_weights(model)
    model.compile(keras.optimizers.SGD(1e-3, 0.9), "mse")
    losses = model.fit(
        x, y, batch_size=8, epochs=3, shuffle=False, verbose=0
    ).history["loss"]
    return losses, model.get_weights()


@functools.cache
def _plain(blocks):
    return _trained(keras.Sequential, blocks)


class SharedLayersTest(parameterized.TestCase, tf.test.TestCase):
    def check(self, blocks, num_micro_batches=2, first=2, **kwargs):
        losses, plain = _plain(blocks)
        own_losses, own = _trained(
            lambda layers: tf_gpipe.PipelinedSequential(
                layers,
                balance=[first, model_graph.num_calls(layers[1:]) - first],
                num_micro_batches=num_micro_batches,
                **kwargs,
            ),
            blocks,
        )
        self.assertAllClose(losses, own_losses, rtol=1e-4)
        for a, b in zip(plain, own, strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=2e-5)

    @pairwise.each(
        blocks=(
            *("plain", "frozen", "recurrent", "one_thrice", "small"),
            *("holding", "nested"),
        ),
        schedule=("gpipe", "1f1b", "zero_bubble", "eager_zero_bubble"),
        remat=("always", "except_last", "never"),
        num_micro_batches=(1, 4),
    )
    @pytest.mark.slow_after(1)
    def test_shared(self, blocks, **kwargs):
        self.check(_SHARED[blocks], **kwargs)

    @parameterized.parameters(
        "dropout", "batch_norm", "small_dropout", "small_batch_norm"
    )
    @pytest.mark.slow
    def test_state(self, blocks):
        for schedule in ("1f1b", "zero_bubble"):
            self.check(
                _SHARED[blocks],
                num_micro_batches=1,
                schedule=schedule,
                remat="always",
            )

    @parameterized.parameters("1f1b", "zero_bubble")
    @pytest.mark.slow_after(1)
    def test_several_calls_at_a_time(self, schedule):
        """Residual blocks of a functional model, which share their calls."""
        random = np.random.default_rng(0)
        x = random.normal(size=(8, _DIM)).astype("float32")
        found = []
        for kwargs in (None, {"num_micro_batches": 1, "schedule": schedule}):
            keras.utils.set_random_seed(3)
            inputs = keras.Input((_DIM,))
            h = inputs
            for _ in range(8):
                h = _residual(h)
            if kwargs is None:
                model = keras.Model(inputs, h)
            else:
                model = tf_gpipe.PipelinedModel(
                    inputs, h, balance=[18, 22], **kwargs
                )
            _fit(model, x)
            found.append(model.get_weights())
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=2e-5)

    @pairwise.each(
        aside=("loss", "state", "batch_norm", "chain"),
        depth=(1, 6),
        schedule=("1f1b", "zero_bubble"),
        remat=("always", "never"),
    )
    @pytest.mark.slow_after(2)
    def test_results_that_nothing_takes(self, aside, depth, **kwargs):
        """Models within the model, whose second output is not used."""
        random = np.random.default_rng(0)
        x = random.normal(size=(8, _DIM)).astype("float32")
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(3)
            inputs = h = keras.Input((_DIM,))
            models = [_with_aside(aside, depth) for _ in range(4)]
            for each in models:
                h = each(h)[0]
            model = keras.Model(inputs, h)
            if pipelined:
                half = model_graph.num_calls(models) // 2
                model = tf_gpipe.PipelinedModel.from_model(
                    model, balance=[half, half], num_micro_batches=1, **kwargs
                )
            losses = _fit(model, x)
            losses.append(model.evaluate(x, x, batch_size=8, verbose=0))
            found.append([losses, *model.get_weights()])
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=2e-5)

    @pairwise.each(schedule=("1f1b", "zero_bubble"), remat=("always", "never"))
    @pytest.mark.slow_after(1)
    def test_complex_arguments(self, **kwargs):
        """Blocks turn complex numbers by angles that a layer has learned."""
        random = np.random.default_rng(0)
        x = random.normal(size=(8, 3, _DIM)).astype("float32")
        found = []
        for pipelined in (False, True):
            keras.utils.set_random_seed(3)
            inputs = h = keras.Input((3, _DIM))
            turns = Turns()(inputs)
            for _ in range(4):
                h = Turned()(h, turns)
            model = keras.Model(inputs, h)
            if pipelined:
                model = tf_gpipe.PipelinedModel.from_model(
                    model, num_stages=1, num_micro_batches=2, **kwargs
                )
            _fit(model, x)
            found.append(model.get_weights())
        for a, b in zip(*found, strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=2e-5)

    @pairwise.each(
        blocks=tuple(_ALONE),
        schedule=("gpipe", "1f1b", "zero_bubble", "eager_zero_bubble"),
        remat=("always", "never"),
    )
    @pytest.mark.slow_after(1)
    def test_alone(self, blocks, **kwargs):
        self.check(_ALONE[blocks], **kwargs)

    @parameterized.parameters(
        (_skipping, 5),
        (_held, 5),
        (_tapped, 4),
    )
    @pytest.mark.slow_after(1)
    def test_past_keras(self, blocks, first):
        """Layers that hand tensors to later ones by Python objects."""
        self.check(blocks, first=first)

    def nodes(self, blocks):
        model = tf_gpipe.PipelinedSequential(
            _layers(blocks), num_stages=2, num_micro_batches=2
        )
        model.compile("sgd", "mse")
        x = tf.zeros((4, 3, _DIM))
        y = tf.zeros((4, 3, 1))
        model.make_train_function()
        step = tf.function(lambda x, y: model.train_step((x, y)))
        graph = step.get_concrete_function(x, y).graph.as_graph_def()
        return sum(len(f.node_def) for f in graph.library.function)

    @parameterized.parameters(
        *("plain", "nested", "holding", "dropout", "batch_norm", "mixed"),
        *("frozen", "small"),
    )
    @pytest.mark.slow_after(1)
    def test_traced_once(self, blocks):
        """More blocks cost a call each, not a trace each."""
        few = self.nodes(_SHARED[blocks])
        many = self.nodes(lambda: _SHARED[blocks]() + _SHARED[blocks]())
        self.assertLess(many, 1.6 * few)

    @parameterized.parameters(Adding, Rectified, Noting)
    @pytest.mark.slow
    def test_traced_apart(self, block):
        few = self.nodes(lambda: [block() for _ in range(2)])
        many = self.nodes(lambda: [block() for _ in range(4)])
        self.assertGreater(many, 1.7 * few)

    def test_error_while_it_runs(self):
        """An error names a layer of the kind, and keeps its type."""
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((4, 4)), *[LookingUp() for _ in range(4)]],
            num_stages=2,
            num_micro_batches=2,
        )
        model.compile("sgd", "mse")
        x = np.eye(4, dtype="float32")[None].repeat(4, 0)
        model.train_on_batch(x, x)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "indices"
        ) as raised:
            model.train_on_batch(9 * x, x)
        notes = "".join(raised.exception.__notes__)
        self.assertRegex(notes, "layer 'looking_up(_.)?'")


class LookingUp(L.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(4, 4), initializer="ones")

    def call(self, x):
        row = tf.cast(tf.reduce_max(x), tf.int32)
        for _ in range(9):
            x = keras.ops.tanh(x * self.scale)
        return x + tf.gather(self.scale[None] * x, row, axis=1)[:, None]


class Switched(L.Layer):
    """Has an attribute with the name of a method of Keras."""

    def __init__(self, quantize):
        super().__init__()
        self.quantize = quantize

    def call(self, x):
        return keras.ops.round(x) if self.quantize else x


# Different for each layer, where no call uses it.
_NUMBERS = itertools.count()


class LikenessTest(parameterized.TestCase, tf.test.TestCase):
    def forms(self, *layers):
        for layer in layers:
            layer.build((None, 3, _DIM))
        return [likeness.of(layer) for layer in layers]

    def test_recomputed_by_name(self):
        """Keras recomputes the layers of a `RematScope` that it names."""
        with keras.RematScope("list_of_layers", layer_names=["a"]):
            layers = [L.Dense(_DIM, name=name) for name in "abc"]
        a, b, c = self.forms(*layers)
        self.assertNotEqual(a.form, b.form)
        self.assertEqual(b.form, c.form)

    @parameterized.parameters(
        lambda: L.Dense(3, "gelu"),
        lambda: L.Dropout(0.1),
        lambda: L.LSTM(3),
        lambda: L.BatchNormalization(),
        lambda: L.TimeDistributed(L.Dense(3)),
        lambda: L.Bidirectional(L.GRU(3)),
        lambda: L.Conv1D(3, 3, padding="same"),
        lambda: L.Rescaling(0.5),
        lambda: L.Dropout(0.1, seed=next(_NUMBERS)),
        lambda: L.GRU(3, dropout=0.1, seed=next(_NUMBERS)),
        lambda: L.Dense(
            3,
            kernel_initializer=keras.initializers.GlorotUniform(next(_NUMBERS)),
        ),
        lambda: Block(),
        lambda: _holding(),
        lambda: Holding(_nested()),
    )
    def test_alike(self, make):
        one, other = self.forms(make(), make())
        self.assertEqual(one.form, other.form)
        for a, b in zip(one.variables, other.variables, strict=True):
            self.assertEqual(a.shape, b.shape)
            self.assertIsNot(a, b)

    @parameterized.parameters(
        (lambda: L.Dense(3), lambda: L.Dense(3, "relu")),
        (lambda: L.Dense(3), lambda: L.Dense(4)),
        (lambda: L.Dense(3), lambda: L.Dense(3, dtype="mixed_bfloat16")),
        (
            lambda: L.Dense(3, dtype=_policies("float32")),
            lambda: L.Dense(3, dtype=_policies("mixed_bfloat16")),
        ),
        (lambda: L.Dropout(0.1), lambda: L.Dropout(0.2)),
        (lambda: Block(), lambda: Block(norm="batch")),
        (lambda: Block(), lambda: Noting()),
        (lambda: Switched(True), lambda: Switched(False)),
        (lambda: _holding("gelu"), lambda: _holding("tanh")),
        (lambda: Holding(_nested(0)), lambda: Holding(_nested(1))),
    )
    def test_not_alike(self, one, other):
        one, other = self.forms(one(), other())
        self.assertNotEqual(one.form, other.form)

    @parameterized.parameters(L.Dense, lambda _, **kwargs: Block(**kwargs))
    def test_a_policy_by_path(self, make):
        """A map gives layers of some paths another policy."""
        policies = _policies("mixed_bfloat16")
        one, same, other, third = self.forms(
            *(
                make(3, dtype=policies, name=name)
                for name in ("a", "b", "late_a", "late_b")
            )
        )
        self.assertEqual(one.form, same.form)
        self.assertEqual(other.form, third.form)
        self.assertNotEqual(one.form, other.form)

    def test_set_later(self):
        layers = [Block() for _ in range(6)]
        layers[5]._self_attention_factor = 0.7
        layers[1].factor = 0.7
        layers[2].inner.trainable = False
        layers[3].supports_masking = True
        forms = self.forms(*layers)
        self.assertLen({x.form for x in forms}, 5)


if __name__ == "__main__":
    tf.test.main()
