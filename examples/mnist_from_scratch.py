"""Train a classifier of digits in two stages, and export it.

The digits, of 8 x 8 pixels, come from `pip install scikit-learn`.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_gpipe

devices = tf_gpipe.split_cpu(2)  # Leave `devices` out on two GPUs.
keras.utils.set_random_seed(0)

digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
x, x_test, y, y_test = train_test_split(images, digits.target, random_state=0)

model = tf_gpipe.PipelinedSequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ],
    num_stages=2,
    num_micro_batches=4,  # Each mini-batch of 64 goes through in 4 parts.
    devices=devices,
)
model.compile(
    keras.optimizers.Adam(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x, y, batch_size=64, epochs=12, validation_data=(x_test, y_test))
model.summary()  # Ends with a table of the stages.

model.export("build/digits")  # The plain model, as a SavedModel.
served = keras.layers.TFSMLayer("build/digits", call_endpoint="serve")
accuracy = np.mean(np.argmax(served(x_test), axis=1) == y_test)
print(f"test accuracy of the exported model: {accuracy:.3f}")
assert accuracy > 0.9
