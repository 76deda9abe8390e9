"""All arguments that are paths take a string or an `os.PathLike` of one."""

import contextlib
import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe

CALLS = {
    "trace": lambda x: tf_gpipe.callbacks.Timeline(trace=x),
    "picture": lambda x: tf_gpipe.callbacks.Timeline(picture=x),
    "html": lambda x: tf_gpipe.callbacks.Timeline(html=x),
    "timeline's log_dir": lambda x: tf_gpipe.callbacks.Timeline(log_dir=x),
    "profile's log_dir": lambda x: tf_gpipe.callbacks.Timeline().name_tasks(x),
    "workdir": lambda x: tf_gpipe.callbacks.Checkpoint(x),
    "load's path": lambda x: tf_gpipe.Plan.load(x),
}


class OfBytes:
    def __fspath__(self):
        return b"x"


class PathsTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        directory = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(contextlib.chdir(directory))

    @parameterized.product(
        name=[*CALLS],
        path=(
            *(1, True, 4294967296, -(2**70), 0.5, float("-inf"), 1j),
            *(b"x", bytearray(b"x"), OfBytes(), [], ["x"], {"x"}, len),
            *(np.int64(1), np.array("x"), np.array(["x", "y"]), object),
            *("", "x\0y", pathlib.PurePath("x\0")),
            *("gs://a/b", "S3://a", pathlib.PurePath("gs://a"), "file:///a"),
        ),
    )
    def test_what_is_no_path(self, name, path):
        argument = name.split()[-1]
        with self.assertRaisesRegex(
            (TypeError, ValueError), f"`{argument}` must be the path of a"
        ) as raised:
            CALLS[name](path)
        strings = (str, os.PathLike)
        if not isinstance(path, strings) or isinstance(path, OfBytes):
            self.assertIsInstance(raised.exception, TypeError)
        self.assertEmpty(os.listdir())

    @parameterized.parameters("trace.json", "picture.png", "html.html")
    def test_paths(self, name):
        for path in (name, pathlib.PurePath(name)):
            CALLS[name.partition(".")[0]](path)
        self.assertEmpty(os.listdir())


if __name__ == "__main__":
    tf.test.main()
