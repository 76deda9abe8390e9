"""A command that tries models one after another, each in a process of its own.

Results, and failures too, are kept in a file, and models in it are not tried
again: a command that was stopped continues.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from tf_gpipe import progress
from tools import child_process
from tools.command_line import positive_number

BUILD = pathlib.Path(__file__).parents[1] / "build"


def command(doc, models, trial, path, markdown):
    """Returns the `main` function of a command.

    Args:
        doc: String, whose first line describes the command.
        models: Function that returns a list with a tuple for each model: the
            arguments of its trial, strings or `None` (left out). `--models`
            chooses by the first.
        trial: String, the module that tries a model, and prints its result as
            JSON on the last line.
        path: `pathlib.Path`, the default file of results.
        markdown: Function that turns the list of results into a Markdown
            table.
    """

    def main(argv=None):
        parser = argparse.ArgumentParser(description=doc.split("\n")[0])
        parser.add_argument(
            "--models",
            default="",
            help="beginnings of names, with commas between; all, if left out",
        )
        parser.add_argument(
            "--timeout",
            type=positive_number,
            default=300,
            help="seconds that a model may take (default: %(default)s). A "
            "failure is kept in --file, too: delete its line to try the model "
            "again",
        )
        parser.add_argument(
            "--file",
            type=pathlib.Path,
            default=path,
            help="results, one line a model (default: %(default)s)",
        )
        parser.add_argument(
            "--json", action="store_true", help="a line of JSON a model"
        )
        args = parser.parse_args(argv)
        wanted = tuple(args.models.split(","))
        found = found_in(args.file)
        args.file.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        chosen = [x for x in models() if x[0].startswith(wanted)]
        with progress.shown(not args.json):
            for names in progress.track(chosen, "trying"):
                row = found.get(names)
                if row is None:
                    with progress.doing(names[0]):
                        row = tried(trial, names, args.timeout)
                    row = {"names": names, **row}
                    with args.file.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                rows.append(row)
                if args.json:
                    print(json.dumps(row), flush=True)
        if not args.json:
            print(markdown(rows))
        return 0

    return main


def found_in(path):
    """Returns the results in a file, a dict whose keys are tuples of names."""
    if not path.exists():
        return {}
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    return {tuple(x["names"]): x for x in rows}


def tried(trial, names, timeout):
    """Tries a model in a process of its own, and returns its result, a dict.

    If the process fails or takes too long, the dict has only `errors`.
    """
    command = [sys.executable, "-m", trial, *(x for x in names if x)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
    except subprocess.TimeoutExpired:
        return {"errors": {"process": f"more than {timeout:g} s"}}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        what = f"exit status {done.returncode}: {' '.join(last)[:300]}"
        return {"errors": {"process": what}}
    return json.loads(done.stdout.splitlines()[-1])
