"""Compares training from scratch on few images with fine-tuning.

    python -m tools.transfer --init_from=/tmp/fashion_mnist

runs trainers.image_classification with trainers/recipes/digits_100.cfg several
times, from scratch and from the weights of an earlier run on other images. It
prints mean, lowest and highest test accuracy: Table 4 of the GPipe paper on a
small scale.
"""

import argparse
import itertools
import json
import pathlib
import re
import statistics
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from tf_gpipe import progress
from tools import child_process
from tools.command_line import positive

_ROOT = pathlib.Path(__file__).parents[1]


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--init_from",
        required=True,
        help="working directory or checkpoint of the earlier run",
    )
    parser.add_argument(
        "--recipe",
        default=str(_ROOT / "trainers/recipes/digits_100.cfg"),
        help="flags of the runs (default: digits_100.cfg)",
    )
    parser.add_argument(
        "--num_seeds",
        type=positive,
        default=3,
        help="runs of each kind, with seeds 0, 1, ... (default: 3)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    args = parser.parse_args(argv)
    found = {"from scratch": [], "fine-tuned": []}
    of_kinds = {
        "from scratch": [],
        "fine-tuned": [f"--init_from={args.init_from}"],
    }
    runs = [*itertools.product(range(args.num_seeds), of_kinds)]
    with progress.shown(not args.json):
        for seed, kind in progress.track(runs, "training"):
            flags = [f"--flagfile={args.recipe}", f"--seed={seed}"]
            found[kind].append(_accuracy(flags + of_kinds[kind]))
            progress.say(f"{kind}, seed {seed}: {found[kind][-1]:.4f}")
    table = Table("", "test accuracy", "lowest", "highest")
    for kind, values in found.items():
        numbers = (statistics.mean(values), min(values), max(values))
        table.add_row(kind, *(f"{x:.4f}" for x in numbers))
    Console().print(table)
    if args.json:
        print(json.dumps(found))


def _accuracy(flags):
    command = [sys.executable, "-m", "trainers.image_classification"]
    result = subprocess.run(
        [*command, *flags, "--verbose=0"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        preexec_fn=child_process.end_with_parent,
    )
    if result.returncode:
        sys.exit(result.stderr.strip().splitlines()[-1])
    return float(re.findall(r"test accuracy: ([\d.]+)", result.stdout)[-1])


if __name__ == "__main__":
    main()
