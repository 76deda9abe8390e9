"""A `train_step` of your own: it clips gradients one by one.

Plain Keras, whose `clipnorm` does the same, is trained for comparison.
"""

import keras
import numpy as np

import tf_gpipe

devices = tf_gpipe.split_cpu(2)  # Leave `devices` out on two GPUs.


class Clipped(tf_gpipe.PipelinedSequential):
    """Clips each gradient by its norm, and reports the largest one."""

    def train_step(self, data):
        x, y = data
        # Runs all micro-batches through the stages, forward and backward.
        loss, gradients, y_pred = self.loss_and_gradients(x, y)
        norms = [keras.ops.norm(keras.ops.reshape(g, (-1,))) for g in gradients]
        gradients = [
            g * keras.ops.minimum(1.0, 0.1 / (norm + 1e-6))
            for g, norm in zip(gradients, norms, strict=True)
        ]
        self.optimizer.apply(gradients, self.trainable_variables)
        logs = self.compute_metrics(x, y, y_pred)
        return {
            **logs,
            "loss": loss,
            "norm": keras.ops.max(keras.ops.stack(norms)),
        }


def make_layers():
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(32, "tanh") for _ in range(4)]
    return [keras.Input((8,)), *hidden, keras.layers.Dense(1)]


x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True))
model = Clipped(
    make_layers(), num_stages=2, num_micro_batches=4, devices=devices
)
# The same model and clipping in plain Keras.
plain = keras.Sequential(make_layers())
for each, clipnorm in ((model, None), (plain, 0.1)):
    each.compile(keras.optimizers.SGD(0.05, clipnorm=clipnorm), "mse")
histories = [
    each.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0).history
    for each in (model, plain)
]
losses = [each.evaluate(x, y, verbose=0) for each in (model, plain)]
print("largest gradient norm, by epoch:", np.round(histories[0]["norm"], 2))
print(f"loss: {losses[0]:.5f} as a pipeline, {losses[1]:.5f} as plain Keras")
assert abs(losses[0] - losses[1]) < 1e-4
