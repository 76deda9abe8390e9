"""Random sequences of what users do with a model."""

import os
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise

CLASSES = 3
ROWS = 10
BATCH = 4
INPUTS = {"vector": (5,), "sequence": (4, 3)}


class Life:
    """A model and what happens to it: alike for plain and pipelined models.

    Args:
        seed: Integer, from which all random choices follow.
        kwargs: Arguments of a pipeline, or `None` for a plain model.
        directory: Where to save the model.
    """

    def __init__(self, seed, kwargs, directory):
        draw = random.Random(seed)
        keras.utils.set_random_seed(seed)
        self.kwargs = kwargs
        self.directory = directory
        self.optimizer = draw.choice([self.sgd, self.adam, self.scaled])
        self.steps_per_execution = draw.choice([1, 1, 3])
        shape = INPUTS[draw.choice(list(INPUTS))]
        within = draw.random() < 0.3
        form = draw.choice(["deferred", "sequential", "functional"])
        layers = self.layers(draw, shape)
        if form == "functional":
            self.model = self.graph(keras.Input(shape), layers)
        elif within or form == "sequential":
            self.model = self.stack([keras.Input(shape), *layers])
        else:
            self.model = self.stack(layers)
        if within:
            # The pipeline is a layer of a plain model.
            inputs = keras.Input(shape)
            x = L.Dense(shape[-1], "tanh")(inputs)
            self.model = keras.Model(inputs, self.model(x))
        self.compile()
        numbers = np.random.default_rng(seed)
        self.x = numbers.standard_normal((ROWS, *shape)).astype("float32")
        self.y = numbers.standard_normal((ROWS, CLASSES)).astype("float32")
        self.weights = numbers.uniform(0, 2, ROWS).astype("float32")

    def layers(self, draw, shape):
        layers = []
        for _ in range(draw.randrange(3, 6)):
            units = draw.choice([3, 4])
            kwargs = {}
            if draw.random() < 0.3:
                kwargs["kernel_regularizer"] = "l2"
            if draw.random() < 0.2:
                kwargs["trainable"] = False
            every = [
                L.Dense(units, "tanh", **kwargs),
                L.LayerNormalization(),
                keras.Sequential([L.Dense(units, "gelu")]),
            ]
            if len(shape) == 2:
                every.append(L.GRU(units, return_sequences=True))
            layers.append(draw.choice(every))
        if len(shape) == 2:
            layers.append(L.GlobalAveragePooling1D())
        return [*layers, L.Dense(CLASSES)]

    def stack(self, layers):
        if self.kwargs is None:
            return keras.Sequential(layers)
        return tf_gpipe.PipelinedSequential(layers, **self.kwargs)

    def graph(self, inputs, layers):
        # Every tensor is also added to the next one of its shape.
        x, last = inputs, {}
        for layer in layers:
            x = layer(x)
            if x.shape in last:
                x = L.Add()([x, last[x.shape]])
            last[x.shape] = x
        if self.kwargs is None:
            return keras.Model(inputs, x)
        return tf_gpipe.PipelinedModel(inputs, x, **self.kwargs)

    def sgd(self):
        return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0)

    def adam(self):
        # The large epsilon makes gradients of nearly zero count for nothing.
        return keras.optimizers.Adam(0.01, epsilon=0.1, use_ema=True)

    def scaled(self):
        # The scale doubles every second step.
        return keras.optimizers.LossScaleOptimizer(
            self.sgd(), initial_scale=2.0, dynamic_growth_steps=2
        )

    def compile(self):
        self.model.compile(
            self.optimizer(),
            "mse",
            metrics=["mae"],
            steps_per_execution=self.steps_per_execution,
        )

    def dataset(self, drop_remainder=False):
        data = tf.data.Dataset.from_tensor_slices((self.x, self.y))
        return data.batch(BATCH, drop_remainder=drop_remainder)

    def fit(self, *args, **kwargs):
        kwargs = {"shuffle": False, "verbose": 0, **kwargs}
        return self.model.fit(*args, **kwargs).history

    def fits_arrays(self):
        return self.fit(self.x, self.y, batch_size=BATCH, epochs=2)

    def fits_weighted_rows(self):
        return self.fit(self.x, self.y, BATCH, sample_weight=self.weights)

    def fits_a_dataset(self):
        return self.fit(self.dataset(), validation_data=self.dataset())

    def fits_equal_batches(self):
        return self.fit(self.dataset(drop_remainder=True))

    def fits_some_steps(self):
        return self.fit(self.dataset().repeat(), steps_per_epoch=3, epochs=2)

    def trains_on_a_batch(self):
        return self.model.train_on_batch(
            self.x[:6], self.y[:6], return_dict=True
        )

    def takes_a_step_of_its_own(self):
        model, data = self.model, (self.x, self.y, self.weights)
        if hasattr(model, "loss_and_gradients"):
            loss, gradients, outputs = model.loss_and_gradients(*data)
        else:
            with tf.GradientTape() as tape:
                outputs = model(self.x, training=True)
                loss = model.compute_loss(
                    self.x, self.y, outputs, self.weights, training=True
                )
                scaled = model.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss, "outputs": outputs}

    def evaluates(self):
        return self.model.evaluate(self.dataset(), verbose=0, return_dict=True)

    def predicts(self):
        return {"all": self.model.predict(self.x, BATCH, verbose=0)}

    def is_called(self):
        return {"some": self.model(self.x[:5])}

    def is_differentiated(self):
        with tf.GradientTape() as tape:
            outputs = self.model(self.x[:7], training=True)
        gradients = tape.gradient(outputs, self.model.trainable_variables)
        return dict(enumerate(gradients))

    def is_compiled(self):
        self.compile()

    def freezes_its_first_weights(self):
        first = next(x for x in self.model.layers if x.weights)
        first.trainable = not first.trainable
        self.compile()

    def is_saved_and_loaded(self):
        path = os.path.join(self.directory, f"{self.kwargs is None}.keras")
        self.model.save(path)
        self.model = keras.saving.load_model(path)

    def loads_its_weights(self):
        path = os.path.join(self.directory, "model.weights.h5")
        self.model.save_weights(path)
        self.model.set_weights([0 * x for x in self.model.get_weights()])
        self.model.load_weights(path)

    def is_cut_anew(self):
        for model in (self.model, *self.model.layers):
            if hasattr(model, "rebalance"):
                model.rebalance("flops")


ACTIONS = [
    name
    for name in vars(Life)
    if name.startswith(("fits", "trains", "takes", "is_", "freezes", "loads"))
] + ["evaluates", "predicts"]


class RandomLivesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(pairwise.some(range(8), 4))
    @pytest.mark.slow
    def test_live_alike(self, seed):
        draw = random.Random(seed)
        num_stages = draw.choice([1, 2, 3])
        kwargs = {
            "num_stages": num_stages,
            "num_micro_batches": draw.choice([1, 2, 3]),
            "schedule": draw.choice(
                ["gpipe", "1f1b", "zero_bubble", "eager_zero_bubble"]
            ),
            "remat": draw.choice(["always", "never"]),
        }
        plain, pipelined = (
            Life(seed, x, self.get_temp_dir()) for x in (None, kwargs)
        )
        # The first action builds the model.
        done = [draw.choice(["fits_arrays", "fits_a_dataset", "predicts"])]
        done += [draw.choice(ACTIONS) for _ in range(5)]
        for i, action in enumerate(done):
            found = []
            for life in (plain, pipelined):
                keras.utils.set_random_seed(i)
                result = getattr(life, action)() or {}
                model = life.model
                found.append(
                    {
                        "result": result,
                        "weights": dict(enumerate(model.get_weights())),
                    }
                )
                if plain.model.optimizer.built:
                    found[-1]["slots"] = {
                        j: v.numpy()
                        for j, v in enumerate(model.optimizer.variables)
                    }
            self.assertAllClose(
                *found, rtol=1e-4, atol=1e-5, msg=f"{kwargs} {done[: i + 1]}"
            )
