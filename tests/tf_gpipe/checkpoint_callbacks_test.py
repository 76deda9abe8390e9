"""A callback that fails between two epochs loses no epoch that was trained."""

import copy
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import pairwise
from tests.tf_gpipe import checkpoint_test
from tests.tf_gpipe.checkpoint_test import DATA
from tests.tf_gpipe.checkpoint_test import EPOCHS
from tests.tf_gpipe.checkpoint_test import STEPS
from tests.tf_gpipe.checkpoint_test import Annealed
from tests.tf_gpipe.checkpoint_test import Annealing
from tests.tf_gpipe.checkpoint_test import Decaying
from tests.tf_gpipe.checkpoint_test import DecayingBySteps
from tests.tf_gpipe.checkpoint_test import Died
from tests.tf_gpipe.checkpoint_test import X
from tests.tf_gpipe.checkpoint_test import small
from tf_gpipe.callbacks import Checkpoint
from tf_gpipe.checkpoints.store import Position
from tf_gpipe.checkpoints.store import Store


class Failing(keras.callbacks.Callback):
    """Fails when it is called for the second time."""

    def __init__(self, method, error=Died):
        super().__init__()
        self.left = 2

        def fail(*args, **kwargs):
            self.left -= 1
            if not self.left:
                raise error

        setattr(self, method, fail)


class Stopping(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == STEPS - 1


class DecayingAtRandom(keras.callbacks.Callback):
    """Draws from the generator that NumPy's functions share."""

    def on_epoch_end(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * np.random.uniform(0.5, 0.6))


def plateau(**how):
    return keras.callbacks.ReduceLROnPlateau(
        **{"monitor": "val_loss", "min_delta": 10.0, "mode": "min", **how}
    )


def stopping():
    return keras.callbacks.EarlyStopping(
        patience=1, min_delta=10.0, restore_best_weights=True
    )


def annealed(**how):
    model = small(**how)
    model.compile(keras.optimizers.Adam(0.01), Annealed())
    return model


def averaged(**how):
    return small(keras.optimizers.SGD(0.1, use_ema=True), **how)


# A model, and callbacks that change it between epochs.
KINDS = {
    "rate as it begins": (small, Decaying()),
    "rate as it ends": (small, plateau(patience=1)),
    "rate at random": (small, DecayingAtRandom()),
    "rate as a step begins": (small, DecayingBySteps()),
    "loss": (annealed, Annealing()),
    "averages": (averaged, keras.callbacks.SwapEMAWeights(swap_on_epoch=True)),
    "averages for validation": (averaged, keras.callbacks.SwapEMAWeights()),
    "best weights": (small, stopping()),
}


def validated(name):
    return lambda: {**DATA[name](), "validation_data": (X, X)}


def without_known_end():
    """Nobody knows how many steps the first epoch has."""
    data = checkpoint_test.dataset().filter(lambda x, y: True).batch(8)
    return {"x": data, "validation_data": (X, X)}


class FailingCallbackTest(checkpoint_test.TestCase):
    def fail(self, model, data, *callbacks, error=Died):
        """Fails, and returns the positions of the checkpoints."""
        with self.assertRaises(error):
            model.fit(**data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return Store(self.workdir).positions()

    @pairwise.each(
        method=["on_epoch_end", "on_epoch_begin", "on_test_begin"],
        place=[0, 1, 2],
        kind=list(KINDS),
        data=["arrays", "PyDataset", "tf.data without end"],
    )
    @pytest.mark.slow_after(2)
    def test_between_epochs(self, method, place, kind, data):
        """Before and after others, and after `Checkpoint`."""
        make, callback = KINDS[kind]
        data = validated(data)

        def callbacks():
            return [copy.copy(callback)]

        every = [*callbacks(), Checkpoint(self.workdir)]
        every.insert(place, Failing(method))
        positions = self.fail(make(), data, *every)
        epochs = 1 if method == "on_epoch_begin" else 2
        self.assertEqual(positions[-1], Position(epochs - 1, STEPS))
        self.compare(make, data, (), callbacks)

    @parameterized.parameters(2, 5)
    @pytest.mark.slow_after(1)
    def test_several_steps_an_execution(self, count):
        def several():
            return small(steps_per_execution=count)

        data = validated("arrays")
        self.fail(
            several(), data, Failing("on_epoch_end"), Checkpoint(self.workdir)
        )
        self.compare(several, data, (), every_steps=None)

    @pairwise.product(
        kind=["rate as a step begins", "rate as it ends"],
        method=["on_epoch_end", "on_epoch_begin"],
        count=[1, 2],
    )
    @pytest.mark.slow_after(1)
    def test_where_nobody_knows_that_an_epoch_ends(self, kind, method, count):
        make, callback = KINDS[kind]

        def model():
            return make(steps_per_execution=count)

        def callbacks():
            return [copy.copy(callback)]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The data have no known end.
            self.fail(
                model(),
                without_known_end,
                *callbacks(),
                Failing(method),
                Checkpoint(self.workdir),
            )
            self.compare(
                model, without_known_end, (), callbacks, every_steps=None
            )

    @pytest.mark.slow
    def test_as_the_model_is_saved(self):
        class Saving(keras.callbacks.ModelCheckpoint):
            """Finds the disk full in the second epoch."""

            def _save_model(self, epoch, batch, logs):
                if epoch == 1:
                    raise OSError("no space left")
                super()._save_model(epoch, batch, logs)

        data = validated("arrays")
        path = f"{self.get_temp_dir()}/best.keras"
        positions = self.fail(
            small(),
            data,
            plateau(patience=1),
            Saving(path, save_best_only=True),
            Checkpoint(self.workdir),
            error=OSError,
        )
        self.assertEqual(positions, [Position(1), Position(1, STEPS)])
        self.compare(
            small,
            data,
            (),
            lambda: [
                plateau(patience=1),
                keras.callbacks.ModelCheckpoint(path, save_best_only=True),
            ],
        )

    @parameterized.parameters(KeyboardInterrupt, Died)
    @pytest.mark.slow
    def test_in_the_same_place_again(self, error):

        def callbacks():
            return [plateau(patience=1)]

        data = validated("arrays")
        for _ in range(3):
            positions = self.fail(
                small(),
                data,
                *callbacks(),
                Failing("on_epoch_begin", error),
                Checkpoint(self.workdir),
                error=error,
            )
        self.assertEqual(positions, [Position(0, STEPS)])
        self.compare(small, data, (), callbacks)

    @parameterized.parameters("on_epoch_end", "on_test_end")
    @pytest.mark.slow
    def test_after_it_was_stopped(self, method):
        """What watches metrics has seen none of this epoch."""

        def callbacks():
            return [plateau(patience=1)]

        data = validated("arrays")
        failing = Failing(method)
        failing.left = 1
        positions = self.fail(
            small(),
            data,
            failing,
            *callbacks(),
            Stopping(),
            Checkpoint(self.workdir),
        )
        self.assertEqual(positions, [Position(0, STEPS)])
        self.compare(small, data, (), callbacks)

    @pytest.mark.slow
    def test_nothing_is_written_where_nothing_fails(self):
        self.compare(small, validated("arrays"), (), every_steps=None)
        self.assertEqual(
            Store(self.workdir).positions(), [Position(2), Position(3)]
        )


if __name__ == "__main__":
    tf.test.main()
