"""Models, losses, optimizers and pipelines that are drawn by chance."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe

CLASSES = 3
VOCABULARY = 10
INPUTS = {
    "vector": (5,),
    "sequence": (4, 3),
    "image": (6, 6, 2),
    "tokens": (5,),
}


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
            self.add_loss(1e-2 * keras.ops.mean(x * x))
        if self.adds == "one a row":
            axes = tuple(range(1, len(x.shape)))
            self.add_loss(keras.ops.mean(x * x, axis=axes))
        return x

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.wide.units)


class Drawing:
    """All that is drawn for a seed, the same each time it is asked for.

    Args:
        seed: Integer.
        has_state: Boolean, whether layers may have a state or draw numbers,
            so that only one micro-batch gives the plain model's numbers.
    """

    def __init__(self, seed, has_state):
        self.seed = seed
        self.has_state = has_state

    def model(self):
        """Returns a functional model."""
        draw = random.Random(self.seed)
        inputs, tensors = [], []
        for i in range(draw.choice([1, 1, 2, 3])):
            kind = draw.choice(list(INPUTS))
            dtype = "int32" if kind == "tokens" else "float32"
            x = keras.Input(INPUTS[kind], name=f"input_{i}", dtype=dtype)
            inputs.append(x)
            if kind == "tokens":
                mask = draw.random() < 0.5
                x = L.Embedding(VOCABULARY, 4, mask_zero=mask)(x)
            tensors.append(x)
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
                y = self.layer(draw, x)(x)
                join = draw.choice([L.Add(), L.Multiply(), L.Maximum()])
                tensors.append(join([x, y]) if x.shape == y.shape else y)
            else:
                tensors[i] = self.layer(draw, x)(x)
        outputs = {}
        num_outputs = min(draw.choice([1, 1, 2, 3]), len(tensors))
        for i in range(num_outputs):
            group = tensors[i::num_outputs]
            x = group[0]
            if len(group) > 1 or len(x.shape) != 3:
                x = L.Concatenate()([pooled(x) for x in group])
            outputs[f"output_{i}"] = L.Dense(CLASSES, name=f"output_{i}")(x)
        if num_outputs == 1:
            outputs = outputs["output_0"]
        elif draw.random() < 0.5:
            outputs = list(outputs.values())
        return keras.Model(inputs, outputs)

    def layer(self, draw, x):
        """Returns a layer for a tensor."""
        kwargs = {}
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

    def optimizer(self):
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
        # Those that do not divide by the size of a gradient: it may be zero,
        # but for rounding.
        if draw.random() < 0.5:
            kwargs["momentum"] = 0.9
        return keras.optimizers.SGD(0.02, **kwargs)

    def losses(self, num_outputs):
        """Returns losses, and how their labels are made."""
        draw = random.Random(self.seed + 2)
        found = []
        for _ in range(num_outputs):
            loss, labels = draw.choice(
                [
                    (keras.losses.SparseCategoricalCrossentropy, "class"),
                    (keras.losses.BinaryCrossentropy, "flags"),
                    (keras.losses.MeanSquaredError, "number"),
                    (keras.losses.Huber, "number"),
                    (keras.losses.CosineSimilarity, "number"),
                ]
            )
            kwargs = {} if labels == "number" else {"from_logits": True}
            reduction = draw.choice(
                ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
            )
            found.append((loss(reduction=reduction, **kwargs), labels))
        return found

    def pipeline(self, num_calls):
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


def pooled(x):
    """Returns a vector for each row."""
    pool = {3: L.GlobalAveragePooling1D, 4: L.GlobalAveragePooling2D}
    rank = len(x.shape)
    return pool[rank]()(x) if rank in pool else x


class RandomModelsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(seed=list(range(4)), has_state=(False, True))
    def test_trains_alike(self, seed, has_state):
        self.assert_trains_alike(Drawing(seed, has_state))

    @parameterized.product(seed=list(range(4, 24)), has_state=(False, True))
    @pytest.mark.slow
    def test_more_of_them_train_alike(self, seed, has_state):
        self.assert_trains_alike(Drawing(seed, has_state))

    def assert_trains_alike(self, drawing):
        numbers = np.random.default_rng(drawing.seed)
        plain = drawing.model()
        rows = int(numbers.choice([5, 8, 12, 13]))
        batch_size = int(numbers.choice([3, 4, 8]))
        losses = drawing.losses(len(plain.outputs))

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

        x = [features(x) for x in plain.inputs]
        y = [
            labels(kind, output)
            for (_, kind), output in zip(losses, plain.outputs, strict=True)
        ]
        # Some rows, and so some micro-batches, count for nothing.
        weights = [
            numbers.integers(0, 3, (rows, *output.shape[1:-1])).astype(
                "float32"
            )
            for output in plain.outputs
        ]
        if numbers.random() < 0.5:
            weights = None

        def shaped(values):
            return keras.tree.pack_sequence_as(plain.output, values)

        data = (
            x if len(x) > 1 else x[0],
            shaped(y),
            None if weights is None else shaped(weights),
        )
        operations = [
            x for x in plain.operations if not isinstance(x, L.InputLayer)
        ]
        found = []
        for kwargs in (None, drawing.pipeline(len(operations))):
            keras.utils.set_random_seed(drawing.seed)
            model = drawing.model()
            if kwargs is not None:
                model = tf_gpipe.PipelinedModel.from_model(model, **kwargs)
            model.compile(
                drawing.optimizer(),
                shaped([loss for loss, _ in losses]),
                weighted_metrics=shaped([["mae"] for _ in losses])
                if all(kind == "number" for _, kind in losses)
                else None,
            )
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
            predicted = model.predict(data[0], batch_size=batch_size, verbose=0)
            variables = [*model.variables, *model.optimizer.variables]
            found.append(
                {
                    "fit": history.history,
                    "evaluate": evaluated,
                    "predict": dict(enumerate(keras.tree.flatten(predicted))),
                    "variables": {
                        i: v.numpy() for i, v in enumerate(variables)
                    },
                }
            )
        self.assertAllClose(*found, rtol=1e-4, atol=1e-5, msg=str(kwargs))
