"""The table of stages that `summary()` adds to Keras's own."""

import shutil

from tf_gpipe import table
from tf_gpipe.partition import stage_costs
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.stage.pipeline import Pipeline


def stage_table(
    pipeline: Pipeline, length: int, line_length: int | None, waits: str
) -> str:
    """Returns a table with a row a stage.

    Args:
        pipeline: The `Pipeline`.
        length: Integer that stands for unknown sizes, such as a sequence's.
        line_length: Characters of a line, or `None` for the terminal's width.
        waits: A further note, or an empty string.
    """
    stages, schedule = pipeline.stages, pipeline.schedule
    replicas = zip(*(stage.devices for stage in stages), strict=True)
    devices = [timeline.short_names(names) for names in replicas]
    sends = [
        stage_costs.sends(stages, stage.index, lambda x: size_in_bytes(x.spec))
        for stage in stages
    ]
    keys = [
        (
            len(stage.nodes),
            stage.count_params(),
            *((to - stage.index, size) for to, size in sends[k].items()),
        )
        for k, stage in enumerate(stages)
    ]
    rows = []
    for run in table.runs(keys, schedule.devices):
        stage = stages[run.start]
        names = [n.layer.name for k in run for n in stages[k].nodes]
        if len(names) > 3:
            names = [names[0], "...", names[-1]]
        rows.append(
            {
                "Stage": table.of_run([str(x.index) for x in stages], run),
                "Device": "\n".join(table.of_run(x, run) for x in devices),
                "Layers": f"{len(stage.nodes)} ({', '.join(names)})",
                "Parameters": f"{stage.count_params():,}",
                "Sends to (KiB a row)": table.destinations(
                    sends[run.start], lambda size: f"{size / 2**10:.3g}"
                ),
            }
        )
    verdict = f"{len(stages)} stages, bubble {_bubble(pipeline, length)}"
    notes = [
        f"Schedule {schedule.name} of "
        f"{pipeline.num_micro_batches or schedule.num_micro_batches} "
        f"micro-batches, remat {pipeline.remat}"
    ]
    if len(rows) < len(stages):
        notes.append(
            "Of several stages, layers and parameters are those of each, and "
            "what is sent is that of the first."
        )
    if schedule.description:
        notes.append(f"Order of tasks: {schedule.description}")
    if waits:
        notes.append(waits)
    if pipeline.chosen is not None:
        notes += _recomputed(pipeline)
    return table.render(
        rows,
        notes,
        line_length or shutil.get_terminal_size((80, 24)).columns,
        left=("Device", "Layers", "Sends to (KiB a row)"),
        verdict=verdict,
    )


def _recomputed(pipeline: Pipeline) -> list[str]:
    """Returns lines of text that name the layers each stage recomputes."""
    stages = pipeline.stages
    parts = [pipeline.recomputed(stage.index) for stage in stages]
    keys = [(len(x.nodes), *y) for x, y in zip(stages, parts, strict=True)]
    notes = []
    for run in table.runs(keys, pipeline.schedule.devices):
        nodes = stages[run.start].nodes
        count = sum(map(len, parts[run.start]))
        own = [nodes[x.start : x.stop] for x in parts[run.start]]
        names = ", ".join(
            x[0].layer.name
            if len(x) == 1
            else f"{x[0].layer.name} to {x[-1].layer.name}"
            for x in own
        )
        several = len(run) > 1
        notes.append(
            f"Stage{'s' if several else ''} "
            f"{table.of_run([str(x.index) for x in stages], run)} "
            f"{'recompute' if several else 'recomputes'} {count} of "
            f"{len(nodes)} calls{' each' if several else ''}"
            + (f": {names}" if names else "")
            + (", and so on" if several and names else "")
        )
    return notes


def _bubble(pipeline: Pipeline, length: int) -> str:
    """Returns text: the share of the time in which devices wait."""
    schedule, remat = pipeline.schedule, pipeline.remat
    try:
        costs = stage_costs.of_graph(
            pipeline.graph,
            [len(x.nodes) for x in pipeline.stages],
            length,
            pipeline.chosen,
            schedule.num_micro_batches,
        )
    except ValueError:
        bubble = simulate(schedule, remat=remat).bubble
        return (
            f"{bubble:.1%} of the time if stages were equal (the operations of "
            "a layer cannot be counted)"
        )
    forward = [float(x.flops) for x in costs]
    backward = [float(x.whole_backward_flops) for x in costs]
    if not any(forward + backward):
        return f"{simulate(schedule, remat=remat).bubble:.1%} of the time"
    bubble = simulate(
        schedule,
        forward,
        backward,
        recompute=[float(x.before_flops) for x in costs],
        remat=remat,
        weights=[float(x.weight_flops) for x in costs],
    ).bubble
    return f"{bubble:.1%} of the time, by the operations of these stages"
