"""What a plan tells, as data and as a table.

This module imports no TensorFlow.
"""

import dataclasses
from typing import Any

from tf_gpipe import table
from tf_gpipe.schedule.tasks import AUTO_REMAT


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What one stage will need.

    Attributes:
        layers: List of the names of its layers.
        recomputed: List of the names of those that it recomputes, for all
            micro-batches or some of them.
        parameters: Integer.
        parameter_bytes: Integer: weights, gradient accumulators and
            optimizer slots.
        activation_bytes: Integer, the activations at their peak.
        flops: Integer, floating-point operations of a micro-batch's forward
            pass.
        backward_flops: Integer, the operations of its backward pass.
        sends: Dictionary from each later stage to the bytes that this stage
            sends to it for a micro-batch. What a skip connection needs goes
            straight to the stage that uses it.
    """

    layers: list[str]
    parameters: int
    parameter_bytes: int
    activation_bytes: int
    flops: int
    backward_flops: int
    sends: dict[int, int]
    recomputed: list[str] = dataclasses.field(default_factory=list)

    @property
    def boundary_bytes(self) -> int:
        """The bytes that it sends to other stages for a micro-batch."""
        return sum(self.sends.values())

    @property
    def bytes(self) -> int:
        """The peak memory of the stage."""
        return self.parameter_bytes + self.activation_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a pipeline will need; see `plan`.

    Attributes:
        stages: List of `StagePlan`s.
        devices: List with the number of the device of each stage.
        device_activation_bytes: List with the activations of each device at
            their peak, which its stages may reach at different times.
        num_micro_batches: Integer.
        schedule: String, its name.
        description: String, how it was found, if it was searched.
        remat: String.
        bubble: Float, the share of the time that devices will be idle, with
            operations taken for time.
        relative_step_time: Float, the time of a step relative to that of one
            device of the same speed without micro-batches or recomputation.
        step_seconds: Float, the time of a step; `None` where the speed of the
            devices is not known.
        transfer_share: Float, the share of that time by which the transfers
            between stages lengthen the step.
        device_memory: Integer, bytes of each device, or `None`.
        advice: String, the smallest change with which it would fit; empty
            where it fits.

    Example:

    >>> layers = [keras.layers.Dense(512) for _ in range(8)]
    >>> plan = tf_gpipe.plan(
    ...     layers, (64, 512), num_stages=2, device_memory="8MB"
    ... )
    >>> plan.fits, plan.stages[0].parameters
    (False, 787968)
    """

    stages: list[StagePlan]
    devices: list[int]
    device_activation_bytes: list[int]
    num_micro_batches: int
    schedule: str
    remat: str
    bubble: float
    relative_step_time: float
    step_seconds: float | None = None
    transfer_share: float = 0.0
    device_memory: int | None = None
    advice: str = ""
    description: str = ""

    @property
    def device_bytes(self) -> list[int]:
        """The peak memory of each device."""
        totals = list(self.device_activation_bytes)
        for device, stage in zip(self.devices, self.stages, strict=True):
            totals[device] += stage.parameter_bytes
        return totals

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return (
            self.device_memory is None
            or max(self.device_bytes) <= self.device_memory
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as a dictionary that JSON can hold."""
        return {
            "parameters": sum(stage.parameters for stage in self.stages),
            "fits": self.fits,
            "bubble": self.bubble,
            "relative_step_time": self.relative_step_time,
            "step_seconds": self.step_seconds,
            "transfer_share": self.transfer_share,
            "description": self.description,
            "advice": self.advice,
            "stages": [
                {
                    **dataclasses.asdict(stage),
                    # The keys of JSON's objects are strings.
                    "sends": {str(k): size for k, size in stage.sends.items()},
                    "boundary_bytes": stage.boundary_bytes,
                }
                for stage in self.stages
            ],
        }

    def __str__(self) -> str:
        names = [str(k) for k in range(len(self.stages))]
        devices = [str(device) for device in self.devices]
        columns = [self._numbers(stage) for stage in self.stages]
        runs = table.runs([tuple(x.values()) for x in columns])
        # Else it says what the number of the stage does.
        shared = devices != names
        rows = [
            {
                "Stage": table.of_run(names, run),
                **({"Device": table.of_run(devices, run)} if shared else {}),
                **columns[run.start],
            }
            for run in runs
        ]
        lines = [
            f"{sum(stage.parameters for stage in self.stages):,} parameters; "
            f"schedule {self.schedule} of {self.num_micro_batches} "
            f"micro-batches, remat {self.remat}",
        ]
        if len(rows) < len(self.stages):
            lines.append("numbers of several stages are those of each")
        if self.description:
            lines.append(f"order of tasks: {self.description}")
        skips = [
            f"{k} to {to} ({_text(size)})"
            for k, stage in enumerate(self.stages)
            for to, size in stage.sends.items()
            if to != k + 1
        ]
        if skips:
            lines.append(f"skips from stage {', '.join(skips)} a micro-batch")
        if self.step_seconds is not None:
            lines.append(
                f"a step takes {self.step_seconds:.3g} s, of which transfers "
                f"between stages cost {self.transfer_share:.1%}"
            )
        return table.render(rows, lines, width=80, verdict=self._verdict())

    def _numbers(self, stage: StagePlan) -> dict[str, str]:
        return {
            "Layers": str(len(stage.layers)),
            **(
                {"Again": str(len(stage.recomputed))}
                if self.remat == AUTO_REMAT
                else {}
            ),
            "Parameters": f"{stage.parameters:,}",
            "Weights MiB": f"{stage.parameter_bytes / 2**20:,.1f}",
            "Activations MiB": f"{stage.activation_bytes / 2**20:,.1f}",
            "GFLOPs": f"{stage.flops / 1e9:,.2f}",
            "Boundary MiB": f"{stage.boundary_bytes / 2**20:,.2f}",
        }

    def _verdict(self) -> str:
        lines = [
            f"bubble {self.bubble:.1%}, step time "
            f"{self.relative_step_time:.3f} of one device's",
        ]
        if self.device_memory is not None:
            fits = "fits" if self.fits else "does not fit"
            lines.insert(
                0,
                f"{fits}: the fullest device needs "
                f"{_text(max(self.device_bytes))} of "
                f"{_text(self.device_memory)}",
            )
        if self.advice:
            lines.insert(1, self.advice)
        return "\n".join(lines)


def _text(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**30:,.2f} GiB"
