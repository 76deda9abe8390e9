"""Models, losses, optimizers and pipelines that are drawn by chance.

All that is drawn is trained as plain Keras and as a pipeline, and compared.

    python -m tools.random_models --num=1000 --seed=0

draws as many models and compares a step of each. The exit status is 1 where
something differs that is not rounding: what differs by little in float32, and
not at all in float64, is.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import sys
from typing import Any

# Before TensorFlow is imported: it reports at start that there is no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers as L  # noqa: E402
from keras import ops  # noqa: E402

import tf_gpipe  # noqa: E402
from tf_gpipe.commands import devices  # noqa: E402
from tools import command_line  # noqa: E402

_MOST_STAGES = 4
_MODELS_A_LINE = 50
# What models make of the rounding of float32, at most.
_MAGNIFIED_ROUNDING = 1e-2
CLASSES = 3
VOCABULARY = 10
INPUTS = {
    "vector": (5,),
    "sequence": (4, 3),
    "image": (6, 6, 2),
    "tokens": (5,),
}


@dataclasses.dataclass(frozen=True)
class Kinds:
    """What is drawn beside layers, losses and optimizers of every day."""

    # Outputs of a softmax or a sigmoid, whose losses take no logits.
    probabilities: bool = True
    # Layers with state in `tf.Variable`s.
    tensorflow_state: bool = True
    # Trainable layers within frozen ones.
    partly_frozen: bool = True
    # Embeddings of positions, and optimizers that square gradients.
    positions: bool = True
    # Losses that have a weight of the model.
    loss_weights: bool = True
    # Outputs without a loss, of booleans, scalars and weights.
    odd_outputs: bool = True
    # Layers in models within the model.
    models_within: bool = True

    @classmethod
    def none(cls) -> "Kinds":
        return cls(**{x.name: False for x in dataclasses.fields(cls)})


class Bottleneck(L.Layer):
    """A layer of layers, that may add losses."""

    def __init__(self, units, adds, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.adds = adds
        self.narrow = L.Dense(2, "tanh")
        self.wide = L.Dense(units)

    def build(self, input_shape):
        self.narrow.build(input_shape)
        self.wide.build((*input_shape[:-1], 2))

    def call(self, x):
        x = self.wide(self.narrow(x))
        if self.adds == "one":
            self.add_loss(1e-2 * ops.mean(x * x))
        if self.adds == "one a row":
            axes = tuple(range(1, len(x.shape)))
            self.add_loss(ops.mean(x * x, axis=axes))
        return x

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.wide.units)


class Attention(L.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, attention, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = attention

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x, mask=None):
        return self.attention(x, x, query_mask=mask)

    def compute_output_shape(self, input_shape):
        return input_shape


class Unchanged(L.Layer):
    """A layer that returns a tensor like the one that it gets."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape):
        return input_shape


class Track(Unchanged):
    """A layer that counts and averages in `tf.Variable`s."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.mean = tf.Variable(0.0, trainable=False, dtype=self.variable_dtype)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x))
        return x


class Positions(Unchanged):
    """A layer that adds what it has learned of each position."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table: Any = None

    def build(self, input_shape):
        _, length, dim = input_shape
        self.length = length
        self.table = L.Embedding(length, dim)
        self.table.build((None,))

    def call(self, x):
        return x + self.table(ops.arange(self.length))


class Constant(L.Layer):
    """A layer that returns a weight, or one number for all rows."""

    def __init__(self, shape, **kwargs):
        super().__init__(**kwargs)
        self.shape = shape

    def build(self, input_shape):
        self.weight = self.add_weight(shape=self.shape, initializer="ones")

    def call(self, x):
        return ops.convert_to_tensor(self.weight)

    def compute_output_spec(self, x):
        return keras.KerasTensor(self.shape, self.compute_dtype)


class ScaledError(keras.losses.Loss):
    """A squared error and its weight, which is learned."""

    def __init__(self, weights, **kwargs):
        super().__init__(**kwargs)
        # A function, so that Keras does not look for weights in a loss.
        self.weights = weights

    def call(self, y_true, y_pred):
        scale = ops.convert_to_tensor(self.weights())
        scale = ops.mean(scale * scale) + 0.1
        error = ops.mean((y_true - y_pred) ** 2, axis=-1)
        return error / scale + ops.log(scale)


class Drawing:
    """All that is drawn for a seed, the same each time it is asked for.

    Args:
        seed: Integer.
        has_state: Boolean, whether layers may have a state or draw numbers,
            so that only one micro-batch gives the plain model's numbers.
        kinds: `Kinds`, what else may be drawn. Defaults to all.
    """

    def __init__(self, seed: int, has_state: bool, kinds: Kinds | None = None):
        self.seed = seed
        self.has_state = has_state
        self.kinds = kinds or Kinds()
        # Of the kinds, so that what else is drawn does not depend on them.
        more = random.Random(seed + 5)
        self._within = random.Random()
        self._drawn = {
            x.name: more.random() < 0.3 and getattr(self.kinds, x.name)
            for x in dataclasses.fields(Kinds)
        }

    def has(self) -> list[str]:
        """Returns the names of the kinds that were drawn."""
        return [name for name, drawn in self._drawn.items() if drawn]

    def model(self) -> keras.Model:
        """Returns a functional model."""
        draw = random.Random(self.seed)
        more = random.Random(self.seed + 6)
        self._within.seed(self.seed + 7)
        inputs, tensors = [], []
        for i in range(draw.choice([1, 1, 2, 3])):
            kind = draw.choice(list(INPUTS))
            dtype = "int32" if kind == "tokens" else "float32"
            x = keras.Input(INPUTS[kind], name=f"input_{i}", dtype=dtype)
            inputs.append(x)
            if kind == "tokens":
                mask = draw.random() < 0.5
                x = L.Embedding(VOCABULARY, 4, mask_zero=mask)(x)
            if self._drawn["positions"] and len(x.shape) == 3:
                x = Positions()(x)
            tensors.append(x)
        if self._drawn["positions"] and all(len(x.shape) != 3 for x in tensors):
            x = L.Reshape((2, 3))(L.Dense(6)(pooled(tensors[0])))
            tensors.append(Positions()(x))
        shared = L.Dense(4, "tanh")
        for _ in range(draw.randrange(3, 9)):
            i = draw.randrange(len(tensors))
            x = tensors[i]
            kind = draw.random()
            if kind < 0.1 and x.shape[-1] == 4:
                tensors[i] = shared(x)
            elif kind < 0.2:
                other = pooled(draw.choice(tensors))
                tensors.append(L.Concatenate()([pooled(x), other]))
            elif kind < 0.4:
                y = self.within(x, self.layer(draw, x))(x)
                join = draw.choice([L.Add(), L.Multiply(), L.Maximum()])
                tensors.append(join([x, y]) if x.shape == y.shape else y)
            else:
                tensors[i] = self.within(x, self.layer(draw, x))(x)
        i = more.randrange(len(tensors))
        if self._drawn["tensorflow_state"]:
            tensors[i] = Track()(tensors[i])
        if self._drawn["partly_frozen"]:
            block = Bottleneck(4, "none", name="partly_frozen")
            tensors[i] = block(tensors[i])
            block.trainable = False
            more.choice([block.narrow, block.wide]).trainable = True
        # First, so that a loss may find it.
        if self._drawn["loss_weights"]:
            tensors[0] = L.Dense(4, name="in_the_loss")(tensors[0])
        outputs = {}
        num_outputs = min(draw.choice([1, 1, 2, 3]), len(tensors))
        kinds = [kind for _, kind in self.losses(num_outputs)]
        for i in range(num_outputs):
            group = tensors[i::num_outputs]
            x = group[0]
            if len(group) > 1 or len(x.shape) != 3:
                x = L.Concatenate()([pooled(x) for x in group])
            activation = None
            if self._drawn["probabilities"]:
                activation = {"class": "softmax", "flags": "sigmoid"}.get(
                    kinds[i]
                )
            outputs[f"output_{i}"] = L.Dense(
                CLASSES, activation, name=f"output_{i}"
            )(x)
        if self._drawn["odd_outputs"]:
            x = pooled(tensors[-1])
            outputs["output_odd"] = more.choice(
                [
                    L.Dense(2),
                    lambda x: x > 0,
                    Constant(()),
                    Constant((2, 3)),
                ]
            )(x)
            # The only ones in which Keras lets outputs go without a loss.
            return keras.Model(inputs, outputs)
        if len(outputs) == 1:
            outputs = outputs["output_0"]
        elif draw.random() < 0.5:
            outputs = list(outputs.values())
        return keras.Model(inputs, outputs)

    def within(self, x: Any, layer: keras.Layer) -> keras.Layer:
        """Returns a layer for a tensor, or one that has it in a model."""
        if not self._drawn["models_within"]:
            return layer
        draw = self._within
        for _ in range(draw.choice([0, 1, 1, 2])):
            if draw.random() < 0.5:
                inputs = keras.Input(x.shape[1:])
                layer = keras.Model(inputs, layer(inputs))
            else:
                more = [L.LayerNormalization()] * draw.randrange(2)
                layer = keras.Sequential([layer, *more])
        return layer

    def layer(self, draw: random.Random, x: Any) -> keras.Layer:
        """Returns a layer for a tensor."""
        kwargs: dict[str, Any] = {}
        if draw.random() < 0.3:
            kwargs["kernel_regularizer"] = draw.choice(["l1", "l2"])
        if draw.random() < 0.1:
            kwargs["activity_regularizer"] = "l2"
        if draw.random() < 0.1:
            kwargs["kernel_constraint"] = draw.choice(["max_norm", "non_neg"])
        if draw.random() < 0.1:
            kwargs["trainable"] = False
        units = draw.choice([2, 4, 5])
        every = [
            L.Dense(units, draw.choice(["gelu", "relu", None]), **kwargs),
            L.LayerNormalization(),
            L.PReLU(),
            Bottleneck(units, draw.choice(["none", "one", "one a row"])),
        ]
        if self.has_state:
            every += [L.BatchNormalization(), L.Dropout(0.3)]
        attend = L.MultiHeadAttention(2, 2, use_bias=False)
        of_rank = {
            2: [L.UnitNormalization(), L.Activation("softplus")],
            3: [
                Attention(attend),
                L.GRU(units, return_sequences=draw.random() < 0.5),
                L.Bidirectional(L.LSTM(2, return_sequences=True)),
                L.GlobalAveragePooling1D(),
                L.TimeDistributed(L.Dense(units)),
                L.Masking(),
            ],
            4: [
                L.Conv2D(units, 2, padding="same", **kwargs),
                L.SeparableConv2D(units, 2, padding="same"),
                L.Conv2DTranspose(units, 2, padding="same"),
                L.MaxPooling2D(2, padding="same"),
                L.ZeroPadding2D(1),
                L.Flatten(),
            ],
        }
        return draw.choice(every + of_rank[len(x.shape)])

    def optimizer(self) -> keras.optimizers.Optimizer:
        draw = random.Random(self.seed + 1)
        kwargs = draw.choice(
            [
                {},
                {},
                {"clipnorm": 0.5},
                {"global_clipnorm": 0.5},
                {"clipvalue": 0.1},
                {"use_ema": True, "ema_overwrite_frequency": 2},
                {"weight_decay": 0.01},
                {"gradient_accumulation_steps": 2},
            ]
        )
        if self._drawn["positions"]:
            # It squares gradients. Where one is zero, but for rounding, it
            # must not divide by that.
            return keras.optimizers.Adagrad(
                0.02, initial_accumulator_value=0.01, **kwargs
            )
        # Those that do not divide by the size of a gradient: it may be zero,
        # but for rounding.
        if draw.random() < 0.5:
            kwargs["momentum"] = 0.9
        return keras.optimizers.SGD(0.02, **kwargs)

    def losses(
        self, num_outputs: int, model: keras.Model | None = None
    ) -> list[tuple[Any, str]]:
        """Returns losses, and how their labels are made.

        A loss that has a weight of the model needs the `model`.
        """
        draw = random.Random(self.seed + 2)
        found = []
        for i in range(num_outputs):
            loss, labels = draw.choice(
                [
                    (keras.losses.SparseCategoricalCrossentropy, "class"),
                    (keras.losses.BinaryCrossentropy, "flags"),
                    (keras.losses.MeanSquaredError, "number"),
                    (keras.losses.Huber, "number"),
                    (keras.losses.CosineSimilarity, "number"),
                ]
            )
            kwargs: dict[str, Any] = {}
            if labels != "number" and not self._drawn["probabilities"]:
                kwargs["from_logits"] = True
            reduction = draw.choice(
                ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
            )
            if i == 0 and self._drawn["loss_weights"]:
                loss, labels = ScaledError, "number"
                kwargs = {"weights": lambda: _loss_weight(model)}
            found.append((loss(reduction=reduction, **kwargs), labels))
        return found

    def pipeline(self, num_calls: int) -> dict[str, Any]:
        """Returns arguments of `PipelinedModel`."""
        draw = random.Random(self.seed + 3)
        num_micro_batches = 1 if self.has_state else draw.choice([1, 2, 3, 4])
        return {
            "num_stages": min(num_calls, draw.choice([1, 2, 3, 4])),
            "num_micro_batches": num_micro_batches,
            "schedule": draw.choice(
                ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"]
            ),
            "remat": draw.choice(["always", "never", "except_last"]),
            "balance": draw.choice(["parameters", "flops"]),
        }

    def compiled(self, pipelined: bool) -> keras.Model:
        """Returns the model, compiled, as plain Keras or as a pipeline."""
        keras.utils.set_random_seed(self.seed)
        model = self.model()
        num_outputs = len(self._with_loss(model))
        if pipelined:
            model = tf_gpipe.PipelinedModel.from_model(
                model, **self.arguments(model)
            )
        losses = self.losses(num_outputs, model)
        # Metrics, unlike losses, want labels for every output.
        measured = not self._drawn["odd_outputs"] and all(
            kind == "number" for _, kind in losses
        )
        model.compile(
            self.optimizer(),
            self._shaped(model, [loss for loss, _ in losses]),
            weighted_metrics=self._shaped(model, [["mae"] for _ in losses])
            if measured
            else None,
        )
        return model

    def arguments(self, model: keras.Model) -> dict[str, Any]:
        """Returns arguments of the pipeline for a model."""
        calls = [x for x in model.operations if not isinstance(x, L.InputLayer)]
        return self.pipeline(len(calls))

    def data(self) -> tuple[tuple, int]:
        """Returns inputs, labels and weights; and the size of a batch."""
        numbers = np.random.default_rng(self.seed)
        model = self.model()
        with_loss = self._with_loss(model)
        rows = int(numbers.choice([5, 8, 12, 13]))
        batch_size = int(numbers.choice([3, 4, 8]))

        def features(x):
            shape = (rows, *x.shape[1:])
            if x.dtype == "int32":
                return numbers.integers(0, VOCABULARY, shape)
            return numbers.standard_normal(shape).astype("float32")

        def labels(kind, output):
            shape = (rows, *output.shape[1:])
            if kind == "class":
                return numbers.integers(0, CLASSES, shape[:-1])
            if kind == "flags":
                return numbers.integers(0, 2, shape)
            return numbers.standard_normal(shape).astype("float32")

        x = [features(x) for x in model.inputs]
        y = [
            labels(kind, output)
            for (_, kind), output in zip(
                self.losses(len(with_loss)), with_loss, strict=True
            )
        ]
        # Some rows, and so some micro-batches, count for nothing.
        weights: Any = [
            numbers.integers(0, 3, (rows, *output.shape[1:-1])).astype(
                "float32"
            )
            for output in with_loss
        ]
        if numbers.random() < 0.5:
            weights = None
        return (
            x if len(x) > 1 else x[0],
            self._shaped(model, y),
            None if weights is None else self._shaped(model, weights),
        ), batch_size

    def _with_loss(self, model: keras.Model) -> list:
        """Returns the outputs that have a loss."""
        odd = self._drawn["odd_outputs"]
        return model.outputs[: len(model.outputs) - odd]

    def _shaped(self, model: keras.Model, values: list) -> Any:
        """Returns what there is for each output with a loss, as Keras wants."""
        if self._drawn["odd_outputs"]:
            return dict(zip(model.output, values, strict=False))
        return keras.tree.pack_sequence_as(model.output, values)


def _loss_weight(model: Any) -> keras.Variable:
    return model.get_layer("in_the_loss").kernel


def pooled(x: Any) -> Any:
    """Returns a vector for each row."""
    pool = {3: L.GlobalAveragePooling1D, 4: L.GlobalAveragePooling2D}
    rank = len(x.shape)
    return pool[rank]()(x) if rank in pool else x


def trained(drawing: Drawing, pipelined: bool) -> dict[str, dict[str, Any]]:
    """Returns all that training, evaluation and prediction make."""
    data, batch_size = drawing.data()
    model = drawing.compiled(pipelined)
    history = model.fit(
        *data[:2],
        sample_weight=data[2],
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    evaluated = model.evaluate(
        *data[:2],
        sample_weight=data[2],
        batch_size=batch_size,
        verbose=0,
        return_dict=True,
    )
    if "odd_outputs" in drawing.has():
        # Keras does not join scalars of several batches.
        predicted = model.predict_on_batch(data[0])
    else:
        predicted = model.predict(data[0], batch_size=batch_size, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    for layer in model.layers:
        if isinstance(layer, Track):
            variables += [layer.calls, layer.mean]
    return {
        "fit": history.history,
        "evaluate": evaluated,
        "predict": dict(enumerate(keras.tree.flatten(predicted))),
        "variables": {i: v.numpy() for i, v in enumerate(variables)},
    }


def training_differs(drawing: Drawing) -> list[str]:
    """Returns what differs of all that training makes, for the plain model."""
    expected, received = trained(drawing, False), trained(drawing, True)
    found = []
    for kind, values in expected.items():
        for name in {**values, **received[kind]}:
            if name not in values or name not in received[kind]:
                found.append(f"{kind} {name}: not there in one of the two")
                continue
            a, b = (
                np.asarray(x[name], "float64") for x in (values, received[kind])
            )
            if a.shape != b.shape:
                found.append(f"{kind} {name}: shapes {a.shape}, {b.shape}")
            elif not np.allclose(b, a, rtol=1e-4, atol=1e-5, equal_nan=True):
                apart = np.max(np.abs(a - b))
                found.append(f"{kind} {name}: {apart:.1e} apart")
    return found


def verified(drawing: Drawing) -> Any:
    """Returns the report of `verify`: of one step, and of predictions."""
    data, _ = drawing.data()
    return tf_gpipe.verify(drawing.compiled(pipelined=True), *data)


def problems(drawing: Drawing) -> list[str]:
    """Returns what differs from plain Keras, by `verify` and by training."""
    report = verified(drawing)
    found = [] if report.ok else [str(report)]
    try:
        found += training_differs(drawing)
    except Exception as e:
        found.append(f"Training raised {type(e).__name__}: {e}")
    return found


def _difference(drawing: Drawing) -> tuple[str, bool]:
    """Returns what differs, and whether the rounding of float32 explains it.

    A model may magnify rounding until its numbers differ. Then they differ by
    little, and not at all in float64.
    """
    # Forgets functions and names of models before.
    keras.backend.clear_session()
    try:
        report = verified(drawing)
    except Exception as e:
        return f"{type(e).__name__}: {e}", False
    if report.ok:
        return "", False
    failed = [x.difference for x in report.worst.values() if not x.ok]
    if max(failed, default=math.inf) > _MAGNIFIED_ROUNDING:
        return str(report), False
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        keras.backend.clear_session()
        return str(report), verified(drawing).ok
    finally:
        keras.config.set_floatx(floatx)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--num",
        type=command_line.positive,
        default=1000,
        help="how many models (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first; those of the others count up (default: 0)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    args = parser.parse_args(argv)
    devices.ensure(_MOST_STAGES)
    different = []
    for done, seed in enumerate(range(args.seed, args.seed + args.num), 1):
        drawing = Drawing(seed, has_state=seed % 2 == 1)
        kinds = ", ".join(drawing.has()) or "of every day"
        found, rounding = _difference(drawing)
        if found and rounding:
            print(f"seed {seed} ({kinds}) magnifies rounding", flush=True)
        elif found:
            different.append({"seed": seed, "kinds": drawing.has()})
            print(f"seed {seed} ({kinds}) differs:\n{found}", flush=True)
        if done % _MODELS_A_LINE == 0:
            print(f"{done} of {args.num} models", flush=True)
    print(f"{len(different)} of {args.num} models differ")
    if args.json:
        print(json.dumps({"models": args.num, "different": different}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
