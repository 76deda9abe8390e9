"""The text of a plan: a verdict, a table of stages, and notes.

This module imports no TensorFlow.
"""

import itertools
from typing import Any

from tf_gpipe import table

_KEPT = "Activations MiB"


def text(plan: Any) -> str:
    """Returns the text of a `Plan`."""
    names = [str(k) for k in range(len(plan.stages))]
    devices = [str(device) for device in plan.devices]
    columns = [_numbers(stage) for stage in plan.stages]
    # Consecutive stages share a row even if their activations differ, as these
    # do from stage to stage under most schedules.
    runs = table.runs(
        [tuple({**x, _KEPT: ""}.values()) for x in columns], plan.devices
    )
    # Where device k has stage k alone, a column of devices says nothing.
    shared = devices != names
    rows = [
        {
            "Stage": table.of_run(names, run),
            **({"Device": table.of_run(devices, run)} if shared else {}),
            **columns[run.start],
            _KEPT: _between([plan.stages[k].activation_bytes for k in run]),
        }
        for run in runs
    ]
    notes = [
        f"{sum(stage.parameters for stage in plan.stages):,} parameters; "
        f"schedule {plan.schedule} of {plan.num_micro_batches} "
        f"micro-batches, remat {plan.remat}",
        "weights: with the sums of their gradients and the optimizer's slots",
    ]
    if any(stage.recomputed for stage in plan.stages):
        notes.append("remat: how many layers of a stage are recomputed")
    if len(rows) < len(plan.stages):
        notes.append("numbers of several stages are those of each")
    if plan.description:
        notes.append(f"order of tasks: {plan.description}")
    skips = [
        f"{own} to {table.destinations(sizes, _size)}"
        for own, stage in enumerate(plan.stages)
        if (sizes := {k: v for k, v in stage.sends.items() if k != own + 1})
    ]
    if skips:
        notes.append(f"skips from stage {', '.join(skips)} a micro-batch")
    notes += _of_idle(plan)
    if plan.step_seconds is not None:
        notes.append(
            f"a step takes {plan.step_seconds:.3g} s, of which transfers "
            f"between stages cost {plan.transfer_share:.1%}"
        )
    if plan.measured_seconds is not None:
        notes.append(f"tried: a step took {plan.measured_seconds:.3g} s")
    notes += _of_rivals(plan)
    return table.render(rows, notes, width=80, verdict=_verdict(plan))


def _numbers(stage: Any) -> dict[str, str]:
    return {
        "Layers": str(len(stage.layers)),
        # The number of layers recomputed; a longer title would take width from
        # the other columns.
        "Remat": str(len(stage.recomputed)),
        "Parameters": f"{stage.parameters:,}",
        "Weights MiB": f"{stage.parameter_bytes / 2**20:,.1f}",
        _KEPT: _mib(stage.activation_bytes),
        "GFLOPs": f"{stage.flops / 1e9:,.2f}",
        "Boundary MiB": f"{stage.boundary_bytes / 2**20:,.2f}",
    }


def _between(sizes: list[int]) -> str:
    """Returns the range of sizes in MiB, or the one size if all are equal."""
    least, most = _mib(min(sizes)), _mib(max(sizes))
    return most if least == most else f"{least} to\n{most}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _verdict(plan: Any) -> str:
    """Returns the first lines: whether it fits, advice, and the bubble."""
    lines = []
    known = [
        (size / memory, size, memory)
        for size, memory in zip(plan.device_bytes, plan.memories, strict=True)
        if memory is not None
    ]
    if known:
        _, size, memory = max(known)
        fits = "fits" if plan.fits else "does not fit"
        lines.append(
            f"{fits}: the fullest device needs {_size(size)} of {_size(memory)}"
        )
    elif plan.num_devices < len(plan.stages):
        # The peaks of its stages need not be at the same time.
        most = _size(max(plan.device_bytes))
        lines.append(f"the fullest device needs {most}")
    lines += [x for x in (plan.advice, *plan.reason.split("\n")) if x]
    lines.append(
        f"bubble {plan.bubble:.1%}, step time "
        f"{plan.relative_step_time:.3f} of one device's"
    )
    return "\n".join(lines)


def _of_idle(plan: Any) -> list[str]:
    """Returns the idle share of each device, unless all are alike."""
    shares = [f"{x:.0%}" for x in plan.device_idle]
    if len(set(shares)) < 2:
        return []
    found = []
    for share, group in itertools.groupby(
        range(len(shares)), shares.__getitem__
    ):
        first, *rest = group
        found.append(
            f"{first} to {rest[-1]} {share}" if rest else f"{first} {share}"
        )
    return [f"idle: device {', '.join(found)}"]


def _of_rivals(plan: Any) -> list[str]:
    """Returns a note on each of the next best candidates of `tune`."""
    own = plan.measured_seconds or plan.step_seconds
    if not plan.rivals or not own:
        return []
    found = []
    for i, x in enumerate(plan.rivals):
        more = x.seconds / own - 1
        words = f"{more:.1%} slower"
        if more < 0:
            words = f"{-more:.1%} faster"
            one = plan.num_devices * plan.num_replicas == 1
            if one and plan.measured_seconds is None:
                # `tune` prefers one device that is hardly slower than more.
                words += ", too little for more devices"
            else:
                words += " by an estimate"
        found.append(
            f"{'then' if i else 'next best'}: {x.words}, {words}"
            + (", tried" if x.tried else "")
        )
    return found


def _size(size: float) -> str:
    """Returns bytes as text in MiB or GiB."""
    if size < 2**30:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**30:,.2f} GiB"
