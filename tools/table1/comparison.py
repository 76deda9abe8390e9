"""Prints the table of published and planned numbers."""

import concurrent.futures
import functools
import json
import multiprocessing
import os

import rich.box
import rich.console
import rich.table

from tf_gpipe import progress
from tools import child_process
from tools.table1 import notes
from tools.table1.planned import plan_row
from tools.table1.published import FAMILIES
from tools.table1.published import text


def compare(rows, args):
    """Prints the table of published and planned numbers.

    Planning a row takes up to two minutes, so all cores plan rows in parallel.
    """
    planned = functools.partial(plan_row, args=args)
    num_processes = min(len(rows), len(os.sched_getaffinity(0)))
    if num_processes > 1:
        with concurrent.futures.ProcessPoolExecutor(
            num_processes,
            multiprocessing.get_context("spawn"),
            initializer=child_process.end_with_parent,
        ) as pool:
            found = list(
                progress.track(pool.map(planned, rows), "planning", len(rows))
            )
    else:
        found = [planned(x) for x in progress.track(rows, "planning")]
    console = rich.console.Console(width=100, highlight=False)
    for model, family in FAMILIES.items():
        own = [x for x in found if x["model"] == model]
        if own:
            console.print(_table(family, own))
    lines = notes.of_plans(found)
    for line in lines:
        console.print(f"- {line}")
    if args.json:
        print(json.dumps({"rows": found, "notes": lines}))


def _table(family, found):
    table = rich.table.Table(
        title=f"{family.title} on devices of {family.device_gib} GiB, "
        f"{type(family.optimizer()).__name__}, mini-batches of "
        f"{family.batch_size}\n"
        "GiB of the fullest device, and of all; the paper's GB",
        box=rich.box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for name in ("", "bytes"):
        table.add_column(name)
    for name in (
        "param-\neters",
        "weights\na device",
        "\nall",
        "activations\na device",
        "\nall",
        "needs\na device",
        "\nfits",
        "\nlargest",
    ):
        table.add_column(name, justify="right")
    for x in found:
        paper = x["paper"]
        table.add_row(
            x["name"],
            "paper",
            _count(paper["parameters"]),
            "",
            f"{paper['parameter_gb']:.2f}",
            "",
            f"{paper['activation_gb']:.2f}",
            "",
            "yes",
            text(x["sizes"]),
        )
        activations = x["activation_bytes"]
        for name, planned in x["by_bytes"].items():
            weights = planned["parameter_bytes"]
            table.add_row(
                "",
                name,
                _count(x["parameters"]),
                *(
                    f"{size / 2**30:.2f}"
                    for size in (
                        max(weights),
                        sum(weights),
                        max(activations),
                        sum(activations),
                        planned["needs"],
                    )
                ),
                "yes" if planned["fits"] else "no",
                text(planned["largest"]) if planned["largest"] else "none",
            )
    return table


def _count(parameters):
    if parameters < 1e9:
        return f"{parameters / 1e6:.1f}M"
    return f"{parameters / 1e9:.2f}B"
