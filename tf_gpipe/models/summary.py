"""The table of stages that `summary()` adds to Keras's own."""

import shutil

from tf_gpipe import table
from tf_gpipe.partition import layer_costs
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.stage.pipeline import Pipeline


def stage_table(pipeline: Pipeline, line_length: int | None = None) -> str:
    """Returns a table with a row a stage, by default as wide as a terminal."""
    stages, schedule = pipeline.stages, pipeline.schedule
    rows = []
    for stage in stages:
        names = [node.layer.name for node in stage.nodes]
        if len(names) > 3:
            names = [names[0], "...", names[-1]]
        sends = layer_costs.sends(
            stages, stage.index, lambda x: layer_costs.size_in_bytes(x.spec)
        )
        rows.append(
            {
                "Stage": str(stage.index),
                "Device": "\n".join(stage.devices),
                "Layers": f"{len(stage.nodes)} ({', '.join(names)})",
                "Parameters": f"{stage.count_params():,}",
                "Sends to (KiB a row)": ", ".join(
                    f"{to} ({size / 2**10:.3g})" for to, size in sends.items()
                ),
            }
        )
    note = (
        f"Schedule {schedule.name} of "
        f"{pipeline.num_micro_batches or schedule.num_micro_batches} "
        f"micro-batches, remat {pipeline.remat}; bubble "
        f"{simulate(schedule).bubble:.1%} of the time with equal stages"
    )
    notes = [note]
    if schedule.description:
        notes.append(f"Order of tasks: {schedule.description}")
    return table.render(
        rows,
        notes,
        line_length or shutil.get_terminal_size((80, 24)).columns,
        left=("Device", "Layers", "Sends to (KiB a row)"),
        wrap=True,
    )
