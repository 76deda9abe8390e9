"""The search for the fastest pipelines that fit, by simulated step times."""

import dataclasses
import heapq
import math
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from tf_gpipe.planning.candidates import Candidate
from tf_gpipe.planning.candidates import Choice
from tf_gpipe.planning.candidates import Fixed
from tf_gpipe.planning.candidates import candidates
from tf_gpipe.planning.candidates import placements
from tf_gpipe.planning.drafts import Draft
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import LayerTimes
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.planning.speeds import any_twice
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule

# One device is preferred unless several are faster by more than this factor.
_NEGLIGIBLE = 1.02
# How many of the best choices are refined, by searching an order of tasks and
# by recomputing only some layers.
_NUM_SEARCHED = 3


def allowed(
    layers: KnownLayers, machine: Machine, fixed: Fixed
) -> list[Candidate]:
    """Returns all candidates that `fixed` allows.

    What it asks to search for, an order of tasks or layers to recompute, is
    left open.
    """
    if fixed.schedule == schedules.AUTO:
        fixed = dataclasses.replace(fixed, schedule=None)
    if fixed.remat == AUTO_REMAT:
        fixed = dataclasses.replace(fixed, remat=None)
    return list(
        candidates(
            len(machine.devices),
            len(layers.graph.nodes),
            layers.rows,
            fixed,
            machine.replicates,
        )
    )


class Chooser:
    """Plans and ranks candidates.

    Args:
        layers: `KnownLayers`.
        times: `LayerTimes`.
        machine: `Machine`.
    """

    def __init__(
        self, layers: KnownLayers, times: LayerTimes, machine: Machine
    ):
        self._layers = layers
        self._times = times
        self._machine = machine

    def ranked(
        self, fixed: Fixed, count: int, among: Iterable[Candidate] | None = None
    ) -> list[Choice]:
        """Returns the best choices, the fastest first.

        Args:
            fixed: `Fixed`.
            count: Integer, the most choices to return; no two have the same
                `Candidate.key`.
            among: `Candidate`s. Defaults to all that `fixed` allows.
        """
        layers, machine = self._layers, self._machine
        among = list(
            allowed(layers, machine, fixed) if among is None else among
        )
        rows = [
            layers.micro_batch(x.num_micro_batches, x.num_replicas)
            for x in among
        ]
        if rows and not layers.sampled:
            layers.sampled = sorted({min(rows), max(rows)})
        best, too_large = self._best(among, count)
        if machine.alike and fixed.schedule in (None, schedules.AUTO):
            self._add_searched(best, fixed)
        best = self._with_auto_remat(best, fixed, too_large)
        found = _fastest(best)
        one = [
            x
            for x in found
            if x.candidate.alone and x.seconds <= _NEGLIGIBLE * found[0].seconds
        ]
        if one:
            found = [one[0], *(x for x in found if x is not one[0])]
        if fixed.schedule == schedules.AUTO:
            # On one device, all orders of tasks take the same time.
            found = [
                x for x in found if x.candidate.schedule == schedules.AUTO
            ] or [x for x in found if x.candidate.num_devices == 1]
        return found[:count]

    def _best(
        self, among: Sequence[Candidate], count: int
    ) -> tuple[dict[tuple, Choice], list[Candidate]]:
        """Returns the best choices by their keys, and what does not fit."""
        best: dict[tuple, Choice] = {}
        too_large = []
        # Candidates, and once they are cut their drafts, by a lower bound of
        # the step time: once `count` choices are faster than the next bound,
        # the rest need not be cut or simulated.
        waiting: list[tuple[float, int, int, Any]] = [
            (self._bound(x), i, 0, x) for i, x in enumerate(among)
        ]
        heapq.heapify(waiting)
        while waiting:
            bound, i, _, x = heapq.heappop(waiting)
            limit = math.inf
            if len(best) >= count:
                limit = sorted(x.seconds for x in best.values())[count - 1]
            if bound > _NEGLIGIBLE * limit:
                break
            if isinstance(x, Draft):
                self._keep(best, x.choice())
                continue
            drafts = self._drafts(x)
            if not drafts:
                too_large.append(x)
            for j, draft in enumerate(drafts, 1):
                heapq.heappush(waiting, (draft.bound, i, j, draft))
        return best, too_large

    def _add_searched(self, best: dict[tuple, Choice], fixed: Fixed) -> None:
        """Adds choices with a searched order of tasks, for the fastest."""
        fastest: dict[tuple, Choice] = {}
        for x in _fastest(best):
            of = x.candidate
            if of.num_devices > 1:
                key = of.num_devices, of.num_replicas, of.num_micro_batches
                fastest.setdefault(key, x)
        for known in list(fastest.values())[:_NUM_SEARCHED]:
            for choice in self._searched(known, fixed):
                self._keep(best, choice)

    def _with_auto_remat(
        self,
        best: dict[tuple, Choice],
        fixed: Fixed,
        too_large: Iterable[Candidate],
    ) -> dict[tuple, Choice]:
        """Adds choices with `remat="auto"`, for devices of equal memory.

        Only if all devices have equal memory and none is named twice: a model
        counts the stages of one device name together.

        They are made from the best choices that recompute whole stages, and
        from the fastest that do not fit without recomputation. If `fixed` asks
        for `"auto"`, only they are returned.
        """
        machine, alone = self._machine, fixed.remat == AUTO_REMAT
        if fixed.remat is not None and not alone:
            return best
        memories = {x.memory for x in machine.devices}
        twice = any_twice([x.name for x in machine.devices])
        if len(memories) > 1 or None in memories or twice:
            return best
        found = {} if alone else dict(best)
        known = [
            x for x in _fastest(best) if alone or x.candidate.remat != "never"
        ]
        free = dataclasses.replace(
            machine,
            devices=[
                dataclasses.replace(x, memory=None) for x in machine.devices
            ],
        )
        faster = Chooser(self._layers, self._times, free).ranked(
            dataclasses.replace(fixed, remat="never"),
            _NUM_SEARCHED,
            [x for x in too_large if x.remat == "never"],
        )
        for x in (*known[:_NUM_SEARCHED], *faster):
            auto = dataclasses.replace(x.candidate, remat=AUTO_REMAT)
            for devices in placements(machine, auto):
                schedule: Schedule = x.plan.tasks  # type: ignore[assignment]
                draft = self._draft(auto, devices, schedule)
                self._keep(found, draft.recomputing())
        return found

    def _bound(self, candidate: Candidate) -> float:
        """Returns a lower bound of the `bound` of a candidate's drafts.

        It is that of a cut into stages of equal time, without recomputation and
        updates.
        """
        machine, count = self._machine, candidate.num_devices
        if not machine.alike:
            return 0.0
        speed = machine.devices[0].speed
        number = candidate.num_micro_batches
        rows = self._layers.micro_batch(number, candidate.num_replicas)
        passes = self._times.of(rows, speed)[:2].sum()
        passes += 2 * candidate.num_stages * speed.task
        # All devices work all the time, or one after another.
        copies = candidate.num_replicas
        share = min(
            machine.slowdown(copies), machine.slowdown(count * copies) / count
        )
        return number * passes * share * (1 - 1e-9)

    @staticmethod
    def _keep(best: dict[tuple, Choice], choice: Choice | None) -> None:
        if choice is None:
            return
        key = choice.candidate.key
        if key not in best or choice.seconds < best[key].seconds:
            best[key] = choice

    def _drafts(self, candidate: Candidate) -> list[Draft]:
        """Returns a `Draft` for each placement with a cut that fits."""
        schedule = schedules.get(
            candidate.schedule,
            candidate.num_stages,
            candidate.num_micro_batches,
            candidate.num_devices
            if candidate.schedule in schedules.ANY_STAGES_A_DEVICE
            else None,
        )
        found = []
        for devices in placements(self._machine, candidate):
            draft = self._draft(candidate, devices, schedule)
            if draft.cut():
                found.append(draft)
        return found

    def _draft(self, candidate, devices, schedule: Schedule) -> Draft:
        return Draft(
            self._layers,
            self._times,
            self._machine,
            candidate,
            devices,
            schedule,
        )

    def _searched(self, known: Choice, fixed: Fixed) -> list[Choice]:
        """Returns choices like `known`, with orders of tasks searched for it.

        With one and with two stages a device, or as many as `fixed` asks for.
        """
        found = []
        count = known.candidate.num_devices
        numbers = [1, 2]
        if fixed.num_stages is not None:
            numbers = [fixed.num_stages // count]
        for each in numbers:
            candidate = dataclasses.replace(
                known.candidate,
                num_stages=each * count,
                schedule=schedules.AUTO,
            )
            if (
                candidate.num_stages > len(self._layers.graph.nodes)
                or fixed.num_stages not in (None, candidate.num_stages)
                or candidate.num_micro_batches
                > schedules.most_rows(candidate.num_stages)
            ):
                continue
            base = dataclasses.replace(
                candidate,
                schedule="1f1b" if each == 1 else "interleaved_zero_bubble",
            )
            for draft in self._drafts(base)[:1]:
                choice = draft.searched(candidate)
                if choice is not None:
                    found.append(choice)
        return found


def _fastest(best: dict[tuple, Choice]) -> list[Choice]:
    # Ties are broken by the candidate: fewer devices, stages, micro-batches.
    return sorted(
        best.values(),
        key=lambda x: (float(f"{x.seconds:.9g}"), *x.candidate.key),
    )


def explanation(chosen: Choice, machine: Machine, compared: bool) -> str:
    """Returns advice on how to use a choice, or an empty string.

    Args:
        chosen: The best `Choice`.
        machine: `Machine`.
        compared: Boolean, whether any candidate had more than one device.
    """
    best = chosen.candidate
    if best.alone:
        found = []
        if compared:
            found = [
                "One device is enough: a pipeline over more would not be "
                "faster."
            ]
        recomputes = any(x.recomputed for x in chosen.plan.stages)
        several = len(machine.devices) > 1
        if several and best.num_micro_batches == 1 and not recomputes:
            found.append("Plain Keras does the same.")
        return " ".join(found)
    if best.num_devices == 1:
        return (
            f"Use data parallelism: {best.num_replicas} replicas of the whole "
            "model, under `tf.distribute.MirroredStrategy`, without a pipeline."
        )
    if best.num_replicas > 1:
        return (
            f"{best.num_replicas} replicas: make the model under "
            "`tf.distribute.MirroredStrategy`, with the first device of each."
        )
    return ""
