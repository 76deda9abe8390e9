"""What the stages of a cut recompute, to fit into the memory of their devices.

As in AdaPipe (Sun et al., ASPLOS 2024), each stage recomputes just as much as
it must.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_gpipe.partition.call_costs import LayerCosts
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.partition.parameter_bytes import ParameterBytes
from tf_gpipe.partition.recomputed import Recomputation
from tf_gpipe.partition.recomputed import StageCalls
from tf_gpipe.partition.stage_costs import StageCosts
from tf_gpipe.partition.stage_costs import find
from tf_gpipe.partition.stage_costs import searched
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import peak_activations
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.graph import ranges

# How many shares are tried where several stages divide a device's memory.
_NUM_SHARES = 24


@dataclasses.dataclass(frozen=True)
class AutoRemat:
    """A cut, and the calls that its stages recompute.

    Attributes:
        counts: List of the number of calls in each stage.
        parts: For each stage, ranges of indices of its calls that are
            recomputed; the calls of a range are recomputed together.
        costs: List of the `StageCosts`.
        limit: Bytes that each device may use; for activations alone where the
            memory limit is a share of these.
        given: The `memory_limit` with which these counts lead to the same
            parts: the user's, or `limit` as a share of the bytes that this cut
            takes without recomputation.
        fixed: List of the bytes of each stage's weights, gradients and slots
            that count for the limit.
    """

    counts: list[int]
    parts: tuple[tuple[range, ...], ...]
    costs: list[StageCosts]
    limit: float
    given: Any
    fixed: list[int]

    def ordered(
        self,
        schedule: Schedule,
        transfer: Mapping[tuple[int, int], float],
        device_flops: float = 1.0,
        num_sharing: int = 1,
    ) -> Schedule:
        """Returns the order of tasks that is searched within the limit.

        Args:
            schedule: The `Schedule` that has been fitted to the limit. Its
                order is taken if none is found.
            transfer: As of `stage_costs.searched`.
            device_flops: As of `stage_costs.searched`.
            num_sharing: Integer, how many of the schedule's devices share the
                memory of one.
        """
        try:
            return searched(
                self.costs,
                schedule.num_micro_batches,
                len(schedule.tasks),
                AUTO_REMAT,
                transfer,
                device_flops,
                self.limit / num_sharing,
                self.fixed,
            )
        except ValueError:
            return Schedule(
                schedule.tasks,
                schedules.AUTO,
                "that of '1f1b', which keeps within the limit",
            )


class FittedRemat:
    """Decides what is recomputed, for any cut of a model.

    Args:
        graph: `Graph` of built layers.
        traces: The `LayerCosts` of its calls.
        size: Function that returns the bytes of a `Value`.
        parameters: `ParameterBytes`, counted unless the limit is a share.
        schedule: The `Schedule`, even if a better one is searched later for
            the costs of the stages.
        devices: A name or number for each stage; stages with the same one
            share a device.
        limit: `MemoryLimit`.
        work: For each call, its time without recomputation and the time that
            recomputing it adds. Defaults to FLOPs.

    Attributes:
        graph: As given.
        size: As given.
        work: As given, or the FLOPs.
        num_stages: Integer, how many stages the schedule has.
    """

    def __init__(
        self,
        graph: Graph,
        traces: Sequence[LayerCosts],
        size: Callable[[Value], int],
        parameters: ParameterBytes | None,
        schedule: Schedule,
        devices: Sequence,
        limit: MemoryLimit,
        work: Sequence[tuple[float, float]] | None = None,
    ):
        self.graph, self.size = graph, size
        self._traces = traces
        self._parameters = None if limit.is_share else parameters
        self._schedule = schedule
        self.num_stages = schedule.num_stages
        # As the order that is searched later may do.
        self._splits = bool(schedule.split) or schedule.name == schedules.AUTO
        self._devices = list(devices)
        self._limit = limit
        if work is None:
            work = [
                (x.forward_flops + x.backward_flops, x.forward_flops)
                for x in traces
            ]
        self.work = work
        # The choices of a stage, by its first call and the one after its last.
        self._choices: dict[tuple[int, int], list[Recomputation]] = {}

    def with_counts(self, counts: Sequence[int]) -> AutoRemat:
        """Decides what is recomputed with a given cut.

        Raises:
            TooLittleMemoryError: If a device has too little memory.
        """
        return self.within(list(counts), self.limit_in_bytes(list(counts)))

    def limit_in_bytes(self, counts: list[int]) -> float:
        """Returns the limit in bytes, which as a share depends on the cut."""
        if not self._limit.is_share:
            return self._limit.value
        return self._limit.value * self._bytes_without_remat(counts)

    def _bytes_without_remat(self, counts: list[int]) -> float:
        """Returns the fullest device's activation bytes with `"never"`."""
        never = find(self.graph.parts(counts), self._traces, self.size)
        peaks = self._peaks(never, "never", [0] * len(counts))
        return max(peaks.values())

    def within(self, counts: list[int], limit: float) -> AutoRemat:
        """Decides what a cut recomputes, with `limit` bytes on each device."""
        calls = ranges(counts)
        parts = self.graph.parts(counts)
        fixed = [0] * len(counts)
        if self._parameters is not None:
            fixed = self._parameters.of_stages(counts, self._devices)
        plain = find(parts, self._traces, self.size)
        chosen: dict[int, Recomputation] = {}
        refused: list[TooLittleMemoryError] = []
        for device in dict.fromkeys(self._devices):
            own = [k for k, x in enumerate(self._devices) if x == device]
            try:
                chosen |= self._of_device(
                    own, parts, calls, plain, fixed, limit
                )
            except TooLittleMemoryError as error:
                refused.append(error)
        if refused:
            # With the limit that this error asks for, all devices fit.
            raise max(refused, key=lambda x: x.least)
        return AutoRemat(
            counts,
            tuple(chosen[k].parts for k in range(len(counts))),
            [
                x.recomputing(chosen[k], self._splits)
                for k, x in enumerate(plain)
            ],
            limit,
            self._limit_for_cut(counts, limit),
            fixed,
        )

    def seconds(
        self, counts: Sequence[int], found: AutoRemat | None = None
    ) -> list[float]:
        """Returns the time of each stage of a cut for a micro-batch.

        Args:
            counts: List of the number of calls in each stage.
            found: `AutoRemat` of this cut. By default nothing is recomputed.
        """
        times = []
        for k, calls in enumerate(ranges(counts)):
            own = self.work[calls]
            times.append(sum(x for x, _ in own))
            for part in found.parts[k] if found else ():
                times[k] += sum(
                    again for _, again in own[part.start : part.stop]
                )
        return times

    def _limit_for_cut(self, counts: list[int], limit: float) -> Any:
        """Returns the `memory_limit` that is `limit` bytes for this cut."""
        if not self._limit.is_share or limit == self.limit_in_bytes(counts):
            return self._limit.given
        # Rounded up, so that the same choices fit.
        return min(1.0, limit / self._bytes_without_remat(counts) * (1 + 1e-12))

    def _peaks(self, costs, remat, fixed) -> dict:
        """Returns the peak bytes of each device."""
        number = self._schedule.num_micro_batches
        own: dict = {}
        for k, (device, cost) in enumerate(
            zip(self._devices, costs, strict=True)
        ):
            size = cost.of_micro_batches(number, fixed[k])
            own.setdefault(device, {})[k] = size
        return {
            device: peak_activations(self._schedule, remat, x)
            for device, x in own.items()
        }

    def _of_device(
        self, own, parts, calls, plain, fixed, limit
    ) -> dict[int, Recomputation]:
        """Returns the choice of each stage in `own`, those of one device."""
        choices = {k: self._choices_of(parts[k], calls[k]) for k in own}

        def peak(stages: dict[int, Recomputation]) -> float:
            return peak_activations(
                self._schedule,
                AUTO_REMAT,
                {
                    k: self._sizes(plain[k], choice, fixed[k])
                    for k, choice in stages.items()
                },
            )

        alone = {k: [peak({k: x}) for x in choices[k]] for k in own}

        def within(share: float) -> dict[int, Recomputation]:
            """Returns, for each stage, the choice of least work in its share.

            That is a share of the bytes of its first choice, with the least
            work; a stage that cannot fit takes its least memory. A stage alone
            on its device has the whole limit.
            """
            found = {}
            for k in own:
                most = limit if len(own) == 1 else share * alone[k][0]
                pairs = zip(choices[k], alone[k], strict=True)
                fits = next((x for x, size in pairs if size <= most), None)
                least = alone[k].index(min(alone[k]))
                found[k] = fits or choices[k][least]
            return found

        least = peak(within(0.0))
        if least > limit:
            raise self._too_little(own, least, limit, fixed)
        for share in range(_NUM_SHARES, -1, -1):
            found = within(share / _NUM_SHARES)
            if peak(found) <= limit:
                break
        return found

    def _choices_of(self, part: Graph, calls: slice) -> list[Recomputation]:
        """Returns the choices of the stage with these calls, cached."""
        key = calls.start, calls.stop
        if key not in self._choices:
            self._choices[key] = StageCalls(
                part,
                self._traces[calls],
                self.size,
                [again for _, again in self.work[calls]],
            ).choices()
        return self._choices[key]

    def _sizes(self, costs: StageCosts, choice: Recomputation, fixed: float):
        found = costs.recomputing(choice, self._splits)
        return found.of_micro_batches(self._schedule.num_micro_batches, fixed)

    def _too_little(self, own, least, limit, fixed) -> TooLittleMemoryError:
        stages = " and ".join(f"stage {k}" for k in own)
        weights = ""
        if not self._limit.is_share:
            weights = (
                f", {sum(fixed[k] for k in own):,.0f} of it for weights, "
                "gradients and the optimizer"
            )
        repair = "more stages, more micro-batches"
        if self._splits:
            # With split backward passes, recomputed activations live until the
            # gradients of the weights are computed, later.
            repair += ", schedule='1f1b' (whose backward passes are not split)"
        return TooLittleMemoryError(
            f"The memory limit is too low for {stages}, which with all that "
            f"can be recomputed {'take' if len(own) > 1 else 'takes'} "
            f"{least:,.0f} bytes{weights}. A device may take {limit:,.0f}. "
            f"Received: memory_limit={self._limit.given!r}. Use {repair}, "
            "the default `balance` (which cuts the model for the limit), or "
            "a higher limit.",
            least,
            own,
        )
