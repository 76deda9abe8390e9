import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from trainers.augmentation import Augmentation
from trainers.command_line import UserError


class AugmentationTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.images = np.random.default_rng(0).integers(
            0, 256, (12, 16, 8, 3), dtype="uint8"
        )

    def augmented(self, augmentation, start=0, seed=3):
        change = augmentation.image_function((16, 8))
        data = tf.data.Dataset.from_tensor_slices(self.images).enumerate()
        data = data.skip(start).map(
            lambda index, image: change(seed, index, image),
            num_parallel_calls=2,
        )
        return np.stack(list(data.as_numpy_iterator()))

    def test_nothing(self):
        self.assertAllEqual(self.augmented(Augmentation()), self.images)
        mix = Augmentation().batch_function()
        self.assertAllEqual(mix(0, 0, [[1.0]], [[0.0, 1.0]])[0], [[1.0]])

    @parameterized.parameters(
        {"crop": "pad"},
        {"crop": "inception"},
        {"flip": True},
        {"rand_augment": 2},
        {"crop": "pad", "flip": True, "rand_augment": 1},
    )
    @pytest.mark.slow_after(1)
    def test_follows_from_seed_and_index(self, **kwargs):
        augmentation = Augmentation(**kwargs)
        whole = self.augmented(augmentation)
        self.assertEqual(whole.shape, self.images.shape)
        self.assertEqual(whole.dtype, np.float32)
        self.assertAllInRange(whole, 0.0, 255.0)
        self.assertNotAllClose(whole, self.images)
        # A resumed run starts somewhere else.
        self.assertAllEqual(self.augmented(augmentation, start=5), whole[5:])
        self.assertNotAllClose(self.augmented(augmentation, seed=4), whole)

    def test_flip(self):
        flipped = self.augmented(Augmentation(flip=True))
        kinds = set()
        for image, original in zip(flipped, self.images, strict=True):
            same = np.array_equal(image, original)
            self.assertTrue(same or np.array_equal(image, original[:, ::-1]))
            kinds.add(same)
        self.assertLen(kinds, 2)

    def test_pad(self):
        cropped = self.augmented(Augmentation(crop="pad"))
        padded = np.pad(self.images, ((0, 0), (2, 2), (1, 1), (0, 0)))
        found = set()
        for image, around in zip(cropped, padded, strict=True):
            found |= {
                (row, column)
                for row in range(5)
                for column in range(3)
                if np.array_equal(
                    image, around[row : row + 16, column : column + 8]
                )
            }
        self.assertGreater(len(found), 4)

    def test_mixup(self):
        mix = Augmentation(mixup=1.0).batch_function()
        x = self.images.astype("float32")
        y = np.eye(12, dtype="float32")
        mixed_x, mixed_y = mix(1, 2, x, y)
        # The labels tell which images are in an image, and how much of them.
        self.assertAllClose(np.sum(mixed_y, axis=1), np.ones(12))
        self.assertNotAllClose(mixed_y, y)
        self.assertAllClose(
            mixed_x, np.einsum("ij,jhwc->ihwc", mixed_y, x), atol=1e-2
        )
        self.assertAllEqual(mix(1, 2, x, y)[0], mixed_x)
        self.assertNotAllClose(mix(1, 3, x, y)[0], mixed_x)

    def test_unknown_crop(self):
        with self.assertRaisesRegex(UserError, "Received: crop='centre'"):
            Augmentation(crop="centre").image_function((8, 8))
