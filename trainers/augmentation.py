"""Random augmentation of images, determined by a seed alone."""

import dataclasses

import keras
import tensorflow as tf

from trainers.command_line import UserError
from trainers.command_line import define_flags
from trainers.command_line import setting

CROPS = ("none", "pad", "inception")

# The distance between the generator states of two images: a layer that drew
# more random numbers for an image would repeat them for the next one.
_DRAWS = 1024


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Random augmentation of training images.

    By Keras's layers, except the crop `"inception"`, which is that of Szegedy
    et al., "Going Deeper with Convolutions", 2014,
    https://arxiv.org/abs/1409.4842, section 6. All random numbers follow from
    a given seed, so that a resumed run sees the same images as an
    uninterrupted one. Each field is a flag.
    """

    crop: str = setting(
        "none",
        "Random crops: none; of the image's size after padding by an eighth; "
        "or of 8% to 100% of the area.",
        enum_values=CROPS,
    )
    flip: bool = setting(False, "Flip half of the images.")
    rand_augment: int = setting(
        0,
        "Operations of RandAugment an image.",
        lower_bound=0,
        # Each is traced.
        upper_bound=100,
    )
    rand_augment_factor: float = setting(
        0.5,
        "How strong the operations of RandAugment are.",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    mixup: float = setting(0.0, "Alpha of mixup; 0 for none.", lower_bound=0.0)

    def image_function(self, size):
        """Returns a function that augments an image, given a seed.

        Args:
            size: Tuple `(height, width)` of the augmented image.

        Returns:
            Function of two integers, the seed, and a tensor `(height, width,
            channels)` of numbers in [0, 255], of any size with the crop
            `"inception"`, else of `size`. It returns a tensor `float32` in
            [0, 255].

        Raises:
            UserError: If the crop does not exist.
        """
        layers = []
        if self.crop == "pad":
            rows, columns = (max(1, length // 8) for length in size)
            layers += [
                keras.layers.ZeroPadding2D((rows, columns)),
                keras.layers.RandomCrop(*size),
            ]
        elif self.crop not in CROPS:
            raise UserError(
                f"`crop` must be one of {CROPS}. Received: crop={self.crop!r}"
            )
        if self.flip:
            layers.append(keras.layers.RandomFlip("horizontal"))
        if self.rand_augment:
            layers.append(
                keras.layers.RandAugment(
                    num_ops=self.rand_augment, factor=self.rand_augment_factor
                )
            )
        draw = _seeded(layers)

        def change(seed, index, image):
            image = tf.cast(image, tf.float32)
            if self.crop == "inception":
                image = _inception_crop(image, size, (seed, index))
            # One by one: RandomCrop and RandAugment change all images of a
            # batch in the same way.
            return draw(seed, index, image[tf.newaxis])[0]

        return change

    def batch_function(self):
        """Returns a function that mixes the images of a batch, given a seed.

        Returns:
            Function of two integers, the seed, a tensor of images and one of
            labels `(batch_size, num_classes)`. It returns images and labels.
        """
        draw = _seeded([keras.layers.MixUp(self.mixup)] if self.mixup else [])

        def mix(seed, index, images, labels):
            mixed = draw(seed, index, {"images": images, "labels": labels})
            return mixed["images"], mixed["labels"]

        return mix


define_flags(Augmentation)


def _seeded(layers):
    """Returns a function that applies layers, with generators set by a seed."""
    for layer in layers:
        layer.build((1, None, None, None))

    def apply(seed, index, x):
        for number, layer in enumerate(layers):
            generator = getattr(layer, "generator", None)
            mapping = []
            if generator is not None:
                state = tf.stack(
                    [
                        tf.cast(seed, tf.int64) * len(layers) + number,
                        tf.cast(index, tf.int64) * _DRAWS,
                    ]
                )
                dtype = generator.state.dtype
                mapping = [(generator.state, tf.cast(state, dtype))]
            # The layer's own generator state depends on earlier draws.
            with keras.StatelessScope(state_mapping=mapping):
                x = layer(x, training=True) if mapping else layer(x)
        return x

    return apply


def _inception_crop(image, size, seed):
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros((0, 0, 4)),
        seed=tf.cast(tf.stack(seed), tf.int64),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        use_image_if_no_bounding_boxes=True,
    )
    return tf.image.resize(tf.slice(image, begin, extent), size)
