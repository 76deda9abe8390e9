"""An interactive page of charts of steps, as one HTML file.

Each chart shows a `tf_gpipe.schedule.simulate.Execution`, simulated or
measured. This module imports no TensorFlow, and Plotly only to write a page.
"""

import collections
import importlib
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_gpipe import whole_files
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Execution

# Heights in pixels: a device's row, the space around a chart, a table row.
_ROW, _AROUND, _CELLS = 34, 90, 30
# Height in pixels of Plotly's margins above and below all charts.
_MARGINS = 180


def check(path: str | os.PathLike) -> None:
    """Checks that a page can be written.

    Raises:
        ImportError: If Plotly is not installed.
        ValueError: If the path does not end in `.html`.
    """
    _plotly()
    if os.path.splitext(path)[1].lower() not in (".html", ".htm"):
        raise ValueError(
            "A page is written to a file that ends in .html, by which browsers "
            f"know it. Received: {os.fspath(path)}"
        )


def write(
    steps: Mapping[str, Execution],
    path: str | os.PathLike,
    about: Sequence[Mapping[str, str]] = (),
) -> None:
    """Writes a page with a chart of each step, and a table of the stages.

    The file contains Plotly's JavaScript (5 MB), and needs no network. All
    charts begin at 0 and share a time axis: zooming into one zooms into all.

    Args:
        steps: Dict from the title of a chart to an `Execution`. The table is
            about the last one.
        path: Path of the HTML file.
        about: For each stage, more cells of its table row, by column.

    Raises:
        ImportError: If Plotly is not installed.
        ValueError: If there are no steps.

    Example:

    >>> from tf_gpipe.schedule import schedules
    >>> from tf_gpipe.schedule.simulate import simulate
    >>> step = simulate(schedules.get("gpipe", 4, 8))
    >>> write({"simulated": step}, "step.html")
    """
    if not steps:
        raise ValueError(f"There is nothing to show. Received: steps={steps}")
    go, subplots = _plotly()
    *_, last = steps.values()
    rows = _stage_rows(last, about)
    heights = [_AROUND + _ROW * len(x.devices) for x in steps.values()]
    heights.append(_AROUND + _CELLS * (len(rows) + 1))
    figure = subplots.make_subplots(
        len(heights),
        1,
        row_heights=heights,
        vertical_spacing=min(0.1, 80 / sum(heights)),
        shared_xaxes="all",
        specs=[*([{"type": "xy"}] for _ in steps), [{"type": "table"}]],
        subplot_titles=[f"{x}: {timeline.totals(y)}" for x, y in steps.items()],
    )
    named: set[str] = set()
    for row, step in enumerate(steps.values(), 1):
        for bars in _bars(step):
            new = bars["legendgroup"] not in named
            figure.add_trace(go.Bar(bars, showlegend=new), row=row, col=1)
            named.add(bars["legendgroup"])
        figure.update_yaxes(
            # Rows are numbers, as two devices may have the same name.
            tickvals=list(range(len(step.devices))),
            ticktext=timeline.short_names(step.devices),
            range=[len(step.devices) - 0.5, -0.5],
            fixedrange=True,
            row=row,
            col=1,
        )
        figure.update_xaxes(
            # The unit is on the ticks, since an axis title would need room
            # between the charts.
            ticksuffix=" ms" if step.in_seconds else "",
            showticklabels=True,
            rangemode="tozero",
            row=row,
            col=1,
        )
    columns = list(rows[0])
    figure.add_trace(
        go.Table(
            header={"values": columns, "align": "left"},
            cells={
                "values": [[x[name] for x in rows] for name in columns],
                "align": "left",
                "height": _CELLS,
            },
        ),
        row=len(heights),
        col=1,
    )
    if timeline.shares_cores(last.devices):
        figure.add_annotation(
            text=timeline.SHARED_CORES,
            **{"xref": "paper", "yref": "paper", "x": 0, "y": 0},
            **{"yshift": -40, "xanchor": "left", "showarrow": False},
        )
    figure.update_layout(
        barmode="overlay",
        height=_MARGINS + sum(heights),
        title="A step of the pipeline",
        uniformtext={"minsize": 8, "mode": "hide"},
        legend={"traceorder": "normal"},
    )
    with whole_files.replacing(path) as partial:
        figure.write_html(partial, include_plotlyjs=True)


def _bars(step: Execution) -> list[dict[str, Any]]:
    """Returns the arguments of `go.Bar` for each kind of task."""
    scale = 1e3 if step.in_seconds else 1.0
    unit = " ms" if step.in_seconds else ""
    found: dict[str, dict[str, Any]] = collections.defaultdict(
        lambda: {x: [] for x in ("base", "x", "y", "text", "hovertext")}
    )
    for label, (device, task, start, end) in zip(
        timeline.labels(step), step.spans, strict=True
    ):
        bars = found[task.kind]
        first, long = (start - step.start) * scale, (end - start) * scale
        bars["base"].append(first)
        bars["x"].append(long)
        bars["y"].append(device)
        bars["text"].append(label)
        bars["hovertext"].append(
            f"{task.kind}: {timeline.KINDS[task.kind]} of stage {task.stage}, "
            f"micro-batch {task.micro_batch}<br>on {step.devices[device]}<br>"
            f"from {first:.4g} to {first + long:.4g}, {long:.4g}{unit}"
        )
    return [
        {
            **found[kind],
            "hoverinfo": "text",
            "width": 0.85,
            "orientation": "h",
            "name": timeline.KINDS[kind],
            "legendgroup": kind,
            "marker": {
                "color": timeline.COLOURS[kind],
                "line": {"color": "black", "width": 0.5},
            },
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"color": "black"},
            "constraintext": "inside",
        }
        for kind in timeline.KINDS
        if kind in found
    ]


def _stage_rows(
    step: Execution, about: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Returns the table's row for each stage: cells by column."""
    scale, unit = (1e3, " ms") if step.in_seconds else (1.0, "")
    busy: dict = collections.defaultdict(float)
    places: dict[int, int] = {}
    for device, task, start, end in step.spans:
        busy[task.stage, task.kind] += (end - start) * scale
        places[task.stage] = device
    names = timeline.short_names(step.devices)
    kinds = [x for x in timeline.KINDS if any(kind == x for _, kind in busy)]
    return [
        {
            "stage": str(stage),
            "device": names[places[stage]],
            **(about[stage] if stage < len(about) else {}),
            **{timeline.KINDS[x]: f"{busy[stage, x]:.4g}{unit}" for x in kinds},
            "idle": f"{step.idle[stage]:.1%}",
        }
        for stage in sorted(places)
    ]


def _plotly() -> tuple[Any, Any]:
    """Imports Plotly: returns its `graph_objects` and `subplots`."""
    try:
        return (
            importlib.import_module("plotly.graph_objects"),
            importlib.import_module("plotly.subplots"),
        )
    except ImportError as e:
        raise ImportError(
            "A page needs Plotly. Install it with `pip install plotly`."
        ) from e
