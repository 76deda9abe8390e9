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

# From here on rows that are alike are told as one.
_MANY = 16
# Characters.
_UNBOUNDED = 10_000


def runs(keys: Sequence[Hashable], devices: Sequence[int]) -> list[range]:
    """Returns which stages are one row of a table.

    Of many stages neighbours with equal keys are one; of few each is its own.
    In a row the numbers of the devices of its stages rise or fall, so that the
    first and the last one tell them all.

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
    """Returns a name, or the first and the last one of a run."""
    first, last = names[run.start], names[run.stop - 1]
    return first if first == last else f"{first} to {last}"


def destinations(sizes: Mapping[int, Any], words: Callable[[Any], str]) -> str:
    """Returns what goes to which stages, neighbours with equal sizes as one.

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
