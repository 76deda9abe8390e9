"""Runs each measurement in a fresh process, and keeps results in a file."""

import json
import os
import subprocess
import sys

from tf_gpipe.whole_files import replacing
from tools import child_process
from tools import command_line
from tools.benchmark import report

# Flags that do not change the result of a measurement. `only` names the case.
_NO_DIFFERENCE = ("results", "case", "ways")


def measure(args, environment=None, **options):
    """Runs the benchmark's command again in a new process, with other flags.

    Args:
        args: The parsed arguments of the command.
        environment: Dictionary of variables to add to the environment.
        **options: Flags to add or replace.

    Returns:
        The last line that the process has printed, parsed as JSON.
    """
    flags = _flags(args, options)
    ended = subprocess.run(
        [
            sys.executable,
            *("-m", "tools.benchmark", args.command, "--json"),
            *(f"--{name}={value}" for name, value in flags.items()),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=child_process.end_with_parent,
    )
    if ended.returncode < 0:
        sys.exit(f"{args.command} was ended by signal {-ended.returncode}")
    if ended.returncode:
        sys.exit(ended.returncode)  # It has said why.
    return json.loads(ended.stdout.splitlines()[-1])


def once(args, environment=None, complete=None, **options):
    """Returns what `measure` does, and keeps it in the file `args.results`.

    What is in the file is not measured again with the same flags, on the same
    machine and with the same versions: a report names one of each.

    Args:
        args: As of `measure`.
        environment: As of `measure`.
        complete: Function from a result to whether it is kept; `None` for all.
        **options: As of `measure`.
    """
    flags = _flags(args, options)
    key = " ".join(
        [
            *(
                f"--{name}={value}"
                for name, value in flags.items()
                if name not in _NO_DIFFERENCE
            ),
            json.dumps(report.machine()),
        ]
    )
    found = _kept(args.results)
    if key not in found:
        new = measure(args, environment, **options)
        if complete and not complete(new):
            return new
        # Read again: other processes may have added results meanwhile.
        found = {**_kept(args.results), key: new}
        with command_line.checking():
            os.makedirs(os.path.dirname(args.results) or ".", exist_ok=True)
            with replacing(args.results) as path:
                path.write_text(json.dumps(found, indent=1))
    return found[key]


def _flags(args, options):
    """Returns the flags of a command, some of them replaced, as a dict."""
    return {
        name: value
        for name, value in {**vars(args), **options}.items()
        if name not in ("command", "main", "json", "plot") and value is not None
    }


def _kept(path):
    """Returns the results in a file, by flags and machine."""
    if not os.path.exists(path):
        return {}
    with command_line.checking(), open(path) as file:
        try:
            return dict(json.load(file))
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                "--results must be a file that this command has written. "
                f"Received: {path}, which is damaged or something else "
                f"({error}). Delete it, to measure anew."
            ) from error


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
        help="a file of results: a case in it is not measured again with the "
        "same flags, machine and versions",
    )


def each_once(args):
    """Measures the cases that are not done yet, each in its own process.

    Args:
        args: The parsed arguments of the command.

    Returns:
        Dictionary from the names of the cases to their results.
    """
    # TensorFlow's devices are fixed once it has started.
    return {name: once(args, only=name, case=name) for name in args.case}
