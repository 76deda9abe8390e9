"""Measures in a process of its own, which nothing has run in before."""

import json
import subprocess
import sys

from tools import child_process


def measure(args, **options):
    """Runs a command of the benchmark again, with more options.

    Args:
        args: What the command was called with.
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
        preexec_fn=child_process.end_with_parent,
    ).stdout
    return json.loads(output.splitlines()[-1])
