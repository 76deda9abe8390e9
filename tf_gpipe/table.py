"""Tables as text.

This module imports no TensorFlow.
"""

import io
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

# The most stages that have a row each. With more, neighbours that are alike
# share a row.
_MANY = 16
# Width, in characters, in which every table fits.
_UNBOUNDED = 10_000


def runs(keys: Sequence[Hashable], devices: Sequence[int]) -> list[range]:
    """Returns the range of stages of each row of a table.

    With many stages, neighbours with equal keys share a row; with few, each has
    its own. Within a row the device numbers only rise or only fall, so that the
    first and the last one identify them all.

    Args:
        keys: For each stage a key: the contents of its row.
        devices: For each stage the number of its device.

    Example:

    >>> runs(["a"] * 20 + ["b"], range(21))
    [range(0, 20), range(20, 21)]
    >>> runs(["a"] * 20, [*range(10), *range(10)])
    [range(0, 10), range(10, 20)]
    >>> runs(["a", "a"], [0, 1])
    [range(0, 1), range(1, 2)]
    """
    if len(keys) <= _MANY:
        return [range(i, i + 1) for i in range(len(keys))]
    found = [range(0, 1)]
    direction = 0
    for i in range(1, len(keys)):
        step = devices[i] - devices[i - 1]
        if keys[i] == keys[i - 1] and step * direction >= 0:
            found[-1] = range(found[-1].start, i + 1)
            direction = direction or step
        else:
            found.append(range(i, i + 1))
            direction = 0
    return found


def of_run(names: Sequence[str], run: range) -> str:
    """Returns the name of a run's items, or "first to last" if they differ."""
    first, last = names[run.start], names[run.stop - 1]
    return first if first == last else f"{first} to {last}"


def destinations(sizes: Mapping[int, Any], words: Callable[[Any], str]) -> str:
    """Returns a text of stages and the sizes sent to them.

    Neighbouring stages with equal sizes are joined.

    Args:
        sizes: Dict from stages, in order, to sizes.
        words: Function from a size to its text.

    Example:

    >>> destinations({1: 8, 3: 4, 4: 4, 5: 4}, str)
    '1 (8), 3-5 (4 each)'
    """
    found: list[list[int]] = []
    for to, size in sizes.items():
        if found and found[-1][-1] == to - 1 and sizes[to - 1] == size:
            found[-1].append(to)
        else:
            found.append([to])
    return ", ".join(
        f"{first}-{rest[-1]} ({words(sizes[first])} each)"
        if rest
        else f"{first} ({words(sizes[first])})"
        for first, *rest in found
    )


def render(
    rows: Sequence[Mapping[str, str]],
    notes: Sequence[str],
    width: int,
    left: Collection[str] = (),
    verdict: str = "",
) -> str:
    """Returns the text of a table with a verdict above it and notes below.

    Args:
        rows: For each row a dict from column names to cells.
        notes: Lines below the table.
        width: Characters per line. A wider table gets less space between
            columns, and headers of several lines.
        left: Names of columns that are aligned to the left.
        verdict: Text above the table.
    """
    table = rich.table.Table(box=rich.box.SQUARE)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row.values())
    with io.StringIO() as text:
        # Names are shown as they are, even if they have brackets or colons.
        console = rich.console.Console(
            file=text, width=width, highlight=False, markup=False, emoji=False
        )
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
