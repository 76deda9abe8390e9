"""Draws a model, its data and training, and a pipeline from a seed."""

import dataclasses
import random
from typing import Any

import keras
import numpy as np
from keras import layers as L

import tf_gpipe
from tf_gpipe.commands import devices
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.schedule import schedules
from tools.random_models.layers import Attention
from tools.random_models.layers import Bottleneck
from tools.random_models.layers import Constant
from tools.random_models.layers import Positions
from tools.random_models.layers import ScaledError
from tools.random_models.layers import Track
from tools.random_models.layers import pooled

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
    """What may be drawn beside everyday layers, losses and optimizers."""

    # Outputs of a softmax or a sigmoid, whose losses take no logits.
    probabilities: bool = True
    # Layers with state in `tf.Variable`s.
    tensorflow_state: bool = True
    # Trainable layers within frozen ones.
    partly_frozen: bool = True
    # Embeddings of positions, and optimizers that square gradients.
    positions: bool = True
    # Losses that use a weight of the model.
    loss_weights: bool = True
    # Outputs without a loss, also booleans, scalars and weights.
    odd_outputs: bool = True
    # Layers within nested models.
    models_within: bool = True
    # Several stages per device, with schedules for that.
    shared_devices: bool = True
    # A limit of memory, and remat of as much as it requires.
    memory_limit: bool = True
    # Several steps in one execution (`steps_per_execution`).
    several_steps: bool = True
    # Evaluation before training, whose traces may be used again.
    evaluated_first: bool = True

    @classmethod
    def none(cls) -> "Kinds":
        return cls(**{x.name: False for x in dataclasses.fields(cls)})


class Drawing:
    """Everything that is drawn for a seed: each call returns the same.

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
        # The kinds have a generator of their own, so that they do not change
        # what else is drawn.
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
        # Leads to the first output, whose loss uses the layer's kernel.
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
            # In Keras only a dictionary may have outputs without a loss.
            return keras.Model(inputs, outputs)
        if len(outputs) == 1:
            outputs = outputs["output_0"]
        elif draw.random() < 0.5:
            outputs = list(outputs.values())
        return keras.Model(inputs, outputs)

    def within(self, x: Any, layer: keras.Layer) -> keras.Layer:
        """Returns the layer for a tensor, perhaps within nested models."""
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
        """Returns a layer that takes the tensor."""
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
            # Adagrad squares gradients. By its initial accumulator it does not
            # divide by a gradient that is zero but for rounding.
            return keras.optimizers.Adagrad(
                0.02, initial_accumulator_value=0.01, **kwargs
            )
        # SGD does not divide by a gradient, which may be zero but for rounding.
        if draw.random() < 0.5:
            kwargs["momentum"] = 0.9
        return keras.optimizers.SGD(0.02, **kwargs)

    def losses(
        self, num_outputs: int, model: Any = None
    ) -> list[tuple[Any, str]]:
        """Returns pairs of a loss and the kind of its labels.

        A loss that uses a weight of the model needs the `model` to be called.
        """
        draw = random.Random(self.seed + 2)
        found, name = [], "in_the_loss"
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
                kwargs = {"weights": lambda: model.get_layer(name).kernel}
            found.append((loss(reduction=reduction, **kwargs), labels))
        return found

    def pipeline(self, num_calls: int) -> dict[str, Any]:
        """Returns the pipeline's arguments for a model of `num_calls` calls."""
        draw = random.Random(self.seed + 3)
        more = random.Random(self.seed + 8)
        num_micro_batches = 1 if self.has_state else draw.choice([1, 2, 3, 4])
        arguments: dict[str, Any] = {
            "num_stages": min(num_calls, draw.choice([1, 2, 3, 4])),
            "num_micro_batches": num_micro_batches,
            "schedule": draw.choice(
                ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"]
                + ["eager_zero_bubble"]
            ),
            "remat": draw.choice(["always", "never", "except_last"]),
            "balance": draw.choice(["parameters", "flops"]),
        }
        if self._drawn["shared_devices"] and num_calls > 1:
            num_devices = more.randint(1, min(2, num_calls // 2))
            arguments["schedule"] = more.choice(
                [*schedules.ANY_STAGES_A_DEVICE, *schedules.TWO_STAGES_A_DEVICE]
            )
            arguments["devices"] = devices.first(num_devices)
            arguments["num_stages"] = 2 * len(arguments["devices"])
        if self._drawn["memory_limit"]:
            arguments["remat"] = "auto"
            arguments["memory_limit"] = more.choice([0.5, 0.75, 1.0])
            arguments["balance"] = more.choice([None, "flops", "memory"])
        return arguments

    def compiled(self, pipelined: bool) -> keras.Model:
        """Returns the model, compiled, as plain Keras or as a pipeline."""
        keras.utils.set_random_seed(self.seed)
        model = self.model()
        num_outputs = len(self._with_loss(model))
        if pipelined:
            make = tf_gpipe.PipelinedModel.from_model
            arguments = self.arguments(model)
            try:
                model = make(model, **arguments)
            except TooLittleMemoryError:
                # This model cannot do with less memory.
                model = make(model, **{**arguments, "memory_limit": 1.0})
        losses = self.losses(num_outputs, model)
        # Metrics, unlike losses, need labels for every output.
        measured = not self._drawn["odd_outputs"] and all(
            kind == "number" for _, kind in losses
        )
        model.compile(
            self.optimizer(),
            self._shaped(model, [loss for loss, _ in losses]),
            weighted_metrics=self._shaped(model, [["mae"] for _ in losses])
            if measured
            else None,
            steps_per_execution=3 if self._drawn["several_steps"] else 1,
        )
        return model

    def arguments(self, model: keras.Model) -> dict[str, Any]:
        """Returns the pipeline's arguments for a model."""
        calls = [x for x in model.operations if not isinstance(x, L.InputLayer)]
        return self.pipeline(len(calls))

    def data(self) -> tuple[tuple, int]:
        """Returns a tuple of inputs, labels and weights, and a batch size."""
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
        """Returns values for outputs with a loss, in the outputs' structure."""
        if self._drawn["odd_outputs"]:
            return dict(zip(model.output, values, strict=False))
        return keras.tree.pack_sequence_as(model.output, values)
