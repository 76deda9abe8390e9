"""Tables as text.

This module imports no TensorFlow.
"""

import io
import itertools
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

# From here on rows that are alike are told as one.
_MANY = 16
# Characters.
_UNBOUNDED = 10_000


def runs(keys: Sequence[Hashable]) -> list[range]:
    """Returns which rows are one row of a table.

    Of many rows neighbours with equal keys are one; of few each is its own.

    Example:

    >>> runs(["a"] * 20 + ["b"])
    [range(0, 20), range(20, 21)]
    >>> runs(["a", "a"])
    [range(0, 1), range(1, 2)]
    """
    if len(keys) <= _MANY:
        return [range(i, i + 1) for i in range(len(keys))]
    found = []
    for _, group in itertools.groupby(range(len(keys)), keys.__getitem__):
        first, *rest = group
        found.append(range(first, first + len(rest) + 1))
    return found


def of_run(names: Sequence[str], run: range) -> str:
    """Returns a name, or the first and the last one of a run."""
    first, last = names[run.start], names[run.stop - 1]
    return first if first == last else f"{first} to {last}"


def render(
    rows: Sequence[Mapping[str, str]],
    notes: Sequence[str],
    width: int,
    left: Collection[str] = (),
    verdict: str = "",
) -> str:
    """Returns a table with a verdict above it and notes below.

    `rows` have cells by the names of their columns. Those in `left` are
    aligned to the left, others to the right. Where the table would be wider
    than `width`, it has less space between columns.
    """
    table = rich.table.Table(box=rich.box.SQUARE)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row.values())
    with io.StringIO() as text:
        console = rich.console.Console(file=text, width=width, highlight=False)
        unbounded = console.options.update(max_width=_UNBOUNDED)
        if console.measure(table, options=unbounded).maximum > width:
            table.padding = (0, 0)
            for column in table.columns:
                if column.justify == "right":
                    column.header = str(column.header).replace(" ", "\n")
        if verdict:
            console.print(verdict)
        console.print(table)
        for note in notes:
            console.print(f" {note}")
        return text.getvalue()
