"""Kills workers, or the trainer, of a training run at random moments.

    python -m tools.chaos --kills=20 --seed=0 --json

trains a small ResNet on digits, in two stages on two worker processes, with the
command below: once without faults, and once with SIGKILLs.

    python -m tf_gpipe workers --restart 2 \\
        python -m trainers.image_classification --restarts=N \\
        --checkpoint_every_steps=N --workdir=DIR

Prints whether weights, optimizer state and losses of both runs are equal, bit
by bit, and how many seconds a kill costs. About a third of the kills follow
another one within ten seconds, mostly before the run has recovered: the time
lost to a series of kills is divided by their number. The time lost to a single
kill is split into parts: until the loss is noticed (detection), until the
program trains again (start), until its first step is done (tracing), and until
it is back at the step at which the process was killed (steps). Needs Linux.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from tf_gpipe import progress
from tf_gpipe.checkpoints import model_variables
from tf_gpipe.checkpoints import store
from tf_gpipe.commands.flags import positive
from tools import child_process

_ROOT = pathlib.Path(__file__).parents[1]
_LOOK_SECONDS = 0.02
# Longest pause before a kill, after the previous kill or the run's recovery.
_MOST_SECONDS = 10.0
_SHARE_WHILE_RECOVERING = 1 / 3
_EPOCHS_OF_A_KILL = 6
_PARTS = ("detection", "start", "tracing", "steps")
_VICTIMS = {
    "worker": ("tf_gpipe", "worker"),
    "trainer": ("trainers.image_classification",),
}


class Run:
    """A training run on two workers, which restarts itself after a fault.

    Args:
        workdir: Path of the run's directory.
        num_epochs: Integer.
        every_steps: Integer, steps between two checkpoints.
        restarts: Integer, how often the trainer may be restarted.
    """

    def __init__(self, workdir, num_epochs, every_steps, restarts):
        self._losses = workdir / "losses.csv"
        self.lines = []
        # The current recovery: when training began again, how many steps were
        # done when last polled, and when the first new step was done.
        self.at = None
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tf_gpipe", "workers", "--restart"),
                "2",
                *(sys.executable, "-m", "trainers.image_classification"),
                f"--num_epochs={num_epochs}",
                f"--checkpoint_every_steps={every_steps}",
                f"--workdir={workdir}",
                f"--restarts={restarts}",
                # So that some kills come during evaluation.
                *("--validate_every=2", "--verbose=0"),
            ],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            preexec_fn=child_process.end_with_parent,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def time_of(self, text, after):
        """Returns when `text` was first printed after `after`, or `None`."""
        times = (t for t, line in list(self.lines) if text in line)
        return next((t for t in times if t > after), None)

    def steps(self):
        """Returns the number of steps in the file of losses."""
        try:
            return self._losses.read_text().count("\n") - 1
        except OSError:
            return 0

    def is_running(self):
        return self.process.poll() is None

    def wait(self, until, seconds=600.0):
        """Waits until `until()` is true, and returns its value.

        Returns `None` if the run ends first.
        """
        end = time.monotonic() + seconds
        while self.is_running():
            found = until()
            if found:
                return found
            if time.monotonic() > end:
                raise TimeoutError(f"{seconds} seconds:\n{self.text()}")
            time.sleep(_LOOK_SECONDS)
        return None

    def text(self):
        return "".join(line for _, line in self.lines)

    def victims(self, kind):
        """Returns the ids of the processes of a kind: worker or trainer."""
        found = _children(self.process.pid)
        if kind == "trainer":
            # The trainer is a child of the process that restarts it.
            found = [x for parent in found for x in _children(parent)]
        return [
            x for x in found if all(y in _command(x) for y in _VICTIMS[kind])
        ]


def _children(pid):
    found = []
    with contextlib.suppress(OSError):
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _command(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def kill(run, kind, numbers):
    """Kills a random process of a kind, and returns when.

    Returns `None` if the run has ended.
    """
    pids = run.wait(lambda: run.victims(kind))
    if not pids:
        return None
    when = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(numbers.choice(pids), signal.SIGKILL)
    return when


def losses_of_kills(run, kinds, kills, numbers):
    """Kills processes at random moments, and measures each recovery.

    Returns:
        List of dictionaries, one for each series of kills without a recovery
        between them: the kind of process killed first, the number of kills,
        the seconds lost, and, for a single kill, the seconds of each part.
    """
    series = []
    left = kills
    while left and run.is_running():
        run.wait(lambda: run.steps() > 0)
        time.sleep(numbers.uniform(0.1, _MOST_SECONDS))
        before = run.steps()
        kind = numbers.choice(kinds)
        first = last = kill(run, kind, numbers)
        if first is None:
            break
        left -= 1
        count = 1
        while left and numbers.random() < _SHARE_WHILE_RECOVERING:
            time.sleep(numbers.uniform(0.1, _MOST_SECONDS))
            again = kill(run, numbers.choice(kinds), numbers)
            if again is None:
                break
            last = again
            left, count = left - 1, count + 1
        end = run.wait(functools.partial(_recovered, run, last, before))
        if end is None:
            break
        lost = {"kind": kind, "kills": count, "seconds": end["steps"] - first}
        if count == 1:
            ends = [first, *(end[x] for x in _PARTS)]
            for name, a, b in zip(_PARTS, ends[:-1], ends[1:], strict=True):
                lost[name] = b - a
        series.append(lost)
    return series


def _recovered(run, last, before):
    """Returns when each part of a recovery ended, `None` if it has not yet."""
    began = run.time_of("Training 2 stages", last)
    if began is None:
        return None
    noticed = run.time_of("It starts again", last) or began
    now = run.steps()
    if run.at is None or run.at[0] != began:
        run.at = [began, now, None]
    # A restart first drops the losses of the steps after its checkpoint, so
    # that the count falls before it grows.
    if run.at[2] is None and now > run.at[1]:
        run.at[2] = time.monotonic()
    run.at[1] = now
    first = run.at[2]
    if first is None or now < before:
        return None
    return {
        "detection": noticed,
        "start": began,
        "tracing": first,
        "steps": time.monotonic(),
    }


def bits(workdir):
    """Returns the bytes of a run's newest checkpoint and losses, by name."""
    saved = store.read(store.Store(workdir / "checkpoints").newest())
    found = {
        f"{array.kind} {array.number}": saved.value(i).tobytes()
        for i, array in enumerate(saved.arrays)
        if array.kind in model_variables.MODEL
    }
    return {
        "path": saved.path.name,
        "losses": (workdir / "losses.csv").read_bytes(),
        **found,
    }


def chaos(kinds, kills, seed, num_epochs, every_steps, directory):
    """Trains without and with faults, and returns the comparison as a dict."""
    workdirs = [directory / "without", directory / "with"]
    for workdir in workdirs:
        workdir.mkdir()
    start = time.monotonic()
    whole = Run(workdirs[0], num_epochs, every_steps, restarts=0)
    with progress.doing("training without faults"):
        whole.wait(lambda: False)
    seconds = [time.monotonic() - start]
    start = time.monotonic()
    run = Run(workdirs[1], num_epochs, every_steps, restarts=10 * kills)
    with progress.doing(f"training, with {kills} kills"):
        series = losses_of_kills(run, kinds, kills, random.Random(seed))
        run.wait(lambda: False, seconds=3600)
    seconds.append(time.monotonic() - start)
    for each in (whole, run):
        if each.process.returncode:
            raise RuntimeError(each.text())
    a, b = map(bits, workdirs)
    different = [x for x in a if a[x] != b.get(x)]
    per_kill = [x["seconds"] / x["kills"] for x in series]
    alone = [x for x in series if x["kills"] == 1]
    return {
        "equal": not different and len(a) == len(b),
        "different": different,
        "arrays": len(a) - 2,
        "kills": sum(x["kills"] for x in series),
        "lost_seconds": _median(per_kill),
        "parts": {x: _median([y[x] for y in alone]) for x in _PARTS},
        "seconds_without": seconds[0],
        "seconds_with": seconds[1],
        "series": series,
    }


def _median(values):
    return round(statistics.median(values), 2) if values else None


def table(found):
    """Yields lines of text: whether the runs are equal, and a kill's cost."""
    counts = collections.Counter(x["kind"] for x in found["series"])
    yield (
        f"{found['kills']} kills in {sum(counts.values())} series "
        f"({', '.join(f'{n} of a {x}' for x, n in counts.items())}): "
        f"{found['arrays']} arrays and losses.csv "
        + ("equal, bit by bit" if found["equal"] else "DIFFER")
    )
    yield f"{'lost, a kill':12} {found['lost_seconds']} s"
    for name, value in found["parts"].items():
        yield f"  {name:10} {value} s"


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=positive, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--of",
        choices=("worker", "trainer", "both"),
        default="worker",
        help="what is killed (default: %(default)s)",
    )
    parser.add_argument(
        "--num_epochs",
        type=positive,
        help=f"of 11 steps each (default: {_EPOCHS_OF_A_KILL} * kills + 2)",
    )
    parser.add_argument("--checkpoint_every_steps", type=positive, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    kinds = [*_VICTIMS] if args.of == "both" else [args.of]
    with tempfile.TemporaryDirectory() as directory, progress.shown():
        found = chaos(
            kinds,
            args.kills,
            args.seed,
            args.num_epochs or _EPOCHS_OF_A_KILL * args.kills + 2,
            args.checkpoint_every_steps,
            pathlib.Path(directory),
        )
    print(json.dumps(found) if args.json else "\n".join(table(found)))
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
