"""Measures in a process of its own, which nothing has run in before."""

import json
import os
import subprocess
import sys

from tools import child_process
from tools import command_line


def measure(args, environment=None, **options):
    """Runs a command of the benchmark again, with more options.

    Args:
        args: What the command was called with.
        environment: Dictionary of what is added to the process's environment.
        **options: What else it is called with.

    Returns:
        What that process printed on its last line, read as JSON.
    """
    options = {**vars(args), **options}
    flags = [
        f"--{name}={value}"
        for name, value in options.items()
        if name not in ("command", "main", "json", "plot") and value is not None
    ]
    output = subprocess.run(
        [sys.executable, "-m", "tools.benchmark", args.command, *flags],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=child_process.end_with_parent,
    ).stdout
    return json.loads(output.splitlines()[-1])


def add_arguments(parser, cases, results):
    """Adds the flags of a command that measures each case once.

    Args:
        parser: `ArgumentParser`.
        cases: Dictionary or list of the names of the cases.
        results: Path of a file for what has been found.
    """
    parser.add_argument(
        "--case",
        type=command_line.choices(list(cases)),
        default=",".join(cases),
        help="which cases",
    )
    parser.add_argument(
        "--only",
        choices=list(cases),
        help="print what one case has found, as JSON, and no more",
    )
    parser.add_argument(
        "--results",
        metavar="PATH",
        default=results,
        help="a file of cases that are done, which are not measured again",
    )


def each_once(args):
    """Measures the cases that are not done yet, a process each.

    Args:
        args: What the command was called with.

    Returns:
        Dictionary from the cases to what their processes have printed.
    """
    kept = Kept(args.results)
    return {
        # TensorFlow's devices are fixed once it has started.
        name: kept.once(
            name, lambda name=name: measure(args, only=name, case=name)
        )
        for name in args.case
    }


class Kept:
    """What has been found, in a file, so that it is not sought again.

    Args:
        path: Of the file.
    """

    def __init__(self, path):
        self._path = path

    def once(self, name, find):
        """Returns what was found by a name, or what `find` returns now."""
        found = self._all()
        if name not in found:
            new = find()
            # With what other processes have found meanwhile.
            found = {**self._all(), name: new}
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            with open(self._path, "w") as file:
                json.dump(found, file, indent=1)
        return found[name]

    def _all(self):
        if not os.path.exists(self._path):
            return {}
        with open(self._path) as file:
            return json.load(file)
