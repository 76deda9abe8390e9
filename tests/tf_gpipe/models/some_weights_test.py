"""Steps of the user's own that apply gradients of some of the weights."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import layers as L

import tf_gpipe
from tests import pairwise
from tf_gpipe.devices import slots

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
OPTIMIZERS = {
    # As `fit` ends, Keras gives averages to weights by their places: the first
    # one to the model's first weight, whichever weight it is of.
    "averages": lambda: keras.optimizers.SGD(0.1, use_ema=True),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "averages at each step": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_overwrite_frequency=1
    ),
    "accumulated": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, weight_decay=0.1
    ),
}


def make(base, optimizer, trained, step="apply", **kwargs):
    """Returns a model that trains the weights of these numbers."""

    class Model(base):
        def train_step(self, data):
            if step == "super":
                return super().train_step(data)
            x, y = data
            if isinstance(self, tf_gpipe.PipelinedSequential):
                _, gradients, y_pred = self.loss_and_gradients(x, y)
            else:
                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(x, y, y_pred)
                    loss = self.optimizer.scale_loss(loss)
                gradients = tape.gradient(loss, self.trainable_variables)
            pairs = list(zip(gradients, self.trainable_variables, strict=True))
            chosen = [pairs[i] for i in self.trained]
            if step == "apply":
                self.optimizer.apply(*zip(*chosen, strict=True))
            else:
                self.optimizer.apply_gradients(chosen)
            if step == "two optimizers":
                self.second.apply_gradients(pairs[:2])
            return self.compute_metrics(x, y, y_pred)

    keras.utils.set_random_seed(1)
    if base is tf_gpipe.PipelinedSequential:
        stages = {
            "num_stages": 2,
            "num_micro_batches": 2,
            "devices": ["CPU:0", "CPU:1"],
        }
    else:
        stages = {}
    layers = [keras.Input((4,)), L.Dense(4), L.Dense(4), L.Dense(4)]
    model = Model(layers, **stages)
    model.trained = trained
    model.second = keras.optimizers.Adam(0.01)
    model.compile(optimizer(), "mse", **kwargs)
    return model


def fit(model, epochs=1, callbacks=()):
    model.fit(
        X,
        X,
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks],
    )


def numberless(variables):
    return [re.sub(r"_\d+", "", v.name) for v in variables]


class SomeWeightsTest(tf.test.TestCase, parameterized.TestCase):
    def both(self, *args, **kwargs):
        """Returns a plain model and a pipeline, trained twice, and alike."""
        models = []
        for base in (keras.Sequential, tf_gpipe.PipelinedSequential):
            models.append(make(base, *args, **kwargs))
            fit(models[-1])
            fit(models[-1])
        self.assert_close(*(x.variables for x in models))
        return models

    def assert_close(self, expected, received):
        for x, y in zip(expected, received, strict=True):
            self.assertAllClose(x, y, 1e-5, 1e-6)

    @pairwise.each(
        optimizer=list(OPTIMIZERS),
        # In both stages, in the second, and in another order.
        trained=[(2, 3, 4), (4,), (4, 1)],
        step=["apply", "apply_gradients", "two optimizers", "super"],
        how=[{}, {"run_eagerly": True}, {"steps_per_execution": 2}],
    )
    @pytest.mark.slow_after(1)
    def test_as_plain(self, optimizer, trained, step, how):
        plain, pipeline = self.both(OPTIMIZERS[optimizer], trained, step, **how)
        expected, received = plain.optimizer, pipeline.optimizer
        self.assertEqual(
            *map(numberless, (expected.variables, received.variables))
        )
        self.assert_close(expected.variables, received.variables)
        weights = received._trainable_variables
        for weight, own in zip(
            weights, slots.of_optimizer(received, weights), strict=True
        ):
            for slot in own:
                self.assertEqual(slot.value.device, weight.value.device)

    @pytest.mark.slow
    def test_loss_scale(self):
        """The optimizer has slots for all weights; those of some are zero."""

        def optimizer():
            return keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), dynamic_growth_steps=2
            )

        plain, pipeline = self.both(optimizer, (2, 3, 4))
        self.assertLen(plain.optimizer._trainable_variables, 3)
        self.assertLen(pipeline.optimizer._trainable_variables, 6)

    @pytest.mark.slow
    def test_checkpoint(self):
        """A resumed run has the slots that were saved."""
        base, optimizer = tf_gpipe.PipelinedSequential, OPTIMIZERS["averages"]
        whole = make(base, optimizer, (4, 1))
        fit(whole, epochs=2)
        begun: list[int] = []
        noting = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: begun.append(epoch)
        )
        for epochs in (1, 2):
            parts = make(base, optimizer, (4, 1))
            checkpoint = tf_gpipe.callbacks.Checkpoint(self.get_temp_dir())
            fit(parts, epochs, [checkpoint, noting])
        self.assertEqual(begun, [0, 1])
        for x, y in zip(
            whole.variables + whole.optimizer.variables,
            parts.variables + parts.optimizer.variables,
            strict=True,
        ):
            self.assertAllEqual(x, y)


if __name__ == "__main__":
    tf.test.main()
