"""`tf_gpipe.plan`: memory and time of a pipeline before it is allocated."""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import checks
from tf_gpipe import progress
from tf_gpipe.partition import auto_remat
from tf_gpipe.partition import balanced
from tf_gpipe.partition import sizes
from tf_gpipe.partition import stage_costs
from tf_gpipe.partition.config import PipelineConfig
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.planning import speeds
from tf_gpipe.planning.estimates import StageTimes
from tf_gpipe.planning.estimates import estimate
from tf_gpipe.planning.estimates import transfers
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.plans import Plan
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage import call_overrides
from tf_gpipe.stage import seeds


@progress.shown(after=progress.PATIENCE)
@seeds.unchanged()
def plan(
    layers: Sequence[keras.Layer] | keras.Model,
    input_spec: Any,
    *,
    num_stages: int,
    num_micro_batches: int | None = None,
    schedule: str | Schedule = "1f1b",
    num_devices: int | None = None,
    balance: str | Callable | Sequence[int] | None = None,
    remat: str = "always",
    memory_limit: int | str | float | None = None,
    optimizer: str | keras.optimizers.Optimizer = "adam",
    dtype_policy: str | keras.DTypePolicy | None = None,
    device_memory: int | str | None = None,
    device_flops: float | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
) -> Plan:
    """Returns what each stage of a pipeline will need, and allocates nothing.

    The layers are copied without values for their weights, and traced in
    their own dtype policies. The activations of a stage at their peak are what
    the schedule keeps of several micro-batches, and what the backward pass of
    one micro-batch needs while it runs.

    Args:
        layers: List of Keras layers, a `keras.Sequential`, or a functional
            `keras.Model`.
        input_spec: `keras.KerasTensor`, `tf.TensorSpec` or shape (of float32)
            with the size of a mini-batch first; a nested structure of them
            for several inputs.
        num_stages: Integer K.
        num_micro_batches: Integer M. Defaults to 4 a device.
        schedule: Name of a schedule, such as `"1f1b"`, or a
            `tf_gpipe.Schedule`; those that `PipelinedSequential` takes.
        num_devices: Integer, over which the interleaved schedules and
            `"auto"` spread the stages. Defaults to one a stage.
        balance: List of K layer counts, `"parameters"`, `"flops"`, `"memory"`,
            or a function `cost(layer, input_shape)`. Not `"time"`, which would
            have to be measured.
        remat: Which micro-batches compute their activations again:
            `"always"`, `"except_last"`, `"never"` or `"auto"`.
        memory_limit: What a device may take, with `remat="auto"`: an integer
            of bytes, or a string such as `"8GB"`, for weights, the sums of
            their gradients, the optimizer's slots and activations; or a
            float, a share of the activations that the fullest device takes
            with `remat="never"`.
        optimizer: Keras optimizer, or its name; its slots are counted.
        dtype_policy: Keras dtype policy, or its name, of the layers that have
            the global one. Defaults to the global one.
        device_memory: Integer, the bytes that a device has for weights and
            activations, or a string such as `"16GB"`.
        device_flops: Float, the operations a second that a device achieves,
            for `Plan.step_seconds`.
        bandwidth: Float, bytes a second from a stage to the next one; needs
            `device_flops`. Defaults to `None`: transfers take no time.
        latency: Float, seconds that each transfer takes in addition.

    Returns:
        A `Plan`. If it does not fit in `device_memory`, `Plan.advice` tells the
        smallest change that would help.

    Raises:
        ValueError: If an argument is not valid, the batch size is not known,
            the costs of a layer cannot be found, or a stage cannot keep within
            the `memory_limit` of `remat="auto"`.
        TypeError: If an argument is of a wrong type.

    Example:

    >>> layers = [keras.layers.Dense(64) for _ in range(8)]
    >>> found = plan(layers, (32, 64), num_stages=2, num_micro_batches=8)
    >>> [stage.parameters for stage in found.stages]  # the last recomputes none
    [12480, 20800]
    """
    call_overrides.check(layers)
    config = PipelineConfig(
        num_stages,
        num_micro_batches,
        balance,
        schedule,
        remat,
        devices=None,
        memory_limit=memory_limit,
    )
    if config.num_stages is None:
        checks.positive_integer("num_stages", num_stages)
    if num_devices is not None and (
        config.schedule not in schedules.ANY_STAGES_A_DEVICE
        or checks.positive_integer("num_devices", num_devices)
        > (config.num_stages or 0)
    ):
        raise ValueError(
            "`num_devices` is for schedule='interleaved', "
            "'interleaved_zero_bubble' and 'auto', and at most `num_stages`. "
            "Others have a device for each stage, or for each two. Received: "
            f"num_devices={num_devices}, num_stages={num_stages}, "
            f"schedule={schedule!r}"
        )
    if config.balance == "time":
        raise ValueError(
            "A plan measures nothing, as balance='time' would. Use 'flops'."
        )
    if device_memory is not None:
        device_memory = sizes.to_bytes(device_memory, "device_memory")
    if device_flops is not None:
        device_flops = speeds.flops(device_flops)
    connection = speeds.connection(bandwidth, latency)
    if device_flops is None and any(connection.values()):
        raise ValueError(
            "What transfers cost depends on the speed of the devices: "
            "`bandwidth` and `latency` need `device_flops`."
        )
    planner = _Planner(
        KnownLayers(layers, input_spec, optimizer, dtype_policy),
        num_devices,
        device_memory,
        device_flops,
        connection,
    )
    found = planner.plan(config)
    if found.fits:
        return found
    return dataclasses.replace(found, advice=planner.advice(config, found))


class _Planner:
    """Plans pipelines of the same layers, mini-batch and devices."""

    def __init__(
        self,
        layers,
        num_devices,
        device_memory,
        device_flops,
        connection,
    ):
        self._layers = layers
        self._num_devices = num_devices
        self._device_memory = device_memory
        self._device_flops = device_flops
        self._connection = connection
        # Results of `balanced.costs_of_calls`, by the remat mode.
        self._balanced: dict[str, dict[str, list[float]]] = {}

    def plan(self, config: PipelineConfig) -> Plan:
        """Returns the plan for a config, whether it fits or not."""
        layers = self._layers
        rows, num_stages = layers.rows, config.num_stages or 1
        if config.num_micro_batches is None:
            rows = min(rows, schedules.most_rows(num_stages))
        schedule = config.schedule_of(
            len(layers.graph.nodes), self._num_devices or num_stages, rows=rows
        )
        counts, costs, decided = self._costs(config, schedule)
        transfer = transfers(costs, **self._connection)
        # Without a speed, the time of one FLOP is the unit.
        unit = self._device_flops or 1.0
        if config.schedule == schedules.AUTO:
            schedule = (
                decided.ordered(schedule, transfer, unit)
                if decided
                else stage_costs.searched(
                    costs,
                    schedule.num_micro_batches,
                    len(schedule.tasks),
                    config.remat,
                    transfer,
                    unit,
                )
            )
        found = estimate(
            layers,
            costs,
            counts,
            schedule,
            config.remat,
            StageTimes(
                [x.flops / unit for x in costs],
                [x.backward_flops / unit for x in costs],
                [x.weight_flops / unit for x in costs],
                [0.0] * len(costs),
                transfer,
                [x.before_flops / unit for x in costs],
                [x.within_flops / unit for x in costs],
            ),
            decided and decided.parts,
        )
        return dataclasses.replace(
            found,
            device_memory=self._device_memory,
            step_seconds=found.step_seconds if self._device_flops else None,
            memory_limit=decided and decided.given,
            batch_size=layers.rows if decided else None,
        )

    def advice(self, config: PipelineConfig, found: Plan) -> str:
        """Returns the smallest change with which a plan would fit, as text."""
        for change in self._changes(config, found):
            with contextlib.suppress(TooLittleMemoryError):
                if self.plan(dataclasses.replace(config, **change)).fits:
                    words = ", ".join(f"{k}={v!r}" for k, v in change.items())
                    return f"It would fit with {words}."
        return (
            "Nothing that the planner tries would make it fit: the largest "
            "layer alone needs more, or the mini-batch is too large."
        )

    def _changes(self, config, found):
        """Returns changes of arguments that may help, the smallest first."""
        if found.remat == AUTO_REMAT:
            return [{"memory_limit": found.device_memory}]
        changes: list[dict[str, Any]] = []
        named = not isinstance(config.schedule, Schedule)
        m, most = found.num_micro_batches, schedules.most_rows
        while named and (m := 2 * m) <= min(
            self._layers.rows, most(len(found.stages))
        ):
            changes.append({"num_micro_batches": m})
        if found.remat != "always":
            again = {"remat": "always"}
            changes += [again, *({**x, **again} for x in changes)]
        cut_anew = named and not isinstance(config.balance, list)
        if cut_anew and config.schedule not in schedules.ANY_STAGES_A_DEVICE:
            each = 2 if config.schedule in schedules.TWO_STAGES_A_DEVICE else 1
            changes += [
                {"num_stages": k, "remat": "always"}
                for k in range(
                    len(found.stages) + each,
                    len(self._layers.graph.nodes) + 1,
                    each,
                )
                if (config.num_micro_batches or 1) <= most(k)
            ]
        return changes

    def _costs(self, config, schedule):
        """Returns the cut, its `StageCosts`, and the `AutoRemat` or `None`."""
        layers = self._layers
        rows = layers.micro_batch(schedule.num_micro_batches)
        if config.remat != AUTO_REMAT:
            counts = self._counts(config, schedule)
            return counts, layers.stages(counts, rows), None
        decided = auto_remat.decided(
            layers.recomputation(
                rows, schedule, MemoryLimit.of(config.memory_limit)
            ),
            config.balance,
            lambda: self._counts(config, schedule),
        )
        return decided.counts, decided.costs, decided

    def _counts(self, config, schedule):
        """Returns the number of calls in each stage, by `config.balance`."""
        if isinstance(config.balance, list):
            return config.balance
        if schedule.num_stages == 1 and config.balance is None:
            return [len(self._layers.graph.nodes)]
        # The same for any number of stages, which `_changes` varies.
        if config.remat not in self._balanced:
            balance = config.balance
            if callable(balance):

                def balance(layer, shape):
                    return config.balance(self._layers.original(layer), shape)

            self._balanced[config.remat] = balanced.costs_of_calls(
                balance,
                self._layers.graph,
                config.remat,
                weights=self._layers.weights,
            )
        return balanced.counts(
            config.balance,
            self._layers.graph,
            schedule,
            config.remat,
            costs=self._balanced[config.remat],
        )
