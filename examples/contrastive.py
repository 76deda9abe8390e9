"""A contrastive loss in a training loop of your own.

The pipeline is called like a layer. The loss, outside the pipeline, compares
the rows of a batch: two noisy views of a digit should be more similar than
views of different digits. The digits come from `pip install scikit-learn`.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gpipe

devices = tf_gpipe.split_cpu(2)  # Leave `devices` out on two GPUs.
keras.utils.set_random_seed(0)

digits = load_digits()
x = (digits.data / 16).astype("float32")
encoder = tf_gpipe.PipelinedSequential(
    [
        keras.Input((64,)),
        keras.layers.GaussianNoise(0.3),
        *(keras.layers.Dense(128, "relu") for _ in range(3)),
        keras.layers.Dense(32),
        keras.layers.UnitNormalization(),
    ],
    num_stages=2,
    num_micro_batches=4,
    devices=devices,
)
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(encoder.trainable_variables)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(batch):
    with tf.GradientTape() as tape:
        views = encoder(tf.concat([batch, batch], 0), training=True)
        first, second = tf.split(views, 2)
        # Row i of the first views belongs to row i of the second.
        similar = tf.matmul(first, second, transpose_b=True) / 0.1
        loss = cross_entropy(tf.range(len(batch)), similar)
    gradients = tape.gradient(loss, encoder.trainable_variables)
    optimizer.apply(gradients, encoder.trainable_variables)
    return loss


data = tf.data.Dataset.from_tensor_slices(x).shuffle(len(x), seed=0)
data = data.batch(128, drop_remainder=True)
losses = [np.mean([step(batch) for batch in data]) for _ in range(8)]
print("loss, by epoch:", np.round(losses, 2))

# For each digit, the most similar other digit by the trained encoder.
views = encoder.predict(x, verbose=0)
nearest = np.argmax(views @ views.T - 2 * np.eye(len(x)), axis=1)
accuracy = np.mean(digits.target[nearest] == digits.target)
print(f"digits whose nearest neighbour is the same digit: {accuracy:.3f}")
assert losses[-1] < losses[0] and accuracy > 0.9
