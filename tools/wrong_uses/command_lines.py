"""Command lines of the commands and trainers, with wrong flags."""

import argparse
import atexit
import contextlib
import dataclasses
import functools
import importlib
import io
import random
import shutil
import sys
import tempfile
from typing import Any
from unittest import mock

import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from tf_gpipe import __main__ as program
from tools.wrong_uses import outcome
from tools.wrong_uses import values
from trainers import command_line
from trainers import image_classification
from trainers import translation
from trainers.job import Job

# Flags that keep a run short, unless other values are drawn for them.
_SHORT: dict[str, dict[str, str]] = {
    "plan": {"model_args": "num_classes=2,input_shape=(8,8,3)"},
    "tune": {
        "model_args": "num_classes=2,input_shape=(8,8,3)",
        "budget_seconds": "0",
        "num_devices": "2",
        "batch_size": "4",
        "schedule": "1f1b",
    },
    "timeline": {},
    "verify": {"model": "tools.wrong_uses.calls:layers"},
    "worker": {"port": "0"},
    "image_classification": {
        "dataset": "digits",
        "model_args": "num_blocks=1,num_filters=2",
    },
    "translation": {"dataset": "django_messages"},
}
_TRAINERS = {
    "image_classification": functools.partial(
        command_line.run, image_classification.main
    ),
    "translation": functools.partial(
        command_line.run, translation.main, takes_arguments=True
    ),
}
# Flags of commands without `make_parser`, and whether each takes numbers.
_MORE_FLAGS = {"worker": {"port": True, "bind": False, "forget_after": True}}
# Flags that only change what is shown.
_LEFT_OUT = {"help", "json", "verbose"}


class Begins(Exception):
    """Raised where a trainer would begin to train, or a worker to serve."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line with something wrong in it.

    Attributes:
        name: String, the command or the trainer.
        argv: List of strings, its arguments.
        not_finite: Boolean, whether a flag for numbers is given one that is
            not finite.
    """

    name: str
    argv: list[str]
    not_finite: bool

    def __str__(self) -> str:
        return " ".join([self.name, *map(repr, self.argv)])


def drawn(draw: random.Random) -> Line:
    """Returns a random command line."""
    name = draw.choice(list(_SHORT))
    known = _flags(name)
    chosen = draw.sample(sorted(known), draw.choice([1, 1, 1, 2]))
    wrong = {x: draw.choice(values.OF_FLAGS) for x in chosen}
    given = {**_SHORT[name], **wrong}
    argv = [f"--{flag}={text}" for flag, text in given.items()]
    if draw.random() < 0.1:
        argv.append(draw.choice(["--nonsuch", "nonsuch", "--nonsuch=1"]))
    not_finite = any(known[x] and wrong[x] in values.NOT_FINITE for x in chosen)
    return Line(name, argv, not_finite)


def problem(line: Line) -> str | None:
    """Returns what is wrong with the end of a command line, or `None`."""
    stderr = io.StringIO()
    with (
        # A directory where files may be made under any name.
        contextlib.chdir(_directory()),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(stderr),
    ):
        status, error = outcome.end_of(lambda: _status(line))
    if isinstance(error, Begins) or (error is None and status in (0, None)):
        return "a number that is none is taken" if line.not_finite else None
    if error is not None:
        return f"a traceback: {type(error).__name__}: {str(error)[:500]}"
    # argparse prints a usage before the line with the error.
    text = status if isinstance(status, str) else stderr.getvalue()
    *_, last = text.strip().splitlines() or [""]
    if isinstance(status, str) and last != text:
        return f"several lines: {text[:1000]}"
    if line.name == "verify" and status == 1:
        return None  # The models differ, as stdout says.
    leaked = outcome.leaked(last)
    if leaked:
        return f"tells of '{leaked}': {last[:1000]}"
    return None if "rror" in last else f"no error: {text[:1000]}"


def _status(line: Line) -> Any:
    """Runs a command line in this process, and returns its exit status."""
    try:
        if line.name not in _TRAINERS:
            with mock.patch.object(tf.distribute, "Server", side_effect=Begins):
                return program.main([line.name, *line.argv])
        argv = [line.name, f"--data_dir={_directory()}", *line.argv]
        with (
            flagsaver.flagsaver(),
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(Job, "fit", side_effect=Begins),
        ):
            return _TRAINERS[line.name]()
    except SystemExit as end:
        return end.code


@functools.cache
def _directory() -> str:
    """Returns a directory for data sets, which is deleted at exit."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _flags(name: str) -> dict[str, bool]:
    """Returns the flags of a command, and whether each takes numbers."""
    if name in _MORE_FLAGS:
        return _MORE_FLAGS[name]
    if name in _TRAINERS:
        module = importlib.import_module(f"trainers.{name}")
        of_module = flags.FLAGS.get_key_flags_for_module(module)
        found = {x.name: x.flag_type() in ("int", "float") for x in of_module}
    else:
        module = importlib.import_module(f"tf_gpipe.commands.{name}")
        actions = [
            x
            for x in module.make_parser()._actions
            if x.option_strings and not isinstance(x, argparse._StoreTrueAction)
        ]
        found = {x.dest: isinstance(x.default, (int, float)) for x in actions}
    return {x: y for x, y in found.items() if x not in _LEFT_OUT}
