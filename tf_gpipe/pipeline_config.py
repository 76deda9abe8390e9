"""The arguments of a pipeline: checked, then resolved for this machine."""

import dataclasses
import numbers
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import batch_norm
from tf_gpipe import placement
from tf_gpipe import remat
from tf_gpipe import replicas
from tf_gpipe import schedules
from tf_gpipe.graph import Graph
from tf_gpipe.partition import balanced
from tf_gpipe.partition import costs
from tf_gpipe.schedule import Schedule

_BOUNDARY_DTYPES = (None, "bfloat16", "float16")


@dataclasses.dataclass
class PipelineConfig:
    """The arguments that pipelined models share; see `PipelinedSequential`.

    What is `None` depends on the layers and on the machine; see `resolve`.

    Raises:
        ValueError: If an argument is out of range or unknown.
    """

    num_stages: int | None
    num_micro_batches: int | None
    balance: str | Callable | Sequence[int]
    schedule: str | Schedule
    remat: str
    devices: Sequence[str] | Sequence[Sequence[str]] | None
    boundary_dtype: str | None = None

    def __post_init__(self):
        self.num_stages = _count("num_stages", self.num_stages)
        self.num_micro_batches = _count(
            "num_micro_batches", self.num_micro_batches
        )
        remat.check(self.remat)
        if self.boundary_dtype not in _BOUNDARY_DTYPES:
            raise ValueError(
                "`boundary_dtype` must be 'bfloat16', 'float16' or None. "
                f"Received: boundary_dtype={self.boundary_dtype!r}"
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
            schedules.get(self.schedule, 1, 1)
        if isinstance(self.balance, str) or not isinstance(
            self.balance, Iterable
        ):
            costs.check(self.balance)
        else:
            self.balance = _counts(self.balance)
            self.num_stages = self.num_stages or len(self.balance)
            if self.num_stages != len(self.balance):
                raise ValueError(
                    f"`balance` must have one layer count for each of the "
                    f"{self.num_stages} stages. Received: "
                    f"balance={self.balance}"
                )
        if isinstance(self.devices, str):
            raise ValueError(
                "`devices` must be a list of device strings, one a stage. "
                f"Received: devices={self.devices!r}"
            )
        if self.devices is not None:
            self.devices = list(self.devices)
            rows: list = [self.devices]
            if placement.is_grid(self.devices):
                rows = self.devices = [list(row) for row in self.devices]
            for row in rows:
                placement.assign(row, len(row))

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments, such that JSON can hold them."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
        if isinstance(self.schedule, Schedule):
            values["schedule"] = self.schedule.get_config()
        return values

    def schedule_of(self, num_layers: int, num_devices: int) -> Schedule:
        """Returns the schedule, of a number that is open decided.

        Args:
            num_layers: Integer, what there is to be cut into stages.
            num_devices: Integer, the devices that there are.

        Raises:
            ValueError: If the layers are too few, or the balance is not
                theirs.
        """
        num_stages = self.num_stages
        if num_stages is None:
            each = 2 if self.schedule == "interleaved" else 1
            num_stages = max(1, min(each * num_devices, num_layers))
        if num_stages > num_layers:
            raise ValueError(
                f"`num_stages` must be at most the number of layers. "
                f"Received: num_stages={num_stages}, {num_layers} layers"
            )
        balance = self.balance
        if isinstance(balance, list) and sum(balance) != num_layers:
            raise ValueError(
                "`balance` must place every layer: its counts must sum to "
                f"{num_layers}, the number of layers. Received: "
                f"balance={balance}, which sums to {sum(balance)}. "
                "balance='parameters' finds the counts for you."
            )
        num_devices = min(num_devices, num_stages)
        if self.schedule != "interleaved":
            num_devices = num_stages
        return schedules.get(
            self.schedule,
            num_stages,
            self.num_micro_batches or 4 * num_devices,
            num_devices,
        )

    def resolve(
        self,
        layers: Sequence[keras.Operation],
        strategy: tf.distribute.Strategy | None = None,
    ) -> "ResolvedConfig":
        """Returns what the arguments mean for these layers, here.

        Args:
            layers: List of the layers to be cut into stages, in the order
                in which they are called.
            strategy: The `tf.distribute` strategy of the model, or `None`.

        Returns:
            A `ResolvedConfig`.

        Raises:
            ValueError: If the layers or the devices are too few, or a layer
                cannot work on micro-batches.
        """
        num_replicas = replicas.count(strategy)
        if replicas.on_tpu(strategy) and self.devices is not None:
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
        schedule = self.schedule_of(len(layers), num_devices)
        for layer in layers:
            if isinstance(layer, keras.Layer):
                _check_stateless(layer)
                if schedule.num_micro_batches > 1:
                    batch_norm.check(layer)
        if replicas.on_tpu(strategy):
            cores = [
                tf.compat.v1.tpu.core(i) for i in range(len(schedule.tasks))
            ]
            rows = [cores] * num_replicas
        else:
            rows = placement.assign(
                self.devices, len(schedule.tasks), num_replicas
            )
        return ResolvedConfig(
            schedule,
            self.balance,
            self.remat,
            self.boundary_dtype,
            [[row[i] for row in rows] for i in schedule.devices],
        )


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """The arguments of a pipeline, with nothing left open."""

    schedule: Schedule
    balance: Any
    remat: str
    boundary_dtype: str | None
    devices: list[list[str]]  # of each stage, one a replica

    def counts(self, graph: Graph) -> list[int]:
        """Returns the number of calls of layers in each stage.

        Args:
            graph: `Graph` of built layers.
        """
        if isinstance(self.balance, list):
            return self.balance
        return balanced.counts(
            self.balance, graph, self.schedule, self.remat, self.devices[0][0]
        )


def _check_stateless(layer: keras.Layer) -> None:
    """Refuses layers that keep a state for each row of a batch."""
    for x in layer._flatten_layers():
        if isinstance(x, keras.layers.RNN) and x.stateful:
            raise ValueError(
                f"Layer '{x.name}' keeps states of the rows of a batch, which "
                "micro-batches divide. Received: stateful=True. Use False."
            )


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not _is_positive_integer(value):
        raise ValueError(
            f"`{name}` must be a positive integer. Received: {name}={value!r}"
        )
    return int(value)


def _counts(balance: Iterable) -> list[int]:
    counts = list(balance)
    if not all(map(_is_positive_integer, counts)):
        raise ValueError(
            "`balance` must be a list of positive integers, the number of "
            f"layers of each stage. Received: balance={counts}"
        )
    return [int(count) for count in counts]


def _is_positive_integer(value: Any) -> bool:
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and int(value) >= 1
    )
