"""The errors for a full disk or another user's, whoever writes to it."""

import os
import pathlib
import resource
import tempfile

import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.whole_files import replacing
from trainers.command_line import UserError
from trainers.failures import as_user_errors


class FullDiskTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.workdir = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def limit_files(self):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

    def events(self):
        with tf.summary.create_file_writer(str(self.workdir)).as_default():
            for step in range(100):
                tf.summary.scalar("loss", 1.0, step)

    def saved_model(self):
        module = tf.Module()
        module.weights = tf.Variable(tf.zeros((100,)))
        tf.saved_model.save(module, str(self.workdir / "export"))

    def text(self):
        with replacing(self.workdir / "text") as path:
            path.write_text("1" * 101)

    @parameterized.parameters("events", "saved_model", "text")
    def test_limit(self, name):
        self.limit_files()
        with self.assertRaisesRegex(
            UserError,
            f"^Cannot write to {self.workdir}: .*File too large. The newest "
            "checkpoint is none",
        ):
            with as_user_errors(self.workdir):
                getattr(self, name)()

    def test_no_space(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("It needs Linux.")
        with self.assertRaisesRegex(
            UserError, "^Cannot write to .*: /dev/full; No space left on device"
        ):
            with as_user_errors(self.workdir):
                tf.io.write_file("/dev/full", "1" * 10**6)

    def test_checkpoints_that_cannot_be_listed(self):
        directory = self.workdir / "checkpoints"
        directory.mkdir()
        self.addCleanup(directory.chmod, 0o700)
        directory.chmod(0)
        if not os.geteuid():
            # The superuser may list anything.
            self.addCleanup(os.seteuid, 0)
            os.seteuid(65534)
        with self.assertRaisesRegex(
            UserError, "denied: '.*/checkpoints'. The newest .* is not known"
        ):
            with as_user_errors(self.workdir):
                list(directory.iterdir())

    @parameterized.product(
        name=["events", "saved_model", "text"],
        place=["absolute", "relative", "link"],
    )
    def test_directory_of_another_user(self, name, place):
        parent = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        parent.chmod(0o755)
        directory = self.workdir = parent / "run"
        directory.mkdir(0o555)
        if place == "relative":
            self.addCleanup(os.chdir, os.getcwd())
            os.chdir(directory.parent)
            self.workdir = pathlib.Path(directory.name)
        elif place == "link":
            self.workdir = directory.with_name("link to it")
            self.workdir.symlink_to(directory)
        if not os.geteuid():
            # The superuser may write anywhere.
            self.addCleanup(os.seteuid, 0)
            os.seteuid(65534)
        with self.assertRaisesRegex(
            UserError,
            f"^Cannot write to {self.workdir}: .*Permission denied.*The newest",
        ):
            with as_user_errors(self.workdir):
                getattr(self, name)()

    @parameterized.parameters(
        (tf.errors.ResourceExhaustedError, UserError, "out of memory"),
        (tf.errors.OutOfRangeError, tf.errors.OutOfRangeError, "ended"),
    )
    def test_other_errors(self, kind, told, message):
        with self.assertRaisesRegex(told, message):
            with as_user_errors(self.workdir):
                raise kind(None, None, "It has ended")

    def test_data_is_not_blamed_for_its_neighbour(self):
        # As TensorFlow tells of the nodes beside one that has failed.
        text = "[[{{node Log}}]]\n\t [[IteratorGetNext/_4]] [Op:__inference_f]"
        with self.assertRaises(tf.errors.InvalidArgumentError):
            with as_user_errors(self.workdir):
                raise tf.errors.InvalidArgumentError(None, None, text)


if __name__ == "__main__":
    tf.test.main()
