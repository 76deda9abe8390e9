"""The `Plan` of a pipeline whose arguments are all decided."""

import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras

from tf_gpipe.partition.stage_costs import StageCosts
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.plans import Plan
from tf_gpipe.planning.plans import StagePlan
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.memory import stage_peaks
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import ranges


class StageTimes(NamedTuple):
    """The times of each stage for a micro-batch, in seconds or FLOPs.

    Attributes:
        forward: List, of the forward pass.
        backward: List, of the backward pass, without recomputation.
        weights: List, of the part of `backward` for gradients of weights.
        sending: List, what each pass takes longer as the stage sends to other
            processes and receives from them.
        transfer: Dictionary from pairs of stages to the time of a transfer.
        before: List, of recomputation before the backward pass.
        within: List, of recomputation within the backward pass.
    """

    forward: list[float]
    backward: list[float]
    weights: list[float]
    sending: list[float]
    transfer: Mapping[tuple[int, int], float]
    before: list[float]
    within: list[float]

    def slower(self, factor: float) -> "StageTimes":
        """Returns the times of devices that take `factor` times as long."""
        found: dict[str, Any] = {
            name: [factor * x for x in getattr(self, name)]
            for name in self._fields
            if name != "transfer"
        }
        return self._replace(**found)

    def passes(self, transfers: bool = True) -> tuple[list, list]:
        """Returns how long forward and backward passes keep a device busy.

        Two lists. Recomputation before a backward pass comes on top.
        """
        sending = [x if transfers else 0.0 for x in self.sending]
        return (
            [sum(x) for x in zip(self.forward, sending, strict=True)],
            [
                sum(x)
                for x in zip(self.backward, self.within, sending, strict=True)
            ],
        )

    def simulated(
        self, schedule: Schedule, remat: str, transfers: bool = True
    ) -> Execution:
        """Simulates a step."""
        forward, backward = self.passes(transfers)
        return simulate(
            schedule,
            forward,
            backward,
            recompute=self.before,
            transfer=self.transfer if transfers else 0.0,
            remat=remat,
            weights=self.weights,
        )


def transfers(
    costs: Sequence[StageCosts],
    bandwidth: float | None = None,
    latency: float = 0.0,
) -> dict[tuple[int, int], float]:
    """Returns the seconds of the transfers between stages, by their numbers.

    One for each pair of stages, however many tensors it has.
    """
    return {
        (k, to): latency + size / (bandwidth or math.inf)
        for k, stage in enumerate(costs)
        for to, size in stage.sends.items()
    }


def estimate(
    layers: KnownLayers,
    costs: Sequence[StageCosts],
    counts: Sequence[int],
    schedule: Schedule,
    remat: str,
    times: StageTimes,
    recomputed: Sequence[Sequence[range]] | None = None,
) -> Plan:
    """Returns the plan of a pipeline, in the unit of `times`.

    `recomputed` has, for each stage, ranges of indices of the calls that it
    recomputes. By default it recomputes all, if `remat` says so.
    """
    sizes = [x.of_micro_batches(schedule.num_micro_batches) for x in costs]
    simulation = times.simulated(schedule, remat)
    makespan = simulation.makespan
    without = times.simulated(schedule, remat, transfers=False).makespan
    passes = sum(times.forward + times.backward)
    alone = schedule.num_micro_batches * passes
    return Plan(
        stages=_stages(
            layers, counts, costs, schedule, remat, sizes, recomputed
        ),
        devices=schedule.devices,
        device_activation_bytes=[
            int(x) for x in device_peaks(schedule, remat, sizes)
        ],
        num_micro_batches=schedule.num_micro_batches,
        schedule=schedule.name,
        description=schedule.description,
        tasks=schedule,
        remat=remat,
        bubble=simulation.bubble,
        relative_step_time=makespan / alone if alone else 1.0,
        step_seconds=makespan,
        device_idle=_idle(simulation, len(schedule.tasks)),
        transfer_share=1 - without / makespan if makespan else 0.0,
        input_shapes=[
            list(x.shape[1:])
            for x in keras.tree.flatten([v.spec for v in layers.graph.inputs])
        ],
        nominal_length=layers.nominal_length,
    )


def _idle(simulation: Execution, num_devices: int) -> list[float]:
    """Returns the share of the step in which each device is idle."""
    busy = [*simulation.busy, *[0.0] * num_devices][:num_devices]
    whole = simulation.makespan
    return [round(1 - x / whole, 12) if whole else 0.0 for x in busy]


def _stages(
    layers, counts, costs, schedule, remat, sizes, recomputed
) -> list[StagePlan]:
    """Returns the `StagePlan` of each stage."""
    stages = []
    peaks = stage_peaks(schedule, remat, sizes)
    parameters = layers.parameters.of_stages(counts, schedule.devices)
    for k, (own, cost) in enumerate(zip(ranges(counts), costs, strict=True)):
        stages.append(
            StagePlan(
                layers=layers.names[own],
                recomputed=_recomputed(
                    layers.names[own],
                    schedule.recomputed_share(k, remat) * cost.differentiated,
                    recomputed and recomputed[k],
                ),
                parameters=sum(
                    math.prod(w.shape)
                    for w in itertools.chain(*layers.weights[own])
                ),
                parameter_bytes=parameters[k],
                activation_bytes=int(peaks[k]),
                flops=cost.flops,
                backward_flops=cost.backward_flops,
                sends=cost.sends,
            )
        )
    return stages


def _recomputed(names, share, parts) -> list[str]:
    """Returns the names of the layers that a stage recomputes."""
    if not share:
        return []
    if parts is None:
        return names
    return [names[i] for part in parts for i in part]
