"""Checkpoints on a full disk, and two programs in the same directory."""

import concurrent.futures
import contextlib
import errno
import fcntl
import io
import os
import resource
import shutil
import threading
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.tf_gpipe import checkpoint_test
from tests.tf_gpipe.checkpoint_test import DATA
from tests.tf_gpipe.checkpoint_test import EPOCHS
from tests.tf_gpipe.checkpoint_test import STEPS
from tests.tf_gpipe.checkpoint_test import Died
from tests.tf_gpipe.checkpoint_test import Dying
from tests.tf_gpipe.checkpoint_test import make
from tf_gpipe.callbacks import Checkpoint
from tf_gpipe.checkpoints import store
from tf_gpipe.checkpoints.lock import Lock
from tf_gpipe.checkpoints.writer import Writer


class LimitingFiles(keras.callbacks.Callback):
    """Limits the size of files after a step, as a full disk does."""

    def __init__(self, step, size, checkpoint):
        super().__init__()
        self.step, self.size = step, size
        self.checkpoint = checkpoint

    def on_train_batch_end(self, batch, logs=None):
        self.step -= 1
        # Waits until no checkpoint is being written.
        self.checkpoint.newest()
        if not self.step:
            limit_files(self.size)


def limit_files(size):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


class FullDiskTest(checkpoint_test.TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(limit_files, resource.RLIM_INFINITY)

    def fit_limited(self, step, size, *callbacks, epochs=EPOCHS, **how):
        """Trains, with files of at most `size` bytes after a number of steps.

        Sets `names` to the names of the checkpoints, which must all be whole.
        """
        checkpoint = Checkpoint(self.workdir, **how)
        limiting = LimitingFiles(step, size, checkpoint)
        try:
            make().fit(
                **DATA["arrays"](),
                epochs=epochs,
                verbose=0,
                callbacks=[limiting, *callbacks, checkpoint],
            )
        finally:
            limit_files(resource.RLIM_INFINITY)
            self.names = sorted(os.listdir(self.workdir))
            for name in self.names:
                store.read(self.workdir / name)

    @pytest.mark.slow
    def test_each_file(self):
        """The disk is full at the first byte, or near the end of a file."""
        self.fit(make(), DATA["arrays"], epochs=1, keep=1)
        files = (self.workdir / "epoch_00001").iterdir()
        sizes = sorted(x.stat().st_size * 9 // 10 for x in files)
        for size in (0, *sizes):
            shutil.rmtree(self.workdir)
            with self.assertRaisesRegex(
                OSError,
                f"a checkpoint of 1 epochs to {self.workdir}: File too large. "
                rf"The newest one is {self.workdir}/epoch_00000_step_000004: "
                "once that is mended, the same program goes on from there",
            ):
                self.fit_limited(STEPS, size, epochs=1, every_steps=2)
            self.assertEqual(
                self.names,
                ["epoch_00000_step_000002", "epoch_00000_step_000004"],
            )

    def test_is_told_of_at_once(self):
        """The next checkpoint may be due much later."""
        with self.assertRaisesRegex(OSError, "There is none before it"):
            self.fit_limited(1, 0, Dying(STEPS + 2))
        self.assertEmpty(self.names)

    @pytest.mark.slow
    def test_goes_on(self):
        whole = make()
        whole.fit(**DATA["arrays"](), epochs=EPOCHS, verbose=0)
        for step in (8, 3):
            with self.assertRaisesRegex(OSError, "File too large"):
                self.fit_limited(step, 900, every_steps=2)
            self.assertNotEmpty(self.names)
        model = make()
        self.fit(model, DATA["arrays"])
        self.assert_same(whole, model)

    def test_another_error_ends_training(self):
        told = io.StringIO()
        with self.assertRaises(Died), contextlib.redirect_stderr(told):
            self.fit_limited(1, 0, Dying(3), every_steps=2)
        self.assertRegex(
            told.getvalue(), "tf_gpipe: .*Cannot write a checkpoint of 0 epochs"
        )


class TwoTrainersTest(checkpoint_test.TestCase):
    @pytest.mark.slow
    def test_the_second_one_is_refused(self):
        refused = []

        class Beside(keras.callbacks.Callback):
            def on_train_batch_end(_, batch, logs=None):
                if not refused:
                    with self.assertRaises(ValueError) as caught:
                        self.fit(make(), DATA["arrays"])
                    refused.append(str(caught.exception))

        whole = make()
        whole.fit(**DATA["arrays"](), epochs=1, verbose=0)
        model = make()
        keras.utils.set_random_seed(3)
        self.fit(model, DATA["arrays"], Beside(), epochs=1)
        self.assertRegex(
            refused[0],
            rf"^Process {os.getpid()} on \S+ trains in {self.workdir} already",
        )
        self.assert_same(whole, model)
        # A run that begins after another has ended is not refused.
        self.assertNotIn(".lock", os.listdir(self.workdir))
        self.fit(model, DATA["arrays"], epochs=2)

    def test_interrupted_while_it_waits_for_a_checkpoint(self):
        """As by a second Ctrl-C: the directory stays locked till it is there.

        Two writers at once would spoil each other's files.
        """
        writing, go_on = threading.Event(), threading.Event()

        def parts():
            writing.set()
            go_on.wait()
            yield []

        writer = Writer(self.workdir, keep=1)
        writer.lock()
        writer.write(store.Position(1), parts(), {}, lambda path: None)
        writing.wait()
        with (
            mock.patch.object(
                concurrent.futures, "wait", side_effect=KeyboardInterrupt
            ),
            self.assertRaises(KeyboardInterrupt),
        ):
            writer.end()
        with self.assertRaisesRegex(ValueError, "trains in .* already"):
            Lock(self.workdir)
        go_on.set()
        writer.end()
        self.assertEqual(os.listdir(self.workdir), ["epoch_00001"])
        # The same program may train there again.
        writer.lock()
        with self.assertRaisesRegex(ValueError, "trains in .* already"):
            Lock(self.workdir)
        writer.end()
        Lock(self.workdir).release()

    @parameterized.parameters(True, False)
    @pytest.mark.slow_after(1)
    def test_deleted_meanwhile(self, other):
        """Its lock, too: another program may begin to train there."""

        class Deleting(keras.callbacks.Callback):
            def on_train_batch_end(_, batch, logs=None):
                if batch == 2 and self.workdir.exists() and not locks:
                    checkpoint.newest()
                    shutil.rmtree(self.workdir)
                    locks.append(None)
                    if other:
                        self.workdir.mkdir()
                        locks[0] = Lock(self.workdir)

        locks, told = [], io.StringIO()
        checkpoint = Checkpoint(self.workdir, every_steps=2)
        refused = self.assertRaisesRegex(ValueError, "trains in .* already")
        with (
            refused if other else contextlib.nullcontext(),
            contextlib.redirect_stderr(told),
        ):
            make().fit(
                **DATA["arrays"](),
                verbose=0,
                callbacks=[Deleting(), checkpoint],
            )
        self.assertIn(
            f"The lock of {self.workdir} has been deleted", told.getvalue()
        )
        names = (
            [".lock"] if other else ["epoch_00000_step_000004", "epoch_00001"]
        )
        self.assertEqual(sorted(os.listdir(self.workdir)), names)

    def test_without_locks(self):
        """Some network file systems have none."""
        told = io.StringIO()
        error = OSError(errno.ENOLCK, "No locks available")
        with (
            contextlib.redirect_stderr(told),
            mock.patch.object(fcntl, "flock", side_effect=error),
        ):
            self.fit(make(), DATA["arrays"], epochs=1)
        self.assertRegex(told.getvalue(), "cannot be locked: .*No locks")
        self.assertIn("epoch_00001", os.listdir(self.workdir))

    def test_that_cannot_be_written(self):
        """It ends before the first step."""
        (self.workdir / ".lock").mkdir()
        with self.assertRaisesRegex(OSError, "Cannot write to .*Is a direct"):
            self.fit(make(), DATA["arrays"], Dying(1))


if __name__ == "__main__":
    tf.test.main()
