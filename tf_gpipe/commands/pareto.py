"""Step time against activation memory, for several memory limits."""

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Callable

from tf_gpipe import checks
from tf_gpipe import table
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.planning.plans import Plan
from tf_gpipe.schedule import timeline

_SHARES = [x / 20 for x in range(1, 21)]


def show(plan: Callable[..., Plan], args: argparse.Namespace) -> None:
    """Prints a table of step times and memory, and draws it with --picture.

    Args:
        plan: Function of `remat` and `memory_limit` that returns a `Plan`.
        args: The arguments of the command.

    Raises:
        ValueError: If the picture cannot be drawn or written.
    """
    if args.picture is not None:
        checks.writable("picture", args.picture)
        timeline.check_picture(args.picture)
    never, always = plan(remat="never"), plan(remat="always")
    found = {"never": never, "always": always}
    for share in _SHARES:
        with contextlib.suppress(TooLittleMemoryError):
            found[f"auto, {share:.0%}"] = plan(remat="auto", memory_limit=share)
    points = [
        _point(
            name,
            dataclasses.replace(x, device_memory=args.device_memory),
            never,
        )
        for name, x in found.items()
    ]
    rows = [
        {
            "Remat, limit": x["name"],
            "Activations MiB": f"{x['activation_bytes'] / 2**20:,.1f}",
            "of never": f"{x['share']:.2f}",
            "Step time, never = 1": f"{x['time']:.3f}",
            **(
                {"Fits": "yes" if x["fits"] else "no"}
                if args.device_memory
                else {}
            ),
        }
        for x in points
    ]
    print(table.render(rows, [], width=100, left=("Remat, limit",)), end="")
    if args.picture is not None:
        _draw(points, args.picture)
    if args.json:
        print(json.dumps({"points": points}))


def _point(name: str, found: Plan, never: Plan) -> dict:
    size = max(found.device_activation_bytes)
    whole = max(never.device_activation_bytes)
    time = never.relative_step_time
    return {
        "name": name,
        "activation_bytes": size,
        "share": size / whole if whole else 1.0,
        "time": found.relative_step_time / time if time else math.nan,
        # Without a --device_memory nothing is known to fit.
        "fits": found.fits if found.device_memory else None,
    }


def _draw(points: list[dict], path: str) -> None:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    auto = [x for x in points if x["name"].startswith("auto")]
    axes.plot(
        [x["share"] for x in auto],
        [x["time"] for x in auto],
        "o-",
        label="auto",
    )
    for x in points[:2]:
        axes.plot([x["share"]], [x["time"]], "s", label=x["name"])
    axes.set_xlabel("activations of the fullest device, never = 1")
    axes.set_ylabel("time of a step, never = 1")
    axes.legend()
    timeline.save(figure, path)
