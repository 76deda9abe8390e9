"""Pictures of when each device runs what: text, Chrome trace, image.

They show a `tf_gpipe.schedule.simulate.Execution`, simulated or measured.
This module imports no TensorFlow, and matplotlib only to draw an image.
"""

import collections
import os
from collections.abc import Mapping
from typing import Any

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
_COLOURS = {
    FORWARD: "#56B4E9",
    RECOMPUTE: "#F0E442",
    BACKWARD: "#D55E00",
    WEIGHTS: "#009E73",
}
# The least columns for the time in a text chart, however long the names are.
_MIN_COLUMNS = 20


def text_chart(step: Execution, width: int = 80) -> str:
    """Returns a step as text: a row a device, time from left to right.

    A task is as wide as it is long, and begins with its kind and micro-batch
    (its stage before that, if the device has several) where they fit. Dots
    are idle time. The last line has the makespan and the bubble.

    Args:
        step: An `Execution`.
        width: Integer, the characters of a row with its name. At least 20 are
            for the time.

    Example:

    >>> from tf_gpipe.schedule.schedules import gpipe
    >>> from tf_gpipe.schedule.simulate import simulate
    >>> print(text_chart(simulate(gpipe(2, 2), backward=1), width=34))
    device 0  F0--F1--........B1--B0--
    device 1  ....F0--F1--B1--B0--....
    makespan 6, bubble 33.3%
    """
    margin = max(map(len, step.devices)) + 2
    columns = max(width - margin, _MIN_COLUMNS)
    scale = columns / step.makespan if step.makespan else 0.0
    rows = [["."] * columns for _ in step.devices]
    for (device, task, start, end), label in zip(
        step.spans, _labels(step), strict=True
    ):
        left = round((start - step.start) * scale)
        size = round((end - step.start) * scale) - left
        label = task.kind + label
        if len(label) > size:
            label = task.kind[:size]
        rows[device][left : left + size] = label.ljust(size, "-")
    lines = [
        name.ljust(margin) + "".join(row)
        for name, row in zip(step.devices, rows, strict=True)
    ]
    lines.append(f"makespan {step.makespan:g}, bubble {step.bubble:.1%}")
    return "\n".join(lines)


def chrome_trace(step: Execution) -> dict:
    """Returns a step, in seconds, in the trace event format of Chrome.

    Written to a file with `json.dump`, Perfetto (https://ui.perfetto.dev) and
    `chrome://tracing` show it: a thread a device, from the first start on.

    Args:
        step: An `Execution`.

    Returns:
        Dictionary that JSON can hold.

    Example:

    >>> from tf_gpipe.schedule.schedules import gpipe
    >>> from tf_gpipe.schedule.simulate import simulate
    >>> trace = chrome_trace(simulate(gpipe(2, 2)))
    >>> trace["traceEvents"][-1]["name"]
    'B0.0'
    """

    def microseconds(time: float) -> float:
        # To the picosecond, so that a time such as 0.2 prints as 0.2.
        return round(time * 1e6, 6)

    events: list[dict] = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": device,
            "args": {"name": name},
        }
        for device, name in enumerate(step.devices)
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
    return {"traceEvents": events}


def check_picture(path: str | os.PathLike) -> None:
    """Refuses a picture that could not be drawn.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the path's ending is unknown.
    """
    figure, _ = _matplotlib()
    known = figure().canvas.get_supported_filetypes()
    ending = os.path.splitext(path)[1].removeprefix(".")
    # matplotlib adds one where there is none.
    if ending and ending.lower() not in known:
        raise ValueError(
            f"Format '{ending}' is not supported by matplotlib, which knows "
            f"{', '.join(sorted(known))}. Received: {path}"
        )


def picture(steps: Mapping[str, Execution], path: str | os.PathLike) -> None:
    """Draws steps by their titles, one above another, and saves the image.

    All charts begin at 0 and have one time axis, so give steps in the same
    unit. A box is a task, with its micro-batch in it (its stage before that,
    if the device has several) where that fits.

    Args:
        steps: Dict from the title of a chart to an `Execution`.
        path: Where to save, with an ending that matplotlib knows, such as
            `.png` or `.svg`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no steps, or the path's ending is unknown.

    Example:

    >>> from tf_gpipe.schedule.schedules import gpipe
    >>> from tf_gpipe.schedule.simulate import simulate
    >>> picture({"simulated": simulate(gpipe(4, 8))}, "a.png")
    """
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
            color=[_COLOURS[span.task.kind] for span in step.spans],
            edgecolor="black",
            linewidth=0.5,
        )
        texts = ax.bar_label(
            bars,
            _labels(step),
            label_type="center",
            fontsize=8,
            in_layout=False,
        )
        labelled += zip(bars, texts, strict=True)
        ax.set_title(f"{title}: bubble {step.bubble:.1%}")
        ax.set_yticks(range(len(step.devices)), step.devices)
        ax.set_ylim(len(step.devices) - 0.5, -0.5)
        ax.set_xlim(0, longest or 1.0)
    axes[-1].set_xlabel("time")
    present = {x.task.kind for step in steps.values() for x in step.spans}
    figure.legend(
        handles=[
            Patch(facecolor=_COLOURS[kind], edgecolor="black", label=name)
            for kind, name in KINDS.items()
            if kind in present
        ],
        loc="outside lower center",
        ncols=len(KINDS),
    )
    # How wide a box is shows once the names have taken their room.
    figure.draw_without_rendering()
    for bar, text in labelled:
        room = bar.get_window_extent().width
        text.set_visible(text.get_window_extent().width < room)
    figure.savefig(path)


def _matplotlib() -> tuple[Any, Any]:
    """Returns its `Figure` and `Patch`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as e:
        raise ImportError(
            "A picture needs matplotlib. Install it with "
            "`pip install tf_gpipe[plot]`."
        ) from e
    return Figure, Patch


def _labels(step: Execution) -> list[str]:
    """Returns the label of each span: micro-batch, or stage and micro-batch."""
    stages = {(span.device, span.task.stage) for span in step.spans}
    count = collections.Counter(device for device, _ in stages)
    return [
        str(task)[1:] if count[device] > 1 else str(task.micro_batch)
        for device, task, _, _ in step.spans
    ]
