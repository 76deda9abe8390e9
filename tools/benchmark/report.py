"""The results of a benchmark, as a table, JSON and a picture."""

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

from tf_gpipe.schedule import timeline


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a benchmark.

    Attributes:
        title: String.
        rows: List of dicts with the same keys, the columns of the table.
        result: Dict, what `--json` prints.
        bars: String, the column that the picture shows.
        notes: List of strings, printed below the table.
    """

    title: str
    rows: list[dict]
    result: dict
    bars: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def print(self, as_json=False):
        """Prints a table, the machine, and JSON on the last line if wanted.

        A table that is wider than the terminal becomes several, each with the
        columns that name the rows; what these columns have in common stands
        above.
        """
        console = rich.console.Console(highlight=False, markup=False)
        console.print(self.title)
        same = self._same(console)
        if same:
            each = [f"{name} {x}".strip() for name, x in same.items()]
            console.print(f"All rows: {', '.join(each)}")
        for table in self._tables(console, same):
            console.print(table)
        for note in self.notes:
            console.print(note)
        about = machine()
        console.print(
            ", ".join(f"{name} {value}" for name, value in about.items())
        )
        if as_json:
            print(json.dumps({**self.result, "machine": about}))

    def _same(self, console):
        """Returns what names all rows alike, if the table is too wide."""
        if len(self.rows) == 1 or _fits(self._table(self.rows[0]), console):
            return {}
        names = [_names(row).items() for row in self.rows]
        return dict(x for x in names[0] if all(x in each for each in names))

    def _tables(self, console, same):
        """Returns tables of the rows, each with as many columns as fit.

        Args:
            console: The `Console` that prints them.
            same: Dict of columns that are left out.
        """
        names = _names(self.rows[0])
        labels = [name for name in names if name not in same]
        tables = []
        columns = list(labels)
        for name in list(self.rows[0])[len(names) :]:
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
        """Saves a picture with a bar for each row."""
        # Imported here, so that tables do not need matplotlib.
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
        timeline.save(figure, path)


def machine():
    """Returns what results depend on: the machine and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def _fits(table, console):
    """Returns whether a table fits the terminal without cutting words."""
    # With the terminal's own width, nothing would measure wider than it.
    unbounded = console.options.update(max_width=10_000)
    return console.measure(table, options=unbounded).minimum <= console.width


def _names(row):
    """Returns the items that name a row: those before its first float."""
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
    """Returns the number of GPUs and the name of the first."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return 0
    details = tf.config.experimental.get_device_details(gpus[0])
    return f"{len(gpus)} {details.get('device_name', '')}".strip()
