"""U-Net: segmentation with skip connections that cross stages.

The model is a small one of the model zoo; the images are circles in noise.
"""

import keras
import numpy as np

import model_zoo
import tf_gpipe

devices = tf_gpipe.split_cpu(2)  # Leave `devices` out on two GPUs.
keras.utils.set_random_seed(0)


def make_data(count, size=32):
    """Returns noisy images of circles, and masks of their pixels."""
    random = np.random.default_rng(count)
    places = np.arange(size)
    middle = random.uniform(10, 22, size=(2, count, 1, 1))
    radius = random.uniform(4, 9, size=(count, 1, 1))
    squares = (places[:, None] - middle[0]) ** 2 + (places - middle[1]) ** 2
    labels = (squares < radius**2).astype("int32")
    images = labels + random.normal(scale=0.5, size=labels.shape)
    return images[..., None].astype("float32"), labels


x, y = make_data(256)
plain = model_zoo.get(
    "unet",
    num_blocks=2,
    num_filters=8,
    input_shape=(32, 32, 1),
    num_classes=2,
)
model = tf_gpipe.PipelinedModel.from_model(
    plain, num_stages=2, num_micro_batches=4, devices=devices
)
model.compile(
    keras.optimizers.Adam(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x, y, batch_size=32, epochs=8)
model.summary()  # The last table shows what stages send to one another.

x_test, y_test = make_data(64)
found = np.argmax(model.predict(x_test), axis=-1)
overlap = np.sum(found & y_test) / np.sum(found | y_test)
print(f"intersection over union on other images: {overlap:.2f}")
assert overlap > 0.7
