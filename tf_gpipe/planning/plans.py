"""`Plan` and its parts: the arguments of a pipeline, its memory and times.

This module imports no TensorFlow.
"""

import dataclasses
from typing import Any

from tf_gpipe.planning import plan_files
from tf_gpipe.planning import plan_table
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What one stage will need.

    Attributes:
        layers: List of the names of its layers.
        recomputed: List of the names of those that it recomputes, for all
            micro-batches or some of them.
        parameters: Integer, how many parameters it has.
        parameter_bytes: Integer, the bytes of weights, sums of gradients and
            optimizer slots. Of a weight that an earlier stage has, too, it has
            a sum of gradients and, on another device, a copy.
        activation_bytes: Integer, the bytes of activations at their peak.
        flops: Integer, floating-point operations of a micro-batch's forward
            pass.
        backward_flops: Integer, the operations of its backward pass.
        sends: Dictionary from each later stage to the bytes that this stage
            sends to it for a micro-batch. What a skip connection needs goes
            straight to the stage that uses it.

    Example:

    >>> layers = [keras.layers.Dense(8) for _ in range(4)]
    >>> first, last = tf_gpipe.plan(layers, (32, 8), num_stages=2).stages
    >>> first.parameters, first.sends  # to stage 1: 4 rows of 8 float32
    (144, {1: 128})
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
        """Integer, the bytes that it sends to others for a micro-batch."""
        return sum(self.sends.values())

    @property
    def bytes(self) -> int:
        """Integer, the bytes of its parameters and activations."""
        return self.parameter_bytes + self.activation_bytes


@dataclasses.dataclass(frozen=True)
class Rival:
    """One of the next best candidates of `tune`, with its step time.

    Attributes:
        words: String, a short description of its arguments.
        seconds: Float, its step time, measured if `tried`, else simulated.
        tried: Boolean, whether `seconds` were measured.
    """

    words: str
    seconds: float
    tried: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of a pipeline, and what they lead to.

    `tf_gpipe.plan` works out a plan for the arguments that it is given,
    `tf_gpipe.tune` one for those that it finds best. Models take either:
    `PipelinedSequential(layers, plan=plan)`, `PipelinedModel.from_model(model,
    plan=plan)`. `print(plan)` shows it as a table.

    Attributes:
        stages: List of `StagePlan`s.
        devices: List with the number of the device of each stage.
        device_activation_bytes: List with the activations of each device at
            their peak, which its stages may reach at different times.
        num_micro_batches: Integer.
        schedule: String, its name.
        description: String, how it was found, if it was searched.
        remat: String.
        bubble: Float, the share of the time that devices will be idle. Where
            nothing is known of their speed, operations are taken for time.
        device_idle: List with that share of each device.
        relative_step_time: Float, the time of a step relative to that of one
            device of the same speed without micro-batches or recomputation.
        step_seconds: Float, the time of a step; `None` where the speed of the
            devices is not known.
        transfer_share: Float, by which share of its time the transfers between
            stages lengthen a step.
        device_memory: Integer, bytes of each device, or a list with those of
            each one, or `None`.
        advice: String, the smallest change with which it would fit; empty
            where it fits.
        num_replicas: Integer, how many such pipelines share a mini-batch.
        device_names: List of TensorFlow device strings, such a list a replica
            if there are several; `None`: the visible accelerators.
        measured_seconds: Float, the time of a step that was tried, or `None`.
        rivals: List of `Rival`s, the next best choices of `tune`.
        reason: String, what `tune` has to say of its choice.
        tasks: The `tf_gpipe.Schedule`.
        memory_limit: That of `remat="auto"`, or `None`; where it is a share,
            of what the fullest device would take with this cut.
        batch_size: Integer, the rows that it is for, or `None`.
        input_shapes: List with the shape of each input of the model, without
            the rows.
        nominal_length: Integer, the size of the axes that the model's inputs
            leave open; a list if these have several sizes, `None` if there are
            none.

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
    device_memory: int | list[int] | None = None
    advice: str = ""
    description: str = ""
    device_idle: list[float] = dataclasses.field(default_factory=list)
    num_replicas: int = 1
    device_names: list | None = None
    measured_seconds: float | None = None
    rivals: list[Rival] = dataclasses.field(default_factory=list)
    reason: str = ""
    tasks: Schedule | None = None
    memory_limit: int | str | float | None = None
    batch_size: int | None = None
    input_shapes: list[list[int]] | None = None
    nominal_length: int | list[int] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Dictionary of the keyword arguments of `PipelinedSequential`.

        Raises:
            ValueError: If the layers that are recomputed are chosen for inputs
                of several sizes that the model leaves open.
        """
        length = self.nominal_length
        if isinstance(length, list):
            if self.remat == AUTO_REMAT:
                raise ValueError(
                    f"What this plan recomputes is for sizes of {length} that "
                    "the model leaves open, and no argument gives several: "
                    "give the sizes with `keras.Input`, and plan that model."
                )
            length = None
        return {
            "num_stages": len(self.stages),
            "num_micro_batches": self.num_micro_batches,
            "balance": [len(stage.layers) for stage in self.stages],
            "schedule": self._schedule,
            "remat": self.remat,
            "devices": self.device_names,
            **(
                {}
                if self.memory_limit is None
                else {
                    "memory_limit": self.memory_limit,
                    "batch_size": self.batch_size,
                }
            ),
            **({} if length is None else {"nominal_length": length}),
        }

    @property
    def _schedule(self) -> str | Schedule | None:
        """The name of the schedule if that says all of it, else itself.

        A model would search an order anew, and spread the stages over as many
        devices as there are; and users' schedules may have any name.
        """
        name = self.schedule
        if name not in schedules.NAMES or name in schedules.ANY_STAGES_A_DEVICE:
            return self.tasks
        try:
            same = schedules.get(name, len(self.stages), self.num_micro_batches)
        except ValueError:  # The name is for other numbers of stages.
            return self.tasks
        found = self.tasks is None or self.tasks.tasks == same.tasks
        return name if found else self.tasks

    @property
    def num_devices(self) -> int:
        """Integer, how many devices each replica has."""
        return len(self.device_activation_bytes)

    @property
    def device_bytes(self) -> list[int]:
        """List with the bytes of each device at its peak."""
        totals = list(self.device_activation_bytes)
        for device, stage in zip(self.devices, self.stages, strict=True):
            totals[device] += stage.parameter_bytes
        return totals

    @property
    def memories(self) -> list[int | None]:
        """List with the bytes that each device has; `None` if not known."""
        if isinstance(self.device_memory, list):
            return list(self.device_memory)
        return [self.device_memory] * self.num_devices

    @property
    def fits(self) -> bool:
        """Boolean, whether every device has enough memory."""
        return self.fits_with(1.0)

    def fits_with(self, share: float) -> bool:
        """Returns whether each device needs at most a share of its memory.

        Args:
            share: Float, from 0 to 1.

        Returns:
            Boolean.
        """
        return all(
            memory is None or size <= share * memory
            for size, memory in zip(
                self.device_bytes, self.memories, strict=True
            )
        )

    def save(self, path: Any) -> None:
        """Writes the plan into a file, as JSON.

        Args:
            path: Path of the file.

        Raises:
            ValueError: If it cannot be written.
        """
        plan_files.save(self, path)

    @classmethod
    def load(cls, path: Any) -> "Plan":
        """Returns the plan that `save` has written into a file.

        Args:
            path: Path of the file.

        Returns:
            A `Plan`.

        Raises:
            ValueError: If there is no such file, or it is damaged or of
                something else.

        Example:

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
        >>> layers = [keras.layers.Dense(8) for _ in range(4)]
        >>> tf_gpipe.plan(layers, (8, 8), num_stages=2).save(path)
        >>> tf_gpipe.Plan.load(path).arguments["balance"]
        [2, 2]
        """
        return plan_files.load(path, cls, StagePlan, Rival)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as a dictionary that JSON can hold.

        All fields but `tasks`, and also the properties that tell whether it
        fits.
        """
        found = plan_files.plain(self)
        for stage, own in zip(found["stages"], self.stages, strict=True):
            stage["boundary_bytes"] = own.boundary_bytes
        return {
            **found,
            "parameters": sum(stage.parameters for stage in self.stages),
            "fits": self.fits,
            "device_bytes": self.device_bytes,
        }

    def __str__(self) -> str:
        return plan_table.text(self)


def words(
    num_devices: int,
    num_replicas: int,
    num_stages: int,
    num_micro_batches: int,
    schedule: str,
    remat: str,
) -> str:
    """Returns a short description of a candidate's arguments."""
    if num_devices == 1:
        text = "one device" if num_replicas == 1 else "data parallelism"
        if num_replicas > 1:
            text += f" over {num_replicas} devices"
        if num_micro_batches > 1:
            text += f", M={num_micro_batches}"
        return f"{text}, remat {remat}"
    text = f"K={num_stages}, M={num_micro_batches}, {schedule}, remat {remat}"
    if num_stages != num_devices:
        text += f" on {num_devices} devices"
    if num_replicas > 1:
        text += f", {num_replicas} replicas"
    return text
