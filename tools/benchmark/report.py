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
        """Prints a table, the machine, and JSON on the last line if wanted.

        A table that is wider than the terminal becomes several, each of which
        tells whose figures they are.
        """
        console = rich.console.Console(highlight=False, markup=False)
        console.print(self.title)
        for table in self._tables(console):
            console.print(table)
        for note in self.notes:
            console.print(note)
        about = machine()
        console.print(
            ", ".join(f"{name} {value}" for name, value in about.items())
        )
        if as_json:
            print(json.dumps({**self.result, "machine": about}))

    def _tables(self, console):
        """Returns tables of the rows, each of as many columns as fit."""
        labels = list(_names(self.rows[0]))
        tables = []
        columns = list(labels)
        for name in list(self.rows[0])[len(labels) :]:
            if len(columns) > len(labels) and not _fits(
                self._table([*columns, name]), console
            ):
                tables.append(self._table(columns))
                columns = list(labels)
            columns.append(name)
        return [*tables, self._table(columns)]

    def _table(self, columns):
        table = rich.table.Table()
        for name in columns:
            numbers = all(
                isinstance(row[name], (int, float)) for row in self.rows
            )
            table.add_column(
                name, justify="right" if numbers else "left", overflow="fold"
            )
        for row in self.rows:
            table.add_row(
                *(
                    f"{row[name]:.3f}"
                    if isinstance(row[name], float)
                    else str(row[name])
                    for name in columns
                )
            )
        return table

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


def _fits(table, console):
    """Returns whether a terminal has room for a table, words uncut."""
    # Of a bounded width nothing would be wider.
    unbounded = console.options.update(max_width=10_000)
    return console.measure(table, options=unbounded).minimum <= console.width


def _names(row):
    """Returns what tells a row apart: what comes before its figures."""
    items = itertools.takewhile(
        lambda x: not isinstance(x[1], float), row.items()
    )
    return dict(items)


def _label(row):
    return ", ".join(
        f"{name}={x}" if isinstance(x, int) else x
        for name, x in _names(row).items()
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
