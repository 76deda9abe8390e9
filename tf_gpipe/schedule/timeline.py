"""Charts of the tasks of each device over time: text, Chrome trace, image.

They show a `tf_gpipe.schedule.simulate.Execution`, simulated or measured.
This module imports no TensorFlow, and matplotlib only to draw an image.
"""

import collections
import io
import os
import re
import textwrap
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_gpipe import whole_files
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import WEIGHTS

KINDS = {
    FORWARD: "forward",
    RECOMPUTE: "recompute",
    BACKWARD: "backward",
    WEIGHTS: "weights",
}
# From Okabe and Ito's palette for the colour-blind. The colours differ in
# lightness, too, and all are light enough for black digits.
COLOURS = {
    FORWARD: "#56B4E9",
    RECOMPUTE: "#F0E442",
    BACKWARD: "#D55E00",
    WEIGHTS: "#009E73",
}
SHARED_CORES = (
    "Logical CPU devices share the cores of a machine: tasks that run at the "
    "same time take longer, and the bubble is not that of real devices."
)
_DEVICE = re.compile(
    r"(?:/job:(?P<job>\w+))?(?:/replica:\d+)?(?:/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<kind>[A-Za-z_]+):(?P<index>\d+)"
)
# The fewest columns for time in a text chart, however long device names are.
_MIN_COLUMNS = 20


def text_chart(step: Execution, width: int = 80) -> str:
    """Returns a step as text: a row per device, time from left to right.

    A task's width is its duration. It begins with its kind and micro-batch
    (after its stage, if the device has several) if they fit. Dots are idle
    time. Below are the makespan, the bubble and a legend.

    Args:
        step: The `Execution`.
        width: Integer, characters per line, including the device's name. At
            least 20 are for the time.

    Example:

    >>> from tf_gpipe.schedule import schedules
    >>> from tf_gpipe.schedule.simulate import simulate
    >>> step = simulate(schedules.get("gpipe", 2, 2), backward=1)
    >>> print(text_chart(step, width=34))
    device 0  F0--F1--........B1--B0--
    device 1  ....F0--F1--B1--B0--....
    makespan 6, bubble 33.3%
    F forward, B backward,
    with the micro-batch; . idle
    """
    names = short_names(step.devices)
    margin = max(map(len, names)) + 2
    columns = max(width - margin, _MIN_COLUMNS)
    scale = columns / step.makespan if step.makespan else 0.0
    rows = [["."] * columns for _ in step.devices]
    fitting = 0
    for (device, task, start, end), label in zip(
        step.spans, labels(step), strict=True
    ):
        left = round((start - step.start) * scale)
        size = round((end - step.start) * scale) - left
        label = task.kind + label
        fitting += len(label) <= size
        if len(label) > size:
            label = task.kind[:size]
        rows[device][left : left + size] = label.ljust(size, "-")
    lines = [
        name.ljust(margin) + "".join(row)
        for name, row in zip(names, rows, strict=True)
    ]
    text = totals(step)
    if step.in_seconds:
        text += f"; a column is {_time(step, step.makespan / columns)}"
    present = {x.task.kind for x in step.spans}
    letters = ", ".join(f"{x} {KINDS[x]}" for x in KINDS if x in present)
    if fitting:
        numbers = "stage.micro-batch" if _several(step) else "the micro-batch"
        letters += f", with {numbers}"
        letters += "" if fitting == len(step.spans) else " where it fits"
    notes = [text, f"{letters}; . idle"]
    if shares_cores(step.devices):
        notes.append(SHARED_CORES)
    return "\n".join([*lines, *(_wrapped(x, margin + columns) for x in notes)])


def _wrapped(text: str, width: int) -> str:
    """Wraps a text to a width, preferably after commas and semicolons."""
    first, *phrases = re.split(r"(?<=[,;:]) ", text)
    lines = [first]
    for phrase in phrases:
        if len(lines[-1]) + 1 + len(phrase) <= width:
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return "\n".join(textwrap.fill(x, width) for x in lines)


def totals(step: Execution) -> str:
    """Returns a phrase with the makespan, its unit, and the bubble."""
    return f"makespan {_time(step, step.makespan)}, bubble {step.bubble:.1%}"


def short_names(devices: Sequence[str]) -> list[str]:
    """Returns the names of TensorFlow devices without their common parts.

    Example:

    >>> short_names(["/device:CPU:0", "/job:worker/task:1/device:GPU:0"])
    ['CPU:0', 'worker:1/GPU:0']
    >>> short_names([f"/job:worker/task:1/device:GPU:{i}" for i in (0, 1)])
    ['GPU:0', 'GPU:1']
    """
    found = [_DEVICE.fullmatch(name) for name in devices]
    hosts = {x and (x["job"], x["task"]) for x in found}
    names = []
    for name, match in zip(devices, found, strict=True):
        if match is None:
            names.append(name)
            continue
        host = f"{match['job']}:{match['task'] or 0}/" if match["job"] else ""
        here = host if len(hosts) > 1 else ""
        names.append(f"{here}{match['kind'].upper()}:{match['index']}")
    return names


def shares_cores(devices: Sequence[str]) -> bool:
    """Returns whether some devices are logical devices of the same CPU."""
    found = [_DEVICE.fullmatch(name) for name in devices]
    cpus = {
        (x["job"], x["task"], x["index"])
        for x in found
        if x and x["kind"].upper() == "CPU"
    }
    return len({x[:2] for x in cpus}) < len(cpus)


def chrome_trace(step: Execution) -> dict:
    """Returns a step in Chrome's trace event format.

    Perfetto (https://ui.perfetto.dev) and `chrome://tracing` show it, written
    to a file with `json.dump`: a thread per device, from the first start on.
    See the "Trace Event Format" (Google, 2016).

    Args:
        step: An `Execution`, in seconds.

    Returns:
        Dictionary that can be written as JSON.

    Example:

    >>> from tf_gpipe.schedule import schedules
    >>> from tf_gpipe.schedule.simulate import simulate
    >>> trace = chrome_trace(simulate(schedules.get("gpipe", 2, 2)))
    >>> trace["traceEvents"][-1]["name"]
    'B0.0'
    """

    def microseconds(time: float) -> float:
        # To the picosecond, so that a time such as 0.2 prints as 0.2.
        return round(time * 1e6, 6)

    def metadata(what: str, device: int, **args: Any) -> dict:
        return {"name": what, "ph": "M", "pid": 0, "tid": device, "args": args}

    events = [metadata("process_name", 0, name=f"pipeline, {totals(step)}")]
    for device, name in enumerate(short_names(step.devices)):
        events += [
            metadata("thread_name", device, name=name),
            # Otherwise viewers sort threads by their first events.
            metadata("thread_sort_index", device, sort_index=device),
        ]
    events += [
        {
            "name": str(task),
            "cat": KINDS[task.kind],
            "ph": "X",
            "ts": microseconds(start - step.start),
            "dur": microseconds(end - start),
            "pid": 0,
            "tid": device,
            "args": {"stage": task.stage, "micro_batch": task.micro_batch},
        }
        for device, task, start, end in step.spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def check_picture(path: str | os.PathLike) -> None:
    """Checks that a picture can be drawn and saved.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the path's ending is unknown.
    """
    figure, _ = _matplotlib()
    known = figure().canvas.get_supported_filetypes()
    ending = os.path.splitext(path)[1].removeprefix(".")
    # matplotlib adds an ending if there is none.
    if ending and ending.lower() not in known:
        raise ValueError(
            f"Format '{ending}' is not supported by matplotlib, which knows "
            f"{', '.join(sorted(known))}. Received: {path}"
        )


def picture(steps: Mapping[str, Execution], path: str | os.PathLike) -> None:
    """Draws charts of steps, one above another, and saves the image.

    All charts begin at 0 and share a time axis, so steps must be in the same
    unit. A box is a task, labelled with its micro-batch (after its stage, if
    the device has several) if that fits.

    Args:
        steps: Dict from the title of a chart to an `Execution`.
        path: Path of the image, with an ending that matplotlib knows, such as
            `.png` or `.svg`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no steps, or the path's ending is unknown.

    Example:

    >>> from tf_gpipe.schedule import schedules
    >>> from tf_gpipe.schedule.simulate import simulate
    >>> picture({"simulated": simulate(schedules.get("gpipe", 4, 8))}, "a.png")
    """
    save(_figure(steps), path)


def save(figure: Any, path: str | os.PathLike) -> None:
    """Saves a figure of matplotlib: all of it, or the image before stays."""
    path = os.fspath(path)
    ending = os.path.splitext(path)[1].removeprefix(".")
    if not ending:
        # As matplotlib does.
        ending = figure.canvas.get_default_filetype()
        path = f"{path.removesuffix('.')}.{ending}"
    with whole_files.replacing(path) as new:
        figure.savefig(new, format=ending.lower())


def png(steps: Mapping[str, Execution]) -> bytes:
    """Returns the image of `picture` as the content of a PNG file."""
    with io.BytesIO() as content:
        _figure(steps).savefig(content, format="png")
        return content.getvalue()


def _figure(steps: Mapping[str, Execution]) -> Any:
    if not steps:
        raise ValueError(f"There is nothing to draw. Received: steps={steps}")
    Figure, Patch = _matplotlib()
    heights = [0.8 + 0.4 * len(x.devices) for x in steps.values()]
    # Not `pyplot`, which would keep the figure and choose a window system.
    figure = Figure(figsize=(12, 0.6 + sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(steps), squeeze=False, sharex=True, height_ratios=heights
    )[:, 0]
    longest = max(x.makespan for x in steps.values())
    labelled: list = []
    for ax, (title, step) in zip(axes, steps.items(), strict=True):
        bars = ax.barh(
            [span.device for span in step.spans],
            [span.end - span.start for span in step.spans],
            left=[span.start - step.start for span in step.spans],
            color=[COLOURS[span.task.kind] for span in step.spans],
            edgecolor="black",
            linewidth=0.5,
        )
        texts = ax.bar_label(
            bars,
            labels(step),
            label_type="center",
            fontsize=8,
            in_layout=False,
        )
        labelled += zip(bars, texts, strict=True)
        ax.set_title(f"{title}: {totals(step)}")
        ax.set_yticks(range(len(step.devices)), short_names(step.devices))
        ax.set_ylim(len(step.devices) - 0.5, -0.5)
        ax.set_xlim(0, longest or 1.0)
    in_seconds = any(step.in_seconds for step in steps.values())
    axes[-1].set_xlabel("time in seconds" if in_seconds else "time")
    present = {x.task.kind for step in steps.values() for x in step.spans}
    figure.legend(
        handles=[
            Patch(facecolor=COLOURS[kind], edgecolor="black", label=name)
            for kind, name in KINDS.items()
            if kind in present
        ],
        loc="outside lower center",
        ncols=len(KINDS),
    )
    # The width of a box is known once the layout has made room for names.
    figure.draw_without_rendering()
    for bar, text in labelled:
        room = bar.get_window_extent().width
        text.set_visible(text.get_window_extent().width < room)
    return figure


def _matplotlib() -> tuple[Any, Any]:
    """Imports matplotlib: returns its `Figure` and `Patch`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as e:
        raise ImportError(
            "A picture needs matplotlib. Install it with "
            "`pip install matplotlib`."
        ) from e
    return Figure, Patch


def labels(step: Execution) -> list[str]:
    """Returns the label of each span: micro-batch, or stage and micro-batch."""
    count = _stages(step)
    return [
        str(task)[1:] if count[device] > 1 else str(task.micro_batch)
        for device, task, _, _ in step.spans
    ]


def _several(step: Execution) -> bool:
    """Returns whether a device has several stages."""
    return max(_stages(step).values()) > 1


def _stages(step: Execution) -> collections.Counter:
    """Returns the number of stages of each device."""
    stages = {(span.device, span.task.stage) for span in step.spans}
    return collections.Counter(device for device, _ in stages)


def _time(step: Execution, value: float) -> str:
    if not step.in_seconds:
        return f"{value:g}"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
