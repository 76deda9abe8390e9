"""The arguments of a pipeline: checked, then resolved for this machine."""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe.devices import placement
from tf_gpipe.devices import replicas
from tf_gpipe.devices import sharing
from tf_gpipe.partition import balanced
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import lopsided
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import check_remat


@dataclasses.dataclass
class PipelineConfig:
    """The arguments that pipelined models share; see `PipelinedSequential`.

    `resolve` decides those that are `None`, for the layers and the machine.

    Raises:
        ValueError: If an argument is out of range or unknown.
    """

    num_stages: int | None
    num_micro_batches: int | None
    balance: str | Callable | Sequence[int] | None
    schedule: str | Schedule
    remat: str
    devices: Sequence[str] | Sequence[Sequence[str]] | None
    boundary_dtype: str | None = None
    nominal_length: int = layer_costs.NOMINAL_LENGTH
    memory_limit: int | str | float | None = None
    batch_size: int | None = None

    def __post_init__(self):
        for name in (
            "num_stages",
            "num_micro_batches",
            "nominal_length",
            "batch_size",
        ):
            value = getattr(self, name)
            if value is None and name != "nominal_length":
                continue
            setattr(self, name, checks.positive_integer(name, value))
        check_remat(self.remat)
        self._check_limit()
        checks.one_of(
            "boundary_dtype",
            self.boundary_dtype,
            ("bfloat16", "float16", None),
        )
        if isinstance(self.schedule, Schedule):
            self.num_stages = self.num_stages or self.schedule.num_stages
            self.num_micro_batches = (
                self.num_micro_batches or self.schedule.num_micro_batches
            )
            schedules.get(
                self.schedule, self.num_stages, self.num_micro_batches
            )
        else:
            schedules.check_name(self.schedule)
            if self.num_stages is not None:
                # Refuses numbers of stages that are wrong for any devices.
                schedules.num_devices_of(self.schedule, self.num_stages)
        if isinstance(self.balance, str) or not isinstance(
            self.balance, Iterable
        ):
            balanced.check(self.balance)
        else:
            self._check_counts(
                checks.items(self.balance, balanced.expected(self.balance))
            )
        self.devices = placement.listed(self.devices)
        if self.devices is not None:
            rows: list = [self.devices]
            if placement.is_grid(self.devices):
                rows = self.devices
            for row in rows:
                placement.assign(row, len(row))

    def _check_limit(self) -> None:
        if self.remat != AUTO_REMAT:
            for name in ("memory_limit", "batch_size"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"`{name}` is for remat='auto', which recomputes as "
                        f"much as it must. Received: {name}={value!r}, "
                        f"remat={self.remat!r}"
                    )
            return
        if self.memory_limit is None:
            raise ValueError(
                "remat='auto' needs a `memory_limit`: bytes of a device as "
                "an integer or as a string such as '8GB', or a share of the "
                "activations that the fullest device takes with "
                "remat='never', such as 0.5. Received: memory_limit=None"
            )
        self.memory_limit = MemoryLimit.of(self.memory_limit).given

    def _check_counts(self, counts: list) -> None:
        if not all(map(checks.is_positive_integer, counts)):
            raise ValueError(
                "`balance` must be a list of positive integers, the number of "
                f"layers of each stage. Received: balance={counts}"
            )
        self.balance = [int(count) for count in counts]
        self.num_stages = self.num_stages or len(counts)
        if self.num_stages != len(counts):
            raise ValueError(
                f"`balance` must have one layer count for each of the "
                f"{self.num_stages} stages. Received: balance={self.balance}"
            )

    def schedule_of(
        self,
        num_layers: int,
        num_devices: int,
        layers: Sequence = (),
        rows: int | None = None,
    ) -> Schedule:
        """Returns the schedule, with defaults for numbers that were not given.

        In place of `"auto"` it is 1F1B with neighbouring stages on a device:
        the search, which keeps within its memory, needs the costs of stages,
        which are known once the model is cut.

        Args:
            num_layers: Integer, the number of layer calls.
            num_devices: Integer, the devices of a replica.
            layers: The layers, which an error names if they are too few.
            rows: Integer, the most micro-batches; by default as many as can be
                traced.

        Raises:
            ValueError: If there are fewer layers than stages, or the counts of
                `balance` do not sum to their number.
        """
        num_stages = self.num_stages
        if num_stages is None:
            num_stages = self._default_stages(num_layers, num_devices)
        if num_stages > num_layers:
            raise ValueError(
                f"`num_stages` must be at most the number of layers. "
                f"Received: num_stages={num_stages}, {num_layers} layers."
                f"{lopsided.uncut(layers)}"
            )
        balance = self.balance
        if isinstance(balance, list) and sum(balance) != num_layers:
            raise ValueError(
                "`balance` must place every layer: its counts must sum to "
                f"{num_layers}, the number of layers. Received: "
                f"balance={balance}, which sums to {sum(balance)}. "
                "Without `balance` they are found for you."
            )
        num_devices = schedules.num_devices_of(
            self.schedule, num_stages, num_devices
        )
        number = schedules.num_with_rows(
            self.schedule,
            self.num_micro_batches or 4 * num_devices,
            schedules.most_rows(num_stages) if rows is None else rows,
        )
        if self.schedule == schedules.AUTO:
            first = schedules.neighbouring(num_stages, number, num_devices)
            return Schedule(first.tasks, schedules.AUTO)
        return schedules.get(self.schedule, num_stages, number, num_devices)

    def _default_stages(self, num_layers: int, num_devices: int) -> int:
        """Returns one stage a device, or two if the schedule interleaves."""
        num_devices = max(1, min(num_devices, num_layers))
        if self.schedule in schedules.TWO_STAGES_A_DEVICE:
            return 2 * min(num_devices, max(1, num_layers // 2))
        several = self.schedule in schedules.ANY_STAGES_A_DEVICE
        each = 2 if several and 2 * num_devices <= num_layers else 1
        return each * num_devices

    def devices_here(
        self,
        name: str,
        devices: Any,
        strategy: tf.distribute.Strategy | None,
    ) -> Any:
        """Returns devices of this machine for the stages of a saved model.

        Args:
            name: String, the model's name, for the warning that some of
                `devices` are missing here.
            devices: The user's `devices`, or those in the model's file.
            strategy: The `tf.distribute.Strategy` under which it is loaded.
        """
        devices = placement.listed(devices)
        num_replicas = replicas.count(strategy)
        if self.num_stages is None or replicas.on_tpu(strategy):
            return devices
        num_devices = schedules.num_devices_of(self.schedule, self.num_stages)
        if self.schedule in schedules.ANY_STAGES_A_DEVICE:
            here = len(placement.accelerators()) // num_replicas
            num_devices = max(
                d
                for d in range(1, self.num_stages + 1)
                if d == 1 or (d <= here and self.num_stages % d == 0)
            )
            if not devices and num_devices < min(here, self.num_stages):
                return placement.accelerators()[: num_devices * num_replicas]
        return sharing.devices_here(name, devices, num_devices, num_replicas)

    def resolve(
        self,
        num_layers: int,
        strategy: tf.distribute.Strategy | None = None,
        layers: Sequence = (),
    ) -> tuple[Schedule, list[list[str]]]:
        """Returns the schedule, and the devices of each stage, one a replica.

        Args:
            num_layers: Integer, the number of layer calls.
            strategy: The `tf.distribute.Strategy` whose replicas each get a
                pipeline.
            layers: The layers, which an error names if they are too few.

        Raises:
            ValueError: If the layers or the devices are too few.
        """
        num_replicas = replicas.count(strategy)
        on_tpu = replicas.on_tpu(strategy)
        if on_tpu and self.devices is not None:
            raise ValueError(
                "On TPUs the strategy's `DeviceAssignment` says which cores "
                "are the stages of a replica. Leave `devices` out. Received: "
                f"devices={self.devices}"
            )
        if placement.is_grid(self.devices):
            num_devices = min(map(len, self.devices or ()))
        elif self.devices:
            num_devices = len(self.devices)
        else:
            num_devices = len(placement.accelerators()) // num_replicas
        schedule = self.schedule_of(num_layers, num_devices, layers)
        # With no device for a replica, `placement.assign` below says how many
        # are missing.
        if (
            self.schedule in schedules.TWO_STAGES_A_DEVICE
            and num_devices
            and not on_tpu
        ):
            self._check_two_each(schedule, num_devices)
        num_devices = len(schedule.tasks)
        if on_tpu:
            cores = [tf.compat.v1.tpu.core(i) for i in range(num_devices)]
            rows = [cores] * num_replicas
        else:
            rows = placement.assign(self.devices, num_devices, num_replicas)
        return schedule, [[row[i] for row in rows] for i in schedule.devices]

    def _check_two_each(self, schedule: Schedule, num_devices: int) -> None:
        """Refuses too few devices for two stages each.

        With `num_stages`, `devices` that are not used are refused, too.
        """
        needed = len(schedule.tasks)
        # Without `num_stages` the layers may be too few for all devices.
        unused = self.num_stages and self.devices and num_devices > needed
        if num_devices >= needed and not unused:
            return
        raise ValueError(
            f"Schedule '{self.schedule}' has two stages on each device: "
            f"num_stages={schedule.num_stages} need {needed} devices. "
            f"Received {num_devices}: devices={self.devices}. Use num_stages="
            f"{2 * num_devices}, or name a device more than once to let more "
            "stages share it."
        )
