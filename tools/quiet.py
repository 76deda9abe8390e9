"""Imports TensorFlow without the messages that it logs at its start."""

import importlib.util
import pathlib


def import_tensorflow():
    """Imports TensorFlow quietly, as the commands of tf_gpipe do.

    To be called before tf_gpipe is imported, because tf_gpipe imports
    TensorFlow. Hence the module that hides the messages is loaded by its path.
    """
    path = pathlib.Path(__file__).parents[1] / "tf_gpipe/commands/start.py"
    spec = importlib.util.spec_from_file_location("start", path)
    start = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(start)
    start.import_tensorflow()
