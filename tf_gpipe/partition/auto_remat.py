"""`remat="auto"`: the layers that each stage recomputes, and the cut for them.

As in AdaPipe (Sun et al., ASPLOS 2024), each stage recomputes just as much as
it must to fit into the memory of its device, and the model is cut so that the
slowest stage, recomputation included, is as fast as possible.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_gpipe.partition.contiguous import split
from tf_gpipe.partition.layer_costs import LayerCosts
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

# How many times the model is cut for the recomputation that the cut before had.
_NUM_CUTS = 12
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


def cuts(balance: Any) -> bool:
    """Returns whether `balance` lets the memory limit decide the cut."""
    return balance is None or (isinstance(balance, str) and balance == "flops")


class Search:
    """The search for a cut and for the calls that its stages recompute.

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
        self._graph, self._traces, self._size = graph, traces, size
        self._parameters = None if limit.is_share else parameters
        self._schedule = schedule
        # As the order that is searched later may do.
        self._splits = bool(schedule.split) or schedule.name == schedules.AUTO
        self._devices = list(devices)
        self._limit = limit
        if work is None:
            work = [
                (x.forward_flops + x.backward_flops, x.forward_flops)
                for x in traces
            ]
        self._work = work
        # The choices of a stage, by its first call and the one after its last.
        self._choices: dict[tuple[int, int], list[Recomputation]] = {}

    def decided(
        self, balance: Any, counts: Callable[[], Sequence[int]]
    ) -> AutoRemat:
        """Decides the cut that `balance` asks for, and what it recomputes.

        Args:
            balance: As of `PipelineConfig`. With `None` or `"flops"`, the cut
                is searched together with the recomputation.
            counts: Function that returns the number of calls in each stage for
                other balances, or where no layer has FLOPs.

        Raises:
            TooLittleMemoryError: If a device has too little memory.
        """
        known = balance is not None or any(
            x.forward_flops for x in self._traces
        )
        if cuts(balance) and known:
            return self.with_best_cut()
        return self.with_counts(counts())

    def with_counts(self, counts: Sequence[int]) -> AutoRemat:
        """Decides what is recomputed with a given cut.

        Raises:
            TooLittleMemoryError: If a device has too little memory.
        """
        return self._fitted(list(counts), self._bytes(list(counts)))

    def with_best_cut(self) -> AutoRemat:
        """Searches the cut whose slowest stage is fastest.

        A heuristic: the model is cut again with each stage's slowdown by
        recomputation as its factor; the best cut is then improved call by call.

        Raises:
            TooLittleMemoryError: If no cut that was tried fits.
        """
        num_stages = self._schedule.num_stages
        crossing = [sum(map(self._size, x)) for x in self._graph.crossing()]
        costs = [x for x, _ in self._work]
        cut = functools.partial(split, costs, num_stages, crossing)
        counts = cut(factors=[1.0] * num_stages)
        limit = self._bytes(counts)
        best: AutoRemat | None = None
        refused: TooLittleMemoryError | None = None
        # The best cut so far, and how good it is: that of least time, or as
        # long as none fits, the one that needs least memory.
        nearest, score = counts, (math.inf, math.inf)
        seen: set[tuple[int, ...]] = set()
        factors = [1.0] * num_stages

        def tried(counts: list[int]) -> AutoRemat | TooLittleMemoryError:
            """Returns what a cut leads to."""
            nonlocal best, refused, nearest, score
            seen.add(tuple(counts))
            try:
                found = self._fitted(counts, limit)
            except TooLittleMemoryError as error:
                new = math.inf, error.least
                if new < score:
                    refused, nearest, score = error, counts, new
                return error
            new = max(self._times(found)), 0.0
            if new[0] < score[0] * (1 - 1e-9):
                best, nearest, score = found, counts, new
            return found

        found: AutoRemat | TooLittleMemoryError | None = None
        for _ in range(_NUM_CUTS):
            if tuple(counts) not in seen:
                found = tried(counts)
            elif best is not None:
                break
            if isinstance(found, AutoRemat):
                alone = self._times(None, counts)
                factors = [
                    t / a if a else 1.0
                    for t, a in zip(self._times(found), alone, strict=True)
                ]
            elif found is not None and best is None:
                # Move calls away from the fullest device, and from the first
                # stages, which hold the most micro-batches. By how much does
                # not depend on the limit, so that a lower one than the error
                # asks for is refused, too.
                factors = [
                    x
                    * (1 + 0.1 * (num_stages - 1 - k) / num_stages)
                    * (1.5 if k in found.stages else 1.0)
                    for k, x in enumerate(factors)
                ]
            else:
                break
            counts = cut(factors=factors)
        while True:
            # Hill climbing: move one call from a stage to the next or back.
            before = score
            for counts in _neighbours(nearest):
                if tuple(counts) not in seen:
                    tried(counts)
            if not score < before:
                break
        if best is None:
            raise refused  # type: ignore[misc]
        return best

    def _bytes(self, counts: list[int]) -> float:
        """Returns the limit in bytes, which as a share depends on the cut."""
        if not self._limit.is_share:
            return self._limit.value
        return self._limit.value * self._bytes_without_remat(counts)

    def _bytes_without_remat(self, counts: list[int]) -> float:
        """Returns the fullest device's activation bytes with `"never"`."""
        never = find(self._graph.parts(counts), self._traces, self._size)
        peaks = self._peaks(never, "never", [0] * len(counts))
        return max(peaks.values())

    def _limit_for_cut(self, counts: list[int], limit: float) -> Any:
        """Returns the `memory_limit` that is `limit` bytes for this cut."""
        if not self._limit.is_share or limit == self._bytes(counts):
            return self._limit.given
        # Rounded up, so that the same choices fit.
        return min(1.0, limit / self._bytes_without_remat(counts) * (1 + 1e-12))

    def _peaks(self, costs, remat, fixed) -> dict:
        """Returns the peak bytes of each device."""
        sizes = [
            x.of_micro_batches(self._schedule.num_micro_batches) for x in costs
        ]
        own: dict = {}
        for k, (device, size) in enumerate(
            zip(self._devices, sizes, strict=True)
        ):
            own.setdefault(device, {})[k] = size._replace(
                fixed=size.fixed + fixed[k]
            )
        return {
            device: peak_activations(self._schedule, remat, x)
            for device, x in own.items()
        }

    def _fitted(self, counts: list[int], limit: float) -> AutoRemat:
        """Decides what a cut recomputes, with `limit` bytes on each device."""
        bounds = [sum(counts[:k]) for k in range(len(counts) + 1)]
        spans = list(zip(bounds, bounds[1:], strict=False))
        parts = self._graph.parts(counts)
        fixed = [0] * len(counts)
        if self._parameters is not None:
            fixed = self._parameters.of_stages(counts, self._devices)
        plain = find(parts, self._traces, self._size)
        chosen: list[Recomputation] = [None] * len(counts)  # type: ignore[list-item]
        refused: list[TooLittleMemoryError] = []
        for device in dict.fromkeys(self._devices):
            own = [k for k, x in enumerate(self._devices) if x == device]
            try:
                found = self._fitted_device(
                    own, parts, spans, plain, fixed, limit
                )
            except TooLittleMemoryError as error:
                refused.append(error)
                continue
            for k, choice in zip(own, found, strict=True):
                chosen[k] = choice
        if refused:
            # With the limit that this error asks for, all devices fit.
            raise max(refused, key=lambda x: x.least)
        costs = [
            self._with_choice(x, choice)
            for x, choice in zip(plain, chosen, strict=True)
        ]
        return AutoRemat(
            counts,
            tuple(x.parts for x in chosen),
            costs,
            limit,
            self._limit_for_cut(counts, limit),
            fixed,
        )

    def _fitted_device(self, own, parts, spans, plain, fixed, limit):
        """Returns the choice of each stage of one device."""
        choices = {k: self._choices_of(parts[k], spans[k]) for k in own}

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
        return [found[k] for k in own]

    def _choices_of(
        self, part: Graph, span: tuple[int, int]
    ) -> list[Recomputation]:
        """Returns the choices of the stage with the calls of `span`, cached."""
        if span not in self._choices:
            own = slice(*span)
            self._choices[span] = StageCalls(
                part,
                self._traces[own],
                self._size,
                [again for _, again in self._work[own]],
            ).choices()
        return self._choices[span]

    def _sizes(self, costs: StageCosts, choice: Recomputation, fixed: float):
        found = self._with_choice(costs, choice)
        sizes = found.of_micro_batches(self._schedule.num_micro_batches)
        return sizes._replace(fixed=sizes.fixed + fixed)

    def _with_choice(
        self, costs: StageCosts, choice: Recomputation
    ) -> StageCosts:
        return costs.recomputing(choice, self._splits)

    def _times(self, found: AutoRemat | None, counts=None) -> list[float]:
        """Returns the time of each stage for a micro-batch.

        With `found`, recomputation is included; else `counts` is the cut.
        """
        counts = found.counts if found else counts
        times, first = [], 0
        for k, count in enumerate(counts):
            own = self._work[first : first + count]
            first += count
            times.append(sum(x for x, _ in own))
            for part in found.parts[k] if found else ():
                times[k] += sum(
                    again for _, again in own[part.start : part.stop]
                )
        return times

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


def _neighbours(counts: list[int]) -> list[list[int]]:
    """Returns the cuts with one call moved between neighbouring stages."""
    found = []
    for k in range(len(counts) - 1):
        for step in (-1, 1):
            changed = list(counts)
            changed[k] += step
            changed[k + 1] -= step
            if min(changed) > 0:
                found.append(changed)
    return found
