"""Draws the pictures of README and the documentation.

    python -m tools.pictures              # all
    python -m tools.pictures readme schedules

`readme` and `measured` are measured anew each time; the others are simulated,
and always the same.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

from tf_gpipe import progress
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import simulate

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"


def draw_readme(path):
    """Runs the example of README, and draws one of its steps."""
    text = (ROOT / "README.md").read_text()
    code = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.M)[1]
    code = code.replace("chart=True", f"picture={os.fspath(path)!r}")
    code = re.sub(r"(?m)^model\.export.*$", "", code)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def draw_measured(path):
    """Draws a measured step of two stages, on two worker processes."""
    _timeline("--model=resnet_small --batch_size=512 --workers", 2, path)


def draw_simulated(path):
    _timeline("--num_micro_batches=8", 4, path)


def _timeline(flags, num_stages, path):
    command = [sys.executable, "-m", "tf_gpipe", "timeline", *flags.split()]
    command += [f"--num_stages={num_stages}", f"--picture={path}"]
    subprocess.run(command, cwd=ROOT, check=True)


def draw_schedules(path):
    """Draws schedules with one stage per device and equal stages."""
    named = ("gpipe", "1f1b", "eager_1f1b", "zero_bubble")
    timeline.picture(
        {
            name: simulate(schedules.get(name, 4, 8), remat="never")
            for name in named
        },
        path,
    )


def draw_several(path):
    """Draws schedules with two stages per device, each half as long."""
    named = ("interleaved", "zb_v", "v_half", "v_min")
    timeline.picture(
        {
            name: simulate(
                schedules.get(name, 8, 4, 4),
                forward=0.5,
                backward=1.0,
                remat="never",
            )
            for name in named
        },
        path,
    )


def draw_recompute(path):
    """Draws GPipe with and without remat, some of it within the bubble."""
    steps = {}
    for remat in ("never", "always"):
        schedule = schedules.get("gpipe", 4, 4)
        steps[f"gpipe, remat {remat}"] = simulate(
            schedule, recompute=1.0, remat=remat
        )
    timeline.picture(steps, path)


SIMULATED = {
    "simulated": draw_simulated,
    "schedules": draw_schedules,
    "several": draw_several,
    "recompute": draw_recompute,
}
PICTURES = {"readme": draw_readme, "measured": draw_measured, **SIMULATED}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in PICTURES:
            parser.error(
                f"unknown picture: {name!r} (choose from {', '.join(PICTURES)})"
            )
    with progress.shown():
        for name in progress.track(args.names or [*PICTURES], "drawing"):
            path = FOLDER / f"{name}.png"
            PICTURES[name](path)
            progress.say(str(path.relative_to(ROOT)))


if __name__ == "__main__":
    main()
