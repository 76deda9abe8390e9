"""The table of KerasHub's models as pipelines.

    python -m tools.keras_hub [--json] [--models=Bert,GPT2] [--timeout=300]

A process a model, one after another. What is found is kept in a file, and not
sought again: a command that was stopped goes on where it was.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tools import child_process  # noqa: E402
from tools.command_line import positive_number  # noqa: E402
from tools.keras_hub import backbones  # noqa: E402
from tools.keras_hub import table  # noqa: E402

_FILE = pathlib.Path(__file__).parents[2] / "build" / "keras_hub.jsonl"


def models():
    """Returns the pairs of a backbone and a task; `None` if it has none.

    A first task of each backbone, then the others.
    """
    found = [
        (i, name, getattr(task, "__name__", None))
        for name in backbones.names()
        for i, task in enumerate(backbones.tasks_of(name) or [None])
    ]
    return [x[1:] for x in sorted(found, key=lambda x: min(x[0], 1))]


def found_in(path):
    """Returns what the file has, by backbone and task."""
    if not path.exists():
        return {}
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    return {(x["backbone"], x["task"]): x for x in rows}


def tried(backbone, task, timeout):
    """Returns what a process finds of a model."""
    row = {"backbone": backbone, "task": task}
    command = [sys.executable, "-m", "tools.keras_hub.trial", backbone]
    try:
        done = subprocess.run(
            command + ([task] if task else []),
            capture_output=True,
            timeout=timeout,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
    except subprocess.TimeoutExpired:
        return {**row, "errors": {"process": f"more than {timeout:g} s"}}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        what = f"exit status {done.returncode}: {' '.join(last)[:300]}"
        return {**row, "errors": {"process": what}}
    return json.loads(done.stdout.splitlines()[-1])


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
    )
    parser.add_argument(
        "--models",
        default="",
        help="beginnings of names, with commas between; all, if left out",
    )
    parser.add_argument("--timeout", type=positive_number, default=300)
    parser.add_argument("--file", type=pathlib.Path, default=_FILE)
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON a model"
    )
    args = parser.parse_args(argv)
    wanted = tuple(args.models.split(","))
    found = found_in(args.file)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for backbone, task in models():
        if not backbone.startswith(wanted):
            continue
        row = found.get((backbone, task))
        if row is None:
            row = tried(backbone, task, args.timeout)
            with args.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
    if not args.json:
        print(table.markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
