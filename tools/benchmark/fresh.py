"""Runs each measurement in a fresh process, and keeps results in a file."""

import json
import os
import subprocess
import sys

from tools import child_process
from tools import command_line


def measure(args, environment=None, **options):
    """Runs the benchmark's command again in a new process, with other flags.

    Args:
        args: The parsed arguments of the command.
        environment: Dictionary of variables to add to the environment.
        **options: Flags to add or replace.

    Returns:
        The last line that the process has printed, parsed as JSON.
    """
    options = {**vars(args), **options}
    flags = [
        f"--{name}={value}"
        for name, value in options.items()
        if name not in ("command", "main", "json", "plot") and value is not None
    ]
    output = subprocess.run(
        [
            sys.executable,
            *("-m", "tools.benchmark", args.command, "--json"),
            *flags,
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=child_process.end_with_parent,
    ).stdout
    return json.loads(output.splitlines()[-1])


def add_arguments(parser, cases, results):
    """Adds the flags of a command that measures each of its cases once.

    Args:
        parser: `ArgumentParser`.
        cases: Dictionary or list of the names of the cases.
        results: Path, the default of `--results`.
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
    """Measures the cases that are not done yet, each in its own process.

    Args:
        args: The parsed arguments of the command.

    Returns:
        Dictionary from the names of the cases to their results.
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
    """A JSON file of results, so that no measurement is repeated.

    Args:
        path: Path of the file.
    """

    def __init__(self, path):
        self._path = path

    def once(self, name, find):
        """Returns the result kept for a name; calls `find` if there is none."""
        found = self._all()
        if name not in found:
            new = find()
            # Read again: other processes may have added results meanwhile.
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
