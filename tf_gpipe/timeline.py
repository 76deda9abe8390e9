"""Pictures of when each device runs what: text, Chrome trace, image.

They show `tf_gpipe.simulate.Span`s, simulated or measured.
This module imports no TensorFlow, and matplotlib only to draw an image.
"""

import os
from collections.abc import Mapping
from collections.abc import Sequence

from tf_gpipe.schedule import BACKWARD
from tf_gpipe.schedule import FORWARD
from tf_gpipe.schedule import RECOMPUTE
from tf_gpipe.schedule import WEIGHTS
from tf_gpipe.simulate import Execution
from tf_gpipe.simulate import Span

KINDS = {
    FORWARD: "forward",
    RECOMPUTE: "recompute",
    BACKWARD: "backward",
    WEIGHTS: "weights",
}
# Of Okabe and Ito's palette for the colour-blind; also unlike in lightness,
# and light enough for black digits.
_COLOURS = {
    FORWARD: "#56B4E9",
    RECOMPUTE: "#F0E442",
    BACKWARD: "#D55E00",
    WEIGHTS: "#009E73",
}
# The least columns for the time in a text chart, however long the names are.
_MIN_COLUMNS = 20
# Points of the digits in a picture's boxes.
_FONT_SIZE = 8


def text_chart(
    spans: Sequence[Span],
    width: int = 80,
    devices: Sequence[str] | None = None,
) -> str:
    """Returns the spans as text: a row a device, time from left to right.

    A task is as wide as it is long, and begins with its kind and micro-batch
    (its stage before that, if the device has several) where they fit. Dots
    are idle time.

    Args:
        spans: `Span`s, in any order.
        width: Integer, the characters of a row with its name. At least 20 are
            for the time.
        devices: As for `tf_gpipe.simulate.Execution`.

    Returns:
        A string of several lines, the last one with the makespan and bubble.

    Raises:
        ValueError: If there are no spans, or fewer names than devices.

    Example:

    >>> spans = simulate(gpipe(2, 2), backward=1).spans
    >>> print(text_chart(spans, width=34))
    device 0  F0--F1--........B1--B0--
    device 1  ....F0--F1--B1--B0--....
    makespan 6, bubble 33.3%
    """
    step = Execution(spans, devices)
    margin = max(map(len, step.devices)) + 2
    columns = max(width - margin, _MIN_COLUMNS)
    scale = columns / step.makespan if step.makespan else 0.0
    rows = [["."] * columns for _ in step.devices]
    several = _have_several_stages(spans)
    for device, task, start, end in step.spans:
        left = round((start - step.start) * scale)
        size = round((end - step.start) * scale) - left
        label = f"{task.kind}{task.micro_batch}"
        if device in several:
            label = str(task)
        if len(label) > size:
            label = task.kind[:size]
        rows[device][left : left + size] = label.ljust(size, "-")
    lines = [
        name.ljust(margin) + "".join(row)
        for name, row in zip(step.devices, rows, strict=True)
    ]
    lines.append(f"makespan {step.makespan:g}, bubble {step.bubble:.1%}")
    return "\n".join(lines)


def chrome_trace(
    spans: Sequence[Span], devices: Sequence[str] | None = None
) -> dict:
    """Returns the spans in the trace event format of Chrome.

    Written to a file with `json.dump`, Perfetto (https://ui.perfetto.dev) and
    `chrome://tracing` show it: a thread a device, from the first start on.

    Args:
        spans: `Span`s in seconds, in any order.
        devices: As for `tf_gpipe.simulate.Execution`.

    Returns:
        A dict that JSON can express.

    Raises:
        ValueError: If there are no spans, or fewer names than devices.
    """
    step = Execution(spans, devices)

    def microseconds(time: float) -> float:
        # To the picosecond, so that round times look it.
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


def picture(
    rows: Mapping[str, tuple[Sequence[Span], Sequence[str] | None]],
    path: str | os.PathLike,
) -> None:
    """Draws spans, one chart above another, and saves the image.

    All charts begin at 0 and have one time axis, so give their spans in the
    same unit. A box is a task, with its micro-batch in it (its stage before
    that, if the device has several) where that fits.

    Args:
        rows: Dict from the title of a chart to its spans and the names of its
            devices (or `None`), as for `tf_gpipe.simulate.Execution`.
        path: Where to save, with an ending that matplotlib knows, such as
            `.png` or `.svg`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no charts, if one has no spans or fewer names
            than devices, or if the path's ending is unknown.

    Example:

    >>> picture({"simulated": (simulate(gpipe(4, 8)).spans, None)}, "a.png")
    """
    if not rows:
        raise ValueError(f"There is nothing to draw. Received: rows={rows}")
    steps = {title: Execution(*given) for title, given in rows.items()}
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as e:
        raise ImportError(
            "`tf_gpipe.timeline.picture` needs matplotlib. Install it with "
            "`pip install tf_gpipe[plot]`."
        ) from e
    heights = [0.8 + 0.4 * len(x.devices) for x in steps.values()]
    # Not `pyplot`, which would keep the figure and choose a window system.
    figure = Figure(figsize=(12, 0.6 + sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(rows), squeeze=False, sharex=True, height_ratios=heights
    )[:, 0]
    longest = max(x.makespan for x in steps.values())
    for ax, (title, step) in zip(axes, steps.items(), strict=True):
        for device, task, start, end in step.spans:
            ax.barh(
                device,
                end - start,
                left=start - step.start,
                color=_COLOURS[task.kind],
                edgecolor="black",
                linewidth=0.5,
            )
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
    for ax, step in zip(axes, steps.values(), strict=True):
        several = _have_several_stages(step.spans)
        points = ax.get_window_extent().width / figure.dpi * 72
        for device, task, start, end in step.spans:
            label = f"{task.micro_batch}"
            if device in several:
                label = f"{task.stage}.{task.micro_batch}"
            # A digit is about 0.64 of the font's size wide.
            room = (end - start) / (longest or 1.0) * points
            if len(label) * 0.64 * _FONT_SIZE < room:
                middle = (start + end) / 2 - step.start
                ax.text(
                    middle,
                    device,
                    label,
                    ha="center",
                    va="center",
                    fontsize=_FONT_SIZE,
                    in_layout=False,
                )
    figure.savefig(path)


def _have_several_stages(spans: Sequence[Span]) -> set[int]:
    """Returns the devices that run more than one stage."""
    pairs = {(span.device, span.task.stage) for span in spans}
    devices = [device for device, _ in pairs]
    return {device for device in devices if devices.count(device) > 1}
