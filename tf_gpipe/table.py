"""Tables as text.

This module imports no TensorFlow.
"""

import io
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table


def render(
    rows: Sequence[Mapping[str, str]],
    notes: Sequence[str],
    width: int,
    left: Collection[str] = (),
    wrap: bool = False,
) -> str:
    """Returns a table with notes below it, each on a line of its own.

    `rows` have cells by the names of their columns. Those in `left` are
    aligned to the left, others to the right. `wrap` is for the notes.
    """
    table = rich.table.Table(box=rich.box.SQUARE)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row.values())
    with io.StringIO() as text:
        console = rich.console.Console(file=text, width=width, highlight=False)
        console.print(table)
        for note in notes:
            console.print(f" {note}", soft_wrap=not wrap)
        return text.getvalue()
