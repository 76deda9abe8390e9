"""Pictures of steps, written as images for TensorBoard."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Execution

# TensorBoard's name of the run, beside Keras's `train` and `validation`.
_RUN = "timeline"


class Images:
    """Writes pictures of steps into a directory of TensorBoard logs.

    Args:
        log_dir: Path of the directory, which is created if missing.

    Raises:
        ImportError: If TensorBoard or matplotlib is not installed.
        TypeError, ValueError: If `log_dir` is no path of a directory.
    """

    def __init__(self, log_dir: str):
        timeline.check_picture(f"{_RUN}.png")
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "Logs for TensorBoard need it. Install it with "
                "`pip install tensorboard`."
            )
        self._folder = os.path.join(
            checks.path("log_dir", log_dir, "a directory"), _RUN
        )
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise ValueError(
                "`log_dir` must be the path of a directory, which is made if "
                f"it is not there. Received: log_dir={log_dir!r} ({error})"
            ) from error
        self._writer: Any = None

    def write(self, steps: Mapping[str, Execution], epoch: int) -> None:
        """Writes one picture of several steps for an epoch.

        Args:
            steps: Dict from titles to `Execution`s.
            epoch: Integer.
        """
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._folder)
        image = tf.io.decode_png(timeline.png(steps), channels=3)
        with self._writer.as_default(step=epoch):
            tf.summary.image("timeline", image[tf.newaxis])
        self._writer.flush()
