"""The layers of a stage as a pure function, forward and backward."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe.clock import Clock
from tf_gpipe.function_call import FunctionCall
from tf_gpipe.gradients import Gradients
from tf_gpipe.graph import Value
from tf_gpipe.stage import Activations
from tf_gpipe.stage import Stage
from tf_gpipe.stage import run_stage


class Result(NamedTuple):
    """What a stage makes of one micro-batch."""

    outputs: Activations
    losses: list[tf.Tensor]  # of `add_loss` and activity regularisers
    updates: list[tf.Tensor]  # new values of `StageFunction.updated`


class StageCall(NamedTuple):
    """One forward pass of a micro-batch, kept for its backward pass.

    `gradient(output_gradients, loss_gradients)` takes a tensor or `None` for
    each flat output tensor and a scalar for each loss. It returns a list with
    a gradient or `None` for each flat input; the `Gradients`; and a list with
    the time when the recomputation was done, where that is known.
    """

    result: Result
    gradient: Callable[[list, list], tuple[list, Gradients, list]]


class StageFunction:
    """The layers of a stage as a pure function: state in, state out.

    Nothing is assigned while it runs, so running it once more (to recompute
    what the backward pass needs) has no effect and gives the same result. It
    reads the weights that the stage owns where they are. State and weights
    borrowed from another stage come in as tensors.

    Args:
        stage: The `Stage`.
        carried: List of variables whose values are passed in.
        training: Boolean, or `None` for Keras's default.
        remat: Boolean, whether backward passes recompute activations.
        apart: Boolean, whether passes run as a `tf.function` of their own,
            traced once for all micro-batches and called for each, so that
            the graph stays small.
        jit_compile: Boolean, whether XLA compiles these functions.
        stopped: List of those of the stage's inputs that need no gradient.
        repeatable: Boolean, whether a call's gradient may be asked for more
            than once.
        clock: `Clock` that takes times within functions, or `None`.
        turn: Function that `at_once` calls between the passes: from a
            `Result` and a nested structure of tensors to the gradients that
            `StageCall.gradient` takes, and a nested structure of tensors.

    Attributes:
        updated: List of the variables whose new values `Result.updates` holds.
        dense: List of the variables of `Gradients.dense`.
        sparse: List of the variables of `Gradients.sparse`. All three are
            known after the first pass.
    """

    def __init__(
        self,
        stage: Stage,
        carried: list[keras.Variable],
        training: bool | None,
        remat: bool,
        apart: bool,
        jit_compile: bool,
        stopped: Sequence[Value],
        repeatable: bool,
        clock: Clock | None,
        turn: Callable[[Result, Any], tuple[list, list, Any]],
    ):
        self.stage = stage
        self.carried = carried
        self.updated: list[keras.Variable] = []
        self.dense: list[keras.Variable] = []
        self.sparse: list[keras.Variable] = []
        self._training = training
        self._stopped = [value in stopped for value in stage.inputs]
        self._repeatable = repeatable
        self._turn = turn
        # XLA knows no clock.
        self._clock = None if jit_compile else clock
        ids = {id(v) for v in carried}
        self._weights = [
            v for v in stage.trainable(stage.owned) if id(v) not in ids
        ]
        # Which of the carried values have a gradient: weights, not state.
        ids = {id(v) for v in stage.trainable(carried)}
        self._borrowed = [i for i, v in enumerate(carried) if id(v) in ids]
        # Frozen weights: TensorFlow would compute gradients for them.
        ids = {id(v) for v in [*carried, *self._weights]}
        self._frozen = [
            v for v in stage.owned if id(v) not in ids and v.value.trainable
        ]
        self._remat = remat
        self._apart = apart
        self._plain: Any = self._apply
        self._on_tape: Callable = self._apply
        if apart:
            self._plain = self._on_tape = tf.function(
                self._apply,
                autograph=False,
                jit_compile=jit_compile or None,
                experimental_attributes={"_noinline": True},
            )
            self._forward = FunctionCall(self._apply, jit_compile)
            self._backward = FunctionCall(
                self._recompute, jit_compile, finish=_packed
            )
            self._at_once = FunctionCall(
                self._forward_backward, jit_compile, finish=_packed
            )
        elif remat:
            self._on_tape = self._rematerialized

    def __call__(self, inputs: Activations, carried: list) -> Result:
        """Runs the stage, for no backward pass of the pipeline."""
        with tf.device(self.stage.device):
            return self._plain(inputs, carried)

    def start(self, inputs: Activations, carried: list) -> StageCall:
        """Runs the stage and keeps what its backward pass needs."""
        with tf.device(self.stage.device):
            if self._apart and self._remat:
                return StageCall(
                    self._forward(inputs, carried),
                    lambda *grads: self._backward(inputs, carried, *grads),
                )
            call = self._taped(self._on_tape, inputs, carried)
            if self._apart:
                gradient = call.gradient
                call = StageCall(
                    call.result, lambda *grads: _packed(gradient(*grads))
                )
            return call

    def outputs_like(
        self, inputs: Activations, carried: list
    ) -> Activations | None:
        """Returns zeros shaped like the outputs, without running the stage.

        `None` where the shapes are not known before it runs.
        """
        if not self._apart:
            return None
        with tf.device(self.stage.device):
            concrete = self._plain.get_concrete_function(inputs, carried)
        outputs = concrete.structured_outputs.outputs
        specs = keras.tree.flatten(outputs.tensors)
        if not all(spec.shape.is_fully_defined() for spec in specs):
            return None
        tensors = keras.tree.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), outputs.tensors
        )
        return outputs._replace(tensors=tensors)

    def at_once(
        self, inputs: Activations, carried: list, arguments: Any
    ) -> tuple[list, Gradients, list, Result, Any]:
        """Runs the stage forward, then at once backward.

        Args:
            inputs: As for a call.
            carried: As for a call.
            arguments: Nested structure of tensors for `turn`.

        Returns:
            Tuple of what `StageCall.gradient` returns, the `Result`, and the
            rest of what `turn` returns.
        """
        with tf.device(self.stage.device):
            return self._at_once(inputs, carried, arguments)

    def _taped(
        self, run: Callable, inputs: Activations, carried: list
    ) -> StageCall:
        """Runs the stage under a tape, which is the store of activations."""
        flat = keras.tree.flatten(inputs.tensors)
        # Whether each flat tensor needs none.
        stopped = [
            stop
            for content, stop in zip(inputs.tensors, self._stopped, strict=True)
            for _ in keras.tree.flatten(content)
        ]
        by_input = [
            i
            for i, x in enumerate(flat)
            if x.dtype.is_floating and not stopped[i]
        ]
        variables = [self.carried[i] for i in self._borrowed] + self._weights
        sources = [flat[i] for i in by_input]
        sources += [carried[i] for i in self._borrowed]
        sources += [v.value for v in self._weights]
        with tf.GradientTape(
            persistent=self._repeatable, watch_accessed_variables=False
        ) as tape:
            tape.watch(sources)
            result = run(inputs, carried)

        def gradient(output_gradients: list, loss_gradients: list):
            targets, upstream = [], []
            for target, arrived in zip(
                keras.tree.flatten(result.outputs.tensors) + result.losses,
                output_gradients + loss_gradients,
                strict=True,
            ):
                if target.dtype.is_floating and arrived is not None:
                    targets.append(target)
                    upstream.append(tf.cast(arrived, target.dtype))
            found: list = [None] * len(sources)
            if targets and sources:
                found = tape.gradient(
                    targets, sources, output_gradients=upstream
                )
            input_gradients: list = [None] * len(flat)
            for i, x in zip(by_input, found, strict=False):
                input_gradients[i] = x
            gradients = self._sort(variables, found[len(by_input) :])
            return input_gradients, gradients, []

        return StageCall(result, gradient)

    def _recompute(
        self,
        inputs: Activations,
        carried: list,
        output_gradients: list,
        loss_gradients: list,
    ) -> tuple[list, Gradients, list]:
        """As the gradient of a call, from the inputs on.

        A function is its own barrier: it starts when the gradient has arrived,
        and nothing in it is merged with the forward pass.
        """
        with tf.device(self.stage.device):
            call = self._taped(self._apply, inputs, carried)
            times = self._stamp(call)
            # Or the stamp would wait for a thread while those work.
            with tf.control_dependencies(times):
                found = call.gradient(output_gradients, loss_gradients)
            return *found[:2], times

    def _forward_backward(self, inputs: Activations, carried: list, arguments):
        """Both passes, in a function that is its own barrier as well."""
        with tf.device(self.stage.device):
            call = self._taped(self._apply, inputs, carried)
            times = self._stamp(call)
            with tf.control_dependencies(times):
                *upstream, rest = self._turn(call.result, arguments)
                found = call.gradient(*upstream)
            return *found[:2], times, call.result, rest

    def _stamp(self, call: StageCall) -> list[tf.Tensor]:
        """Returns the time when the stage has run, if that is asked for."""
        if self._clock is None:
            return []
        outputs = keras.tree.flatten(call.result.outputs.tensors)
        return [self._clock.stamp(outputs)]

    def _sort(self, variables: list, found: list) -> Gradients:
        """Returns gradients apart by kind, and notes whose they are."""
        pairs = [
            (v, x)
            for v, x in zip(variables, found, strict=True)
            if x is not None
        ]
        dense = [p for p in pairs if not isinstance(p[1], tf.IndexedSlices)]
        sparse = [p for p in pairs if isinstance(p[1], tf.IndexedSlices)]
        self.dense = [v for v, _ in dense]
        self.sparse = [v for v, _ in sparse]
        return Gradients([x for _, x in dense], [x for _, x in sparse])

    def _apply(self, inputs: Activations, carried: list) -> Result:
        values = {
            value: keras.tree.map_structure(tf.stop_gradient, x) if stop else x
            for value, x, stop in zip(
                self.stage.inputs, inputs.unpack(), self._stopped, strict=True
            )
        }
        mapping = [
            (v, value if i in self._borrowed else tf.stop_gradient(value))
            for i, (v, value) in enumerate(
                zip(self.carried, carried, strict=True)
            )
        ]
        mapping += [(v, tf.stop_gradient(v.value)) for v in self._frozen]
        losses: list[tf.Tensor] = []

        def take_losses():
            # Layer by layer: a layer that is called again clears what it has
            # added to the scope before.
            losses.extend(scope.losses)
            scope.losses.clear()

        with (
            tf.device(self.stage.device),
            tf.name_scope(f"stage_{self.stage.index}"),
            _Recorder(mapping) as scope,
        ):
            run_stage(self.stage, values, self._training, take_losses)
            self.updated = list(scope.updated.values())
            updates = [
                tf.stop_gradient(scope.get_current_value(v))
                for v in self.updated
            ]
            outputs = tuple(values[value] for value in self.stage.outputs)
            return Result(Activations.of(outputs), losses, updates)

    def _rematerialized(self, inputs: Activations, carried: list) -> Result:
        """As `_apply`, whose gradient runs it once more for activations.

        `tf.recompute_grad` makes the arguments of the recomputation depend on
        the gradient that arrives, by arithmetic, so they must be
        floating-point. Where a stage takes integers, a token of zero carries
        the dependency.
        """
        tensors = keras.tree.flatten(inputs.tensors)
        floats = [i for i, x in enumerate(tensors) if x.dtype.is_floating]
        structure: Any = None

        def run(*args):
            nonlocal structure
            xs, values = list(tensors), list(carried)
            for i, x in zip(floats, args, strict=False):
                xs[i] = x
            if not floats:
                xs = [
                    x + tf.cast(args[0], x.dtype) if x.dtype.is_integer else x
                    for x in xs
                ]
            weights = args[len(args) - len(self._borrowed) :]
            for i, x in zip(self._borrowed, weights, strict=True):
                values[i] = x
            xs = keras.tree.pack_sequence_as(inputs.tensors, xs)
            structure = self._apply(Activations(xs, inputs.masks), values)
            leaves = keras.tree.flatten(structure)
            return [leaves[i] for i in _differentiable_first(leaves)]

        args = [tensors[i] for i in floats] or [tf.zeros(())]
        args += [carried[i] for i in self._borrowed]
        results = tf.recompute_grad(run)(*args)
        leaves = keras.tree.flatten(structure)
        for i, x in zip(_differentiable_first(leaves), results, strict=True):
            leaves[i] = x
        return keras.tree.pack_sequence_as(structure, leaves)


def _packed(results: tuple) -> tuple:
    input_gradients, gradients, *rest = results
    return input_gradients, gradients.packed(), *rest


def _differentiable_first(leaves: list) -> list[int]:
    """Returns the places of the tensors in `leaves`, those of floats first."""
    return sorted(
        (i for i, x in enumerate(leaves) if x is not None),
        key=lambda i: not leaves[i].dtype.is_floating,
    )


class _Recorder(keras.StatelessScope):
    """A stateless scope that knows which variables were assigned to."""

    def __init__(self, state_mapping):
        super().__init__(state_mapping, collect_losses=True)
        self.updated: dict[int, keras.Variable] = {}

    def add_update(self, update):
        self.updated[id(update[0])] = update[0]
        super().add_update(update)
