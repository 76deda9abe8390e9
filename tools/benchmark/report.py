"""What a benchmark has found, as a table, JSON and a picture."""

import dataclasses
import itertools
import json
import os
import platform
import textwrap

import keras
import rich.console
import rich.table
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Report:
    """What a benchmark has found.

    Attributes:
        title: String.
        rows: List of dicts with the same keys, the columns of a table.
        result: Dict, the same as JSON.
        bars: String, the column that a picture shows.
        notes: List of strings.
    """

    title: str
    rows: list[dict]
    result: dict
    bars: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def print(self, as_json=False):
        """Prints a table, the machine, and JSON on the last line if wanted."""
        table = rich.table.Table(title=self.title)
        for name in self.rows[0]:
            table.add_column(name)
        for row in self.rows:
            table.add_row(
                *(
                    f"{x:.3f}" if isinstance(x, float) else str(x)
                    for x in row.values()
                )
            )
        console = rich.console.Console(highlight=False)
        console.print(table)
        for note in self.notes:
            console.print(note)
        about = machine()
        console.print(
            ", ".join(f"{name} {value}" for name, value in about.items())
        )
        if as_json:
            print(json.dumps({**self.result, "machine": about}))

    def plot(self, path):
        """Saves a picture with a bar a row."""
        # Here, so that tables need no matplotlib.
        import matplotlib.figure

        # Not `pyplot`, which would keep the figure and choose a window system.
        figure = matplotlib.figure.Figure(
            figsize=(8, 1.2 + 0.3 * len(self.rows)), layout="constrained"
        )
        axes = figure.subplots()
        drawn = axes.barh(
            range(len(self.rows)), [row[self.bars] for row in self.rows]
        )
        axes.bar_label(drawn, fmt="%.3g", padding=3)
        axes.set_yticks(range(len(self.rows)), map(_label, self.rows))
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel(self.bars)
        axes.set_title(
            "\n".join(textwrap.wrap(self.title, 80)), fontsize="medium"
        )
        figure.savefig(path)


def machine():
    """Returns what a figure depends on: machine and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def _label(row):
    """Returns what tells a row apart: what comes before its figures."""
    names = itertools.takewhile(
        lambda x: not isinstance(x[1], float), row.items()
    )
    return ", ".join(
        f"{name}={x}" if isinstance(x, int) else x
        for name, x in names
        if x != ""
    )


def _processor():
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus():
    """Returns how many GPUs there are, and which."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return 0
    details = tf.config.experimental.get_device_details(gpus[0])
    return f"{len(gpus)} {details.get('device_name', '')}".strip()
