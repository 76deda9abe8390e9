"""Losses of users under schedules that compute them by micro-batch."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.devices import KIND

L, ops = keras.layers, keras.ops

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.abs(np.random.default_rng(1).normal(size=(8, 3))).astype("float32")


def errors(y, p):
    return ops.mean((y - p) ** 2, axis=-1)


def by_the_largest(y, p):
    return errors(y, p) / ops.max(errors(y, p))


def by_the_number_of_rows(y, p):
    return errors(y, p) * ops.cast(ops.shape(p)[0], "float32")


def by_the_labels_of_all(y, p):
    return errors(y / ops.mean(y, axis=0), p)


def contrastive(y, p):
    p = ops.normalize(p, axis=-1)
    similar = ops.matmul(p, ops.transpose(p)) / 0.1
    own = ops.arange(ops.shape(p)[0])
    return keras.losses.sparse_categorical_crossentropy(
        own, similar, from_logits=True
    )


def of_the_next(y, p):
    return errors(y, ops.roll(p, 1, axis=0))


class Ranked(keras.losses.Loss):
    def call(self, y, p):
        return errors(y, p) * ops.cast(ops.argsort(p[:, 0]), "float32")


class Centred(keras.losses.MeanSquaredError):
    """Its function is Keras's, its call is not."""

    def call(self, y, p):
        return super().call(y, p - ops.mean(p, axis=0))


def focal(y, p):
    p = ops.clip(ops.softmax(p), 1e-7, 1.0)
    return -ops.sum(y * (1 - p) ** 2 * ops.log(p), axis=-1)


def by_position(y, p):
    return (y - p) ** 2


def flat(y, p):
    return ops.reshape((y - p) ** 2, (-1,))


def by_class(y, p):
    table = tf.constant([0.2, 0.5, 2.0])
    return errors(y, p) * tf.gather(table, tf.argmax(y, axis=-1))


def of_what_is_positive(y, p):
    """Raises an error for made-up labels."""
    with tf.control_dependencies([tf.debugging.assert_non_negative(y)]):
        return errors(y, tf.identity(p))


def of_few_labels(y, p):
    return tf.boolean_mask(errors(y, p), y[:, 0] > 0.5)


def errors_of_classes(y, p):
    y = ops.cast(ops.where(y == ops.clip(y, 0, 2), y, 0), "int32")
    y = ops.reshape(y, (-1,))
    return ops.sparse_categorical_crossentropy(y, p, from_logits=True)


def by_how_frequent_classes_are(y, p):
    classes = ops.one_hot(ops.cast(ops.reshape(y, (-1,)), "int32"), 3)
    frequent = ops.sum(ops.sum(classes, axis=0) * classes, axis=-1)
    return errors_of_classes(y, p) / ops.maximum(frequent, 1.0)


def by_how_frequent_of_tensorflow(y, p):
    """Raises an error for labels that are no classes."""
    y = tf.cast(tf.reshape(y, (-1,)), tf.int32)
    found = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
    frequent = tf.math.bincount(y, minlength=3, maxlength=3)
    return found / tf.cast(tf.gather(frequent, y), tf.float32)


def mean_of_valid(y, p, valid):
    valid = ops.cast(ops.reshape(valid, (-1,)), "float32")
    return errors_of_classes(y, p) * valid / ops.mean(valid)


def mean_of_some(y, p):
    return mean_of_valid(y, p, y >= 0)


def mean_of_one_hot(y, p):
    """Ignores -1, without a comparison."""
    classes = ops.one_hot(ops.cast(ops.reshape(y, (-1,)), "int32"), 3)
    return errors(classes, p) * ops.sum(classes, -1) / ops.mean(classes)


def mean_of_not_255(y, p):
    return mean_of_valid(y, p, ops.not_equal(y, 255))


def mean_of_known(y, p):
    return mean_of_valid(ops.where(ops.isnan(y), 0, y), p, ~ops.isnan(y))


def mean_of_some_in_a_branch(y, p):
    def some():
        return mean_of_valid(y, p, y != 255)

    return tf.cond(tf.size(y) > 0, some, lambda: errors_of_classes(y, p))


def mean_of_some_of_many_classes(y, p):
    """Looks for more labels than are tried."""
    valid = ops.not_equal(y, 255)
    for i in range(2, 80):
        y = ops.where(y == i, 2, y)
    return mean_of_valid(y, p, valid)


def of_classes(y, p):
    valid = ops.cast(ops.reshape(y >= 0, (-1,)), "float32")
    table = ops.convert_to_tensor([0.2, 0.5, 2.0])
    index = ops.cast(ops.reshape(ops.maximum(y, 0), (-1,)), "int32")
    return errors_of_classes(y, p) * valid * ops.take(table, index)


class Weighed(keras.losses.Loss):
    def __init__(self, weight=2.0):
        super().__init__()
        self.weight = tf.Variable(weight)

    def call(self, y, p):
        return self.weight * errors(y, p)


def model_of(pipelined, **kwargs):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), L.Dense(4), L.Dense(3)]
    if not pipelined:
        return keras.Sequential(layers)
    return tf_gpipe.PipelinedSequential(
        layers, num_stages=2, devices=[f"{KIND}:0", f"{KIND}:1"], **kwargs
    )


def trained(loss, y=Y, **kwargs):
    """Returns the losses of two steps, and the weights after them."""
    model = model_of(**kwargs)
    model.compile("sgd", loss)
    found = [model.train_on_batch(X, y) for _ in range(2)]
    return [*found, *model.get_weights()]


class LossChecksTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        by_the_largest,
        by_the_number_of_rows,
        by_the_labels_of_all,
        contrastive,
        of_the_next,
        Ranked(),
        Centred(),
    )
    def test_loss_that_compares_samples_is_refused(self, loss):
        kwargs = {"pipelined": True, "num_micro_batches": 2}
        for schedule in ("1f1b", "zero_bubble"):
            with self.assertRaisesRegex(
                ValueError, "compares samples.*schedule='gpipe'"
            ):
                trained(loss, schedule=schedule, **kwargs)
        self.assertAllClose(
            trained(loss, pipelined=False),
            trained(loss, schedule="gpipe", **kwargs),
            rtol=1e-4,
            atol=1e-5,
        )

    @parameterized.product(
        loss=(
            focal,
            by_position,
            flat,
            by_class,
            of_what_is_positive,
            of_few_labels,
            Weighed,
            lambda: keras.losses.Huber(delta=0.5),
        ),
        num_micro_batches=(2, 3),
    )
    def test_loss_of_each_sample_is_taken(self, loss, num_micro_batches):
        if isinstance(loss, type) or loss.__name__ == "<lambda>":
            loss = loss()
        self.assertAllClose(
            trained(loss, pipelined=False),
            trained(
                loss,
                pipelined=True,
                num_micro_batches=num_micro_batches,
                schedule="1f1b",
            ),
            rtol=1e-4,
            atol=1e-5,
        )

    @parameterized.parameters(
        (by_how_frequent_classes_are, 2),
        (by_how_frequent_of_tensorflow, 2),
        (mean_of_some, -1),
        (mean_of_one_hot, -1),
        (mean_of_not_255, 255),
        (mean_of_known, np.nan),
        (tf.function(mean_of_not_255), 255),
        (mean_of_some_in_a_branch, 255),
        (mean_of_some_of_many_classes, 255),
    )
    def test_loss_that_compares_classes_is_refused(self, loss, label):
        labels = np.array([0, 1, label, 1, 2, label, 0, 0])
        with self.assertRaisesRegex(ValueError, "compares samples"):
            trained(loss, labels, pipelined=True, num_micro_batches=2)

    @parameterized.parameters((-1, 1), (0, 1))
    def test_hinge_of_two_labels_is_taken(self, *two):
        """It looks for 0 in all labels of a batch, where the other is -1."""
        labels = np.resize(np.float32(two), Y.shape)

        def hinge(y, p):
            return 2.0 * keras.losses.hinge(y, p)

        self.assertAllClose(
            trained(hinge, labels, pipelined=False),
            trained(hinge, labels, pipelined=True, num_micro_batches=2),
            rtol=1e-4,
            atol=1e-5,
        )

    @parameterized.parameters(errors_of_classes, of_classes)
    def test_loss_of_each_class_is_taken(self, loss):
        labels = np.array([0, 1, -1, 1, 2, -1, 0, 0])
        self.assertAllClose(
            trained(loss, labels, pipelined=False),
            trained(loss, labels, pipelined=True, num_micro_batches=2),
            rtol=1e-4,
            atol=1e-5,
        )

    def test_loss_of_labels_for_all(self):
        """One row of labels is broadcast."""
        self.assertAllClose(
            trained(focal, Y[:1], pipelined=False),
            trained(focal, Y[:1], pipelined=True, num_micro_batches=2),
            rtol=1e-4,
            atol=1e-5,
        )


if __name__ == "__main__":
    tf.test.main()
