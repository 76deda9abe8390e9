"""Choices of which some are tried, and by which the others are corrected."""

import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Sequence

from tf_gpipe.planning.candidates import Candidate
from tf_gpipe.planning.candidates import Choice
from tf_gpipe.planning.speeds import Machine

# By how much a choice may be faster than its corrected time says: if one with
# as many micro-batches and stages was tried, and if not.
_DOUBT, _MORE_DOUBT = 0.1, 0.25


class TriedChoices:
    """Choices in the order in which they are to be tried, and what that took.

    Simulated times may be wrong by a factor that many choices share. Devices
    that share cores or memory slow each other down, for some models more than
    for others; and smaller micro-batches may fit a cache. So the best choice is
    tried first; then the best of the other kind, which has one device, or
    several; and then the one that would be fastest if its time, corrected by
    the trials of similar choices, were too long by as much as it may be. Once
    even that one would not be the fastest, no more are tried. The first two
    trials also tell how much devices slow each other down in this model.

    Several replicas cannot be tried: a process can use only one strategy of
    TensorFlow.

    Args:
        choices: `Choice`s.
    """

    def __init__(self, choices: Iterable[Choice]):
        self._left = list(choices)
        self._tried: list[tuple[Choice, float]] = []
        # Those of which there are estimates to compare with.
        self._estimated: list[tuple[Choice, float]] = []
        # What `next` has returned.
        self._taken: set[tuple] = set()

    def next(self) -> Choice | None:
        """Removes the choice to be tried next, and returns it.

        It is `None` if no other choice is likely to be faster.
        """
        possible = [x for x in self._left if x.candidate.num_replicas == 1]
        kinds = {x.alone for x, _ in self._taken}
        new = [x for x in possible if x.candidate.alone not in kinds]
        found = min(new or possible, key=self._least, default=None)
        if found is None:
            return None
        best = min((seconds for _, seconds in self._tried), default=math.inf)
        if not new and self._least(found) >= best:
            return None
        self._left.remove(found)
        self._taken.add(_key(found))
        return found

    def add(self, choice: Choice, seconds: float) -> None:
        """Adds the seconds of a step, if the choice did fit its devices."""
        self._tried.append((choice, seconds))
        self._estimated.append((choice, seconds))

    def corrected_machine(self, machine: Machine) -> Machine | None:
        """Returns the machine with the slowdown that the trials tell.

        Args:
            machine: `Machine` by which the choices were estimated.

        Returns:
            A `Machine`, if one choice of each kind has been tried, and its
            devices slow each other down by another factor; or else `None`.
        """
        found = {x.candidate.alone: (x, s) for x, s in self._tried}
        if len(self._tried) != 2 or len(found) != 2:
            return None
        (one, alone), (several, together) = found[True], found[False]
        ratio = (together / several.seconds) / (alone / one.seconds)
        count = several.working
        if count == 1:
            return None
        new = machine.with_slowdown(count, ratio * machine.slowdown(count))
        same = abs(math.log(new.sharing / machine.sharing)) < _DOUBT
        return None if same else new

    def estimate_anew(self, choices: Iterable[Choice]) -> None:
        """Replaces the choices that are left, and the estimates of others."""
        found = {_key(x): x for x in choices}
        self._estimated = [
            (found[_key(x)], seconds)
            for x, seconds in self._tried
            if _key(x) in found
        ]
        self._left = [x for key, x in found.items() if key not in self._taken]

    @property
    def any_tried(self) -> bool:
        """Whether the seconds of a choice have been added."""
        return bool(self._tried)

    def measured(self, choice: Choice) -> float | None:
        """Returns the measured seconds of a choice, if it was tried."""
        return next((s for x, s in self._tried if x is choice), None)

    def ranked(self) -> list[Choice]:
        """Returns all choices but those that turned out to be too large.

        Those that were tried, and those with replicas, come first, by time. The
        `step_seconds` of choices that were not tried are corrected. There are
        none if all that were tried are too large.
        """
        if not self._tried:
            # Of what no trial supports, nothing is known to fit.
            return [] if self._taken else self._left
        corrected = [
            dataclasses.replace(
                x,
                plan=dataclasses.replace(
                    x.plan, step_seconds=self.corrected(x)
                ),
            )
            for x in self._left
        ]
        replicas = [x for x in corrected if x.candidate.num_replicas > 1]
        first = [*self._tried, *((x, x.seconds) for x in replicas)]
        return [
            *(x for x, _ in sorted(first, key=lambda pair: pair[1])),
            *(x for x in corrected if x.candidate.num_replicas == 1),
        ]

    def _similar(self, candidate: Candidate) -> Sequence[tuple[Choice, float]]:
        """Returns the trials that say most about a candidate.

        Those of its kind with as many micro-batches and stages, or else with
        those numbers that are nearest by their ratios. Or else all.
        """
        known = self._estimated
        alike = [x for x in known if x[0].candidate.alone == candidate.alone]
        far = [_distance(x.candidate, candidate) for x, _ in alike]
        nearest = min(far, default=0.0)
        return [
            x for x, away in zip(alike, far, strict=True) if away == nearest
        ] or known

    def corrected(self, choice: Choice) -> float:
        """Returns the seconds of a choice that was not tried.

        They are corrected by the geometric mean of measured to simulated times
        of the trials of similar choices.
        """
        similar = self._similar(choice.candidate)
        if not similar:
            return choice.seconds
        ratio = math.prod(seconds / x.seconds for x, seconds in similar)
        return choice.seconds * ratio ** (1 / len(similar))

    def _least(self, choice: Choice) -> float:
        """Returns the seconds that a choice takes if it is underrated."""
        known = any(
            not _distance(x.candidate, choice.candidate)
            for x, _ in self._similar(choice.candidate)
        )
        return self.corrected(choice) * (1 - (_DOUBT if known else _MORE_DOUBT))


def _key(choice: Choice) -> tuple:
    # With another memory limit, other layers are recomputed.
    return choice.candidate, choice.plan.memory_limit


def _distance(a: Candidate, b: Candidate) -> float:
    return abs(math.log(a.num_micro_batches / b.num_micro_batches)) + abs(
        math.log(a.num_stages / b.num_stages)
    )
