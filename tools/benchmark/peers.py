"""`peers`: this library beside others, one compute thread a stage."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

from tools import child_process
from tools import command_line
from tools.benchmark import fresh
from tools.benchmark import timed_runs
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report
from tools.peers import program

_ROOT = pathlib.Path(__file__).parents[2]
_REMATS = ("never", "always")
# The values with --all. Else the first, unless a flag gives one.
_GRID = {
    "workload": program.WORKLOADS,
    "remat": _REMATS,
    "num_micro_batches": (8, 16),
}
_US = "tf_gpipe"


@dataclasses.dataclass(frozen=True)
class _Peer:
    """A library.

    Attributes:
        module: String, its program in `tools.peers`.
        needs: String, the package that must be there to run it.
        schedules: What its pipelines are called.
        remats: The remat modes that it has.
    """

    module: str
    needs: str
    schedules: tuple[str, ...] = ()
    remats: tuple[str, ...] = _REMATS


_PEERS = {
    _US: _Peer(
        "pipelined",
        "tensorflow",
        ("1f1b", "eager_1f1b", "zero_bubble", "eager_zero_bubble"),
    ),
    "Keras fit": _Peer("keras_fit", "tensorflow"),
    "PyTorch": _Peer("torch_pipelining", "torch", ("gpipe", "1f1b")),
    "torchgpipe": _Peer("torchgpipe_pipeline", "torchgpipe", ("gpipe",)),
    "Lingvo": _Peer("lingvo_gpipe", "lingvo", ("gpipe",), ("always",)),
}


def _first(name):
    return f"{_GRID[name][0]} if not given, or with --all each"


def add_arguments(parser):
    parser.add_argument(
        "--all",
        action="store_true",
        help="both workloads, M=8 and 16, both remat modes, or those given: "
        "one row each, the best schedule of this library beside the best "
        "other pipeline",
    )
    parser.add_argument(
        "--results",
        metavar="PATH",
        help="with --all: a file of results, build/peers.json if not given: a "
        "row in it for which all libraries were there is not measured again "
        "with the same flags, machine and versions of TensorFlow and Keras",
    )
    parser.add_argument(
        "--workload", choices=program.WORKLOADS, help=_first("workload")
    )
    parser.add_argument(
        "--num_micro_batches",
        type=command_line.positive,
        help=_first("num_micro_batches"),
    )
    parser.add_argument("--remat", choices=_REMATS, help=_first("remat"))
    parser.add_argument("--batch_size", type=command_line.positive, default=64)
    parser.add_argument("--num_steps", type=command_line.positive, default=2)
    parser.add_argument("--num_repeats", type=command_line.positive, default=5)
    parser.add_argument(
        "--torch",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter of an environment with PyTorch: python3.11 -m venv "
        "torch && torch/bin/pip install torch==2.13.0 torchgpipe==0.0.7 numpy",
    )
    parser.add_argument(
        "--lingvo",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter of an environment with Lingvo: python3.11 -m venv "
        "lingvo && lingvo/bin/pip install lingvo==0.14.2 tensorflow==2.21.0",
    )


def main(args):
    """Two stages with this library, and with others that are installed.

    The same layers, initial weights and data for all; each against its own
    training on one core without micro-batches. Losses must agree.

    The ideal is K M / (M + K - 1), times 3/4 where all is recomputed, as the
    paper does; a pipeline that recomputes less may exceed it.
    """
    if len(os.sched_getaffinity(0)) < 2:
        raise argparse.ArgumentError(None, "two CPU cores are needed")
    grid = {
        name: values if getattr(args, name) is None else (getattr(args, name),)
        for name, values in _GRID.items()
    }
    cells = [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]
    for cell in cells:
        workloads.check_rows(args.batch_size, cell["num_micro_batches"])
    if args.all:
        args.results = args.results or "build/peers.json"
        return _each_cell(args, cells)
    if args.results:
        raise argparse.ArgumentError(None, "--results is for --all")
    vars(args).update(cells[0])
    return _one_cell(args)


def _each_cell(args, cells):
    """Measures some workloads, numbers of micro-batches and remat modes."""
    # A process each: a program that has trained is slower than a new one.
    found = [
        {
            **cell,
            **fresh.once(
                args,
                complete=lambda result: not result["absent"],
                all=None,
                results=None,
                **cell,
            ),
        }
        for cell in cells
    ]
    rows = [
        {**cell, **each["best"]}
        for cell, each in zip(cells, found, strict=True)
    ]
    return Report(
        f"K=2, batches of {args.batch_size}: the best schedule of tf_gpipe, "
        "and the best pipeline of another library",
        [
            {
                "": row["workload"],
                "remat": row["remat"],
                "M": str(row["num_micro_batches"]),
                "schedule": row["schedule"],
                "other": row["other"] or "",
                "samples/s": row["samples_per_second"],
                "other's": row["other_samples_per_second"] or "",
                "ratio": row["ratio"] or "",
                "of the ideal": row["fraction"],
                "other's share": row["other_fraction"] or "",
            }
            for row in rows
        ],
        {"rows": rows, "cells": found},
        "samples/s",
    )


def _one_cell(args):
    """Measures a workload, a number of micro-batches and a remat mode."""
    programs, missing = _programs(args)
    with contextlib.ExitStack() as stack:
        # One after another: they would slow each other's set-up.
        running = {}
        for key, (command, environment) in programs.items():
            print(f"Starting {' '.join(key)}", file=sys.stderr)
            running[key] = stack.enter_context(_running(command, environment))
        _check_losses(running)
        measures = list(running)
        for turn in range(args.num_repeats):
            # No program always follows the same one.
            random.Random(turn).shuffle(measures)
            for key in measures:
                running[key].measure(args.num_steps)
    ideal = timed_runs.ideal_speedup(2, args.num_micro_batches, args.remat)
    rows = []
    for (name, schedule), each in running.items():
        speedup = timing.median_ratio(running[name, ""].seconds, each.seconds)
        rows.append(
            {
                "library": name,
                "schedule": schedule or "one core",
                "samples_per_second": args.batch_size
                / statistics.median(each.seconds),
                "speedup": speedup,
                "fraction": speedup / ideal if schedule else None,
                "setup_seconds": each.ready["setup_seconds"],
                "versions": each.ready["versions"],
            }
        )
    seconds = {key: each.seconds for key, each in running.items()}
    return Report(
        f"{args.workload}: K=2, M={args.num_micro_batches}, remat {args.remat},"
        f" batch of {args.batch_size}; of an ideal speed-up {ideal:.2f}",
        [
            {
                "library": row["library"],
                "": row["schedule"],
                "samples/s": row["samples_per_second"],
                "speed-up": row["speedup"],
                "of the ideal": row["fraction"] or "",
                "set-up s": row["setup_seconds"],
            }
            for row in rows
        ],
        {
            "ideal": ideal,
            "rows": rows,
            "best": _best(rows, seconds),
            "missing": missing,
            # Libraries that can be installed.
            "absent": [x for x in missing if args.remat in _PEERS[x].remats],
        },
        "samples/s",
        [f"Not measured: {name}, {why}" for name, why in missing.items()],
    )


def _best(rows, seconds):
    """Returns this library's fastest pipeline beside the others' best.

    Args:
        rows: List of dicts, a row of the table each.
        seconds: Dict from library and schedule to the seconds of a step, a
            number a turn.

    Returns:
        Dict. `"ratio"` is the median over the turns of how many samples a
        second this library trains to those of the fastest other pipeline,
        `"fraction_ratio"` the ratio of the shares of the ideal, where the other
        is the pipeline of the largest share; both are `None` where there is no
        other.
    """
    ours, others = [], []
    for row in rows:
        if row["fraction"] is not None:
            (ours if row["library"] == _US else others).append(row)

    def best(of, measure):
        return max(of, key=lambda row: row[measure], default=None)

    mine = best(ours, "samples_per_second")
    found = {
        "schedule": mine["schedule"],
        "samples_per_second": mine["samples_per_second"],
        "fraction": max(row["fraction"] for row in ours),
        "other": None,
        "other_samples_per_second": None,
        "other_fraction": None,
        "ratio": None,
        "fraction_ratio": None,
    }
    fastest = best(others, "samples_per_second")
    if fastest:
        fraction = best(others, "fraction")["fraction"]
        found |= {
            "other": f"{fastest['library']}, {fastest['schedule']}",
            "other_samples_per_second": fastest["samples_per_second"],
            "other_fraction": fraction,
            "ratio": timing.median_ratio(
                seconds[fastest["library"], fastest["schedule"]],
                seconds[_US, mine["schedule"]],
            ),
            "fraction_ratio": found["fraction"] / fraction,
        }
    return found


def _programs(args):
    """Returns how to run each program, and why others cannot be run.

    Returns:
        Dict from library and schedule (`""` for one core) to a command and
        what its environment has more than ours; and a dict from library to a
        text.
    """
    found, missing = {}, {}
    for name, peer in _PEERS.items():
        if args.remat not in peer.remats:
            missing[name] = f"it has no remat {args.remat}"
            continue
        python = {"lingvo": args.lingvo, "tensorflow": sys.executable}.get(
            peer.needs, args.torch
        )
        look = "import importlib.util, sys; "
        look += f"sys.exit(importlib.util.find_spec({peer.needs!r}) is None)"
        with command_line.checking():
            looked = subprocess.run([python, "-c", look])
        if looked.returncode:
            missing[name] = f"{python} has no package {peer.needs}"
            continue
        command = [python, "-m", f"tools.peers.{peer.module}"]
        command += [
            f"--workload={args.workload}",
            f"--batch_size={args.batch_size}",
        ]
        environment = {}
        if peer.needs.startswith("torch"):
            # Before PyTorch is imported.
            environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        found[name, ""] = command, environment
        for schedule in peer.schedules:
            flags = [
                "--num_stages=2",
                f"--num_micro_batches={args.num_micro_batches}",
                f"--schedule={schedule}",
                f"--remat={args.remat}",
            ]
            found[name, schedule] = command + flags, environment
    return found, missing


class _Program:
    """A program that runs.

    Attributes:
        ready: Dict of what it said at first.
        seconds: List of the seconds of a step, a number a measurement.
    """

    def __init__(self, process):
        self._process = process
        self.ready = self._answer()
        self.seconds = []

    def measure(self, num_steps):
        print(num_steps, file=self._process.stdin, flush=True)
        self.seconds.append(self._answer()["seconds"])

    def _answer(self):
        for line in self._process.stdout:
            # Libraries print what they like.
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(
            f"A program has failed: {' '.join(self._process.args)}"
        )


@contextlib.contextmanager
def _running(command, environment):
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=child_process.end_with_parent,
    ) as process:
        try:
            yield _Program(process)
            # The end of its input ends it, and the processes it started.
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
        finally:
            process.kill()


def _check_losses(running):
    """Checks that all train the same model."""
    expected = {}
    for (name, schedule), each in running.items():
        found = each.ready["losses"]
        # Statistics are those of a micro-batch, so that pipelines differ from
        # training without micro-batches.
        first = expected.setdefault(bool(schedule), found)
        for a, b in zip(found, first, strict=True):
            if abs(a - b) > 1e-3 * abs(b):
                raise RuntimeError(
                    f"{name} {schedule} trains another model, by the losses "
                    f"of its first steps: {found} instead of {first}"
                )
