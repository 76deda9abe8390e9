"""The table of stages that `summary()` adds to Keras's own."""

import io
import shutil

import rich.box
import rich.console
import rich.table

from tf_gpipe.graph import Value
from tf_gpipe.partition.costs import with_rows
from tf_gpipe.partition.layer_graph import size_in_bytes
from tf_gpipe.pipeline import Pipeline
from tf_gpipe.simulate import simulate


def stage_table(pipeline: Pipeline, line_length: int | None = None) -> str:
    """Returns a table with a row a stage, for a terminal.

    Args:
        pipeline: A `Pipeline`.
        line_length: Integer, the width in characters. Defaults to that of
            the terminal.

    Returns:
        String of several lines.
    """
    stages, schedule = pipeline.stages, pipeline.schedule
    table = rich.table.Table(box=rich.box.SQUARE)
    table.add_column("Stage", justify="right")
    table.add_column("Device")
    table.add_column("Layers")
    table.add_column("Parameters", justify="right")
    table.add_column("Sends to (KiB a row)")
    for stage in stages:
        names = [node.layer.name for node in stage.nodes]
        if len(names) > 3:
            names = [names[0], "...", names[-1]]
        table.add_row(
            str(stage.index),
            "\n".join(stage.devices),
            f"{len(stage.nodes)} ({', '.join(names)})",
            f"{stage.count_params():,}",
            ", ".join(
                f"{other.index} ({_bytes(sent) / 2**10:.3g})"
                for other in stages[stage.index + 1 :]
                if (sent := [x for x in stage.outputs if x in other.inputs])
            ),
        )
    with io.StringIO() as text:
        console = rich.console.Console(
            file=text,
            width=line_length or shutil.get_terminal_size((80, 24)).columns,
            highlight=False,
        )
        console.print(table)
        console.print(
            f" Schedule {schedule.name} of {schedule.num_micro_batches} "
            f"micro-batches, remat {pipeline.remat}; bubble "
            f"{simulate(schedule).bubble:.1%} of the time with equal stages",
        )
        return text.getvalue()


def _bytes(values: list[Value]) -> int:
    """Returns the size of a row of what one stage sends to another."""
    return sum(size_in_bytes(with_rows(value.spec, 1)) for value in values)
