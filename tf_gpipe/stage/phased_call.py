"""A micro-batch in the phases of a stage, and the phases of its gradient."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage import accumulator
from tf_gpipe.stage.function_call import FunctionCall
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.pack import pack
from tf_gpipe.stage.pack import unpack
from tf_gpipe.stage.structures import filled
from tf_gpipe.stage.structures import tensors

if TYPE_CHECKING:
    from tf_gpipe.stage.phases import Phases


class PhasedCall:
    """A micro-batch on its way through the phases of a stage.

    Args:
        phases: The `Phases` of the stage.
        packed: Function that returns the pack of weights for a phase.
        inputs: The tensors of the stage's inputs and carried values.
        remat: Whether this micro-batch is recomputed; see `StagePhases.start`.

    Attributes:
        result: `Result`.
        for_weights: Tensors that `backward` has made for `weights`: they are
            ready once the backward phase is done.
    """

    def __init__(
        self,
        phases: "Phases",
        packed: Callable[[], list[tf.Tensor]],
        inputs: list[tf.Tensor],
        remat: bool,
    ):
        self._phases = phases
        self._packed = packed
        self._inputs = inputs
        self._remat = remat
        # Known once the backward phase has run.
        self._backward: Any = None
        self.for_weights: Any = None
        self.result, self._made = phases.forward(packed(), inputs, not remat)
        self._stored = self._made

    def recompute(self) -> list[tf.Tensor]:
        """Runs the recompute phase, if the stage has one.

        Returns the pack of tensors that the backward phase reads.
        """
        phases = self._phases
        if phases.recomputed.before:
            # From `_made`, which stays: a tape may ask for it more than once.
            self._stored = phases.recompute(
                self._packed(), self._inputs, self._made
            )
        return self._stored

    def backward(self, output_gradients: list, sums: GradientSum) -> list:
        """Runs the backward phase.

        Args:
            output_gradients: A gradient or `None` for each of `Result.targets`.
            sums: The `GradientSum` of the stage.

        Returns:
            List with a gradient or `None` for each part of the inputs.
        """
        pairs = [
            (x, arrived)
            for x, arrived in zip(
                self.result.targets, output_gradients, strict=True
            )
            if x.dtype.is_floating
        ]
        self._backward = self._phases.backward(
            tuple(arrived is not None for _, arrived in pairs), self._remat
        )
        values = [
            tf.zeros_like(x) if arrived is None else tf.cast(arrived, x.dtype)
            for x, arrived in pairs
        ]
        input_gradients, self.for_weights = self._backward.run(
            self._packed(),
            self._stored,
            values,
            [] if self._phases.splits else sums.place(self._backward.dense),
        )
        return input_gradients

    def weights(self, sums: GradientSum) -> list[tf.Tensor]:
        """Adds the gradients of weights to `sums`, after the backward phase.

        Returns tensors that are ready once all gradients have been added.
        """
        variables = self._backward.dense
        place = sums.place(variables)
        made = self.for_weights
        if self._phases.splits:
            made = self._backward.weights(self._packed(), made, place)
        dense, sparse = made
        if place:
            sums.added(variables, dense)
        else:
            # Not `v.value`: a layer may ask for the gradient in a scope that
            # gives its weights other values.
            like = list(map(upstream.tensorflow_variable, variables))
            values = unpack(dense, like)
            sums.add(zip(variables, values, strict=True))
        sums.add_lookups(self._backward.sparse, sparse)
        return tensors(made)


class Backward:
    """The backward phase of a stage, and the weights phase after it.

    Args:
        phases: The `Phases` of the stage.
        alive: The operations that depend on the incoming gradients.
        recomputes: Whether the backward phase recomputes layers, each part
            when the gradient arrives there.

    Attributes:
        dense: List of the variables whose gradients are dense.
        sparse: List of the `Lookup`s of sparse gradients.
        run: `FunctionCall` of the backward phase. It takes the pack of
            weights, the pack of stored tensors, the incoming gradients, and
            the place for dense gradients: a list of the handle of an
            accumulator, or an empty list. It returns the gradients of inputs,
            and then the pack of tensors that the weights phase takes. If there
            is no weights phase, it returns that phase's results instead.
        weights: `FunctionCall` of the weights phase. It takes the pack of
            weights, the pack from `run` and the place for dense gradients. It
            returns a list of one tensor, which is ready once dense gradients
            are added or, without a place, is their pack; and the list of
            sparse gradients.
    """

    def __init__(
        self, phases: "Phases", alive: set[tf.Operation], recomputes: bool
    ):
        def lives(gradient: Any) -> bool:
            return any(x.op in alive for x in tensors(gradient))

        self._phases = phases
        parts = phases.recomputed
        self._fed = parts.kept if recomputes else phases.stored
        self._after = parts.waits(alive) if recomputes else {}
        self._input_gradients = [
            x if lives(x) else None for x in phases.trace.input_gradients
        ]
        pairs = [p for p in phases.trace.variable_gradients if lives(p[1])]
        dense = [p for p in pairs if not isinstance(p[1], tf.IndexedSlices)]
        self.dense = [v for v, _ in dense]
        self.sparse = phases.lookups(pairs)
        self._slices = [x.slices for x in self.sparse]
        self._gradients = [x for _, x in dense] + tensors(self._slices)
        # Tensors that the backward phase computes for the weights phase.
        self._for_weights: list[tf.Tensor] = []
        if phases.splits:
            done = {*phases.early, *(x.op for x in phases.output_gradients)}
            made = tensors(self._input_gradients)
            done |= phases.traced.makers(made, phases.late_effects)
            self._for_weights = phases.traced.live(self._gradients, done)
        self.run = FunctionCall(self._run)
        self.weights = FunctionCall(self._weights)

    def _run(
        self,
        weights: list[tf.Tensor],
        packed: list[tf.Tensor],
        values: list[tf.Tensor],
        place: list[tf.Tensor],
    ) -> tuple:
        phases, input_gradients = self._phases, tensors(self._input_gradients)
        size = len(input_gradients)

        def then(found: Sequence[tf.Tensor], place: list[tf.Tensor]) -> tuple:
            rest = found[size:]
            if phases.splits:
                return found[:size], pack(rest)
            return found[:size], self._placed(rest, place)

        part = self._ending(
            self._fed + phases.output_gradients,
            input_gradients
            + (self._for_weights if phases.splits else self._gradients),
            then,
            phases.late_effects,
        )
        made, rest = part(weights, [*unpack(packed, self._fed), *values], place)
        return filled(self._input_gradients, made), rest

    def _weights(
        self,
        weights: list[tf.Tensor],
        packed: list[tf.Tensor],
        place: list[tf.Tensor],
    ) -> tuple[list, list]:
        part = self._ending(self._for_weights, self._gradients, self._placed)
        return part(weights, unpack(packed, self._for_weights), place)

    def _ending(
        self,
        feeds: list[tf.Tensor],
        fetches: list[tf.Tensor],
        then: Callable,
        effects: Iterable[tf.Operation] = (),
    ) -> Callable:
        """Returns a part whose results go to `then`, within it if possible."""
        phases = self._phases
        after = self._after
        if not phases.jit_compile:
            return phases.extract(feeds, fetches, effects, then, after)
        # XLA does not support packs, so `then` runs outside. All gradients are
        # then in memory before any is added.
        part = phases.extract(feeds, fetches, effects, after=after)
        return lambda weights, values, place: then(part(weights, values), place)

    def _placed(
        self, found: Sequence[tf.Tensor], place: list[tf.Tensor]
    ) -> tuple[list, list]:
        """Adds dense gradients to the accumulator, or packs them without one.

        Args:
            found: The dense gradients, then the parts of the sparse ones.
            place: List of the accumulator's handle, or an empty list.

        Returns:
            The results of the weights phase; see `weights`.
        """
        size = len(self.dense)
        dense, sparse = list(found[:size]), filled(self._slices, found[size:])
        if place:
            return [accumulator.add(place[0], dense)], sparse
        return pack(dense), sparse
