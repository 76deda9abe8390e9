"""Transfer learning: a frozen ResNet under a new head, in two stages.

Here the base has random weights, and nothing is downloaded: give
`weights="imagenet"` for the real ones. The images are digits, from `pip install
scikit-learn`, enlarged to 32 x 32 pixels.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import tf_gpipe

devices = tf_gpipe.split_cpu(2)  # Leave `devices` out on two GPUs.
keras.utils.set_random_seed(0)

digits = load_digits()
# 32 x 32 pixels, and three channels of the same grey.
images = np.kron(digits.images, np.ones((4, 4)))[..., None].repeat(3, axis=-1)
x, y = (255 * images / 16).astype("float32")[:512], digits.target[:512]

base = keras.applications.ResNet50(
    weights=None, include_top=False, pooling="avg", input_shape=(32, 32, 3)
)
base.trainable = False
inputs = keras.Input((32, 32, 3))
features = base(keras.applications.resnet.preprocess_input(inputs))
features = keras.layers.LayerNormalization()(features)
plain = keras.Model(inputs, keras.layers.Dense(10)(features))

model = tf_gpipe.PipelinedModel.from_model(
    plain, num_stages=2, num_micro_batches=4, devices=devices
)
model.compile(
    keras.optimizers.Adam(1e-2),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
frozen = base.get_weights()
history = model.fit(x, y, batch_size=64, epochs=3)
same = all(map(np.array_equal, frozen, base.get_weights()))
accuracy = history.history["accuracy"]
print("layers of the stages:", [len(stage.layers) for stage in model.stages])
print(
    f"accuracy: {accuracy[0]:.2f}, {accuracy[-1]:.2f}; base as it was: {same}"
)
assert same and accuracy[-1] > accuracy[0]
