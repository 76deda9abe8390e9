"""A stage: consecutive layers on one device, run as a pure function."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf


class Stage:
    """Consecutive layers that one device runs.

    Attributes:
        index: Integer, the stage's place in the pipeline.
        device: String, the TensorFlow device of the stage.
        layers: Tuple of the Keras layers.
    """

    def __init__(
        self,
        index: int,
        device: str,
        layers: Sequence[keras.Layer],
        earlier: Sequence["Stage"],
    ):
        self.index = index
        self.device = device
        self.layers = tuple(layers)
        self.variables = _unique(v for x in layers for v in x.variables)
        elsewhere = {id(v) for stage in earlier for v in stage.variables}
        # Variables of layers that an earlier stage uses too live there. Their
        # values come in as tensors, sent once a step.
        self.borrowed = [v for v in self.variables if id(v) in elsewhere]
        self.owned = [v for v in self.variables if id(v) not in elsewhere]

    def count_params(self) -> int:
        """Returns the number of parameters that live on the stage's device."""
        weights = {id(w) for layer in self.layers for w in layer.weights}
        return sum(
            int(v.shape.num_elements()) for v in self.owned if id(v) in weights
        )

    def trainable(self, variables: Sequence[keras.Variable]) -> list:
        """Returns those of `variables` that training changes."""
        ids = {id(v) for x in self.layers for v in x.trainable_variables}
        return [v for v in variables if id(v) in ids]

    def __repr__(self) -> str:
        names = ", ".join(layer.name for layer in self.layers)
        return f"<Stage {self.index} on {self.device}: {names}>"


class Activations(NamedTuple):
    """What travels from a stage to the next one."""

    tensors: Any  # nested structure
    masks: Any  # the Keras masks of `tensors`: same structure, None or tensor

    @classmethod
    def of(cls, tensors: Any) -> "Activations":
        """Returns tensors with the masks that Keras attached to them."""
        masks = keras.tree.map_structure(
            lambda x: getattr(x, "_keras_mask", None), tensors
        )
        return cls(tensors, masks)

    def unpack(self) -> Any:
        """Returns the tensors with their masks attached for Keras."""

        def attach(x, mask):
            if mask is None:
                return x
            x = tf.identity(x)
            x._keras_mask = mask
            return x

        return keras.tree.map_structure(attach, self.tensors, self.masks)


class Result(NamedTuple):
    """What a stage makes of one micro-batch."""

    outputs: Activations
    losses: list[tf.Tensor]  # of `add_loss` and activity regularisers
    updates: list[tf.Tensor]  # new values of `StageFunction.updated`


class _Recorder(keras.StatelessScope):
    """A stateless scope that knows which variables were assigned to."""

    def __init__(self, state_mapping):
        super().__init__(state_mapping, collect_losses=True)
        self.updated: dict[int, keras.Variable] = {}

    def add_update(self, update):
        self.updated[id(update[0])] = update[0]
        super().add_update(update)


def called(
    function: Callable, inline: bool, jit_compile: bool = False
) -> Callable:
    """Returns a `tf.function` that is traced once for all its calls.

    Args:
        function: Function from nested structures of tensors to another one.
        inline: Boolean, whether TensorFlow puts its operations in place of
            each call. If not, the graph stays small, but worker processes
            do not overlap (measured with two; the cause is not known).
        jit_compile: Boolean, whether XLA compiles it.
    """
    return tf.function(
        function,
        autograph=False,
        jit_compile=jit_compile or None,
        experimental_attributes=None if inline else {"_noinline": True},
    )


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
        remat: Boolean, whether the backward pass recomputes activations.
        compiled: Boolean, whether to run as a `tf.function` of its own, traced
            once for all micro-batches.
        inline: Boolean, see `called`.
        jit_compile: Boolean, whether XLA compiles that function.
        stop_inputs: Boolean, whether the inputs need no gradient.
    """

    def __init__(
        self,
        stage: Stage,
        carried: list[keras.Variable],
        training: bool | None,
        remat: bool,
        compiled: bool,
        inline: bool,
        jit_compile: bool,
        stop_inputs: bool,
    ):
        self.stage = stage
        self.carried = carried
        self.training = training
        self.stop_inputs = stop_inputs
        self.updated: list[keras.Variable] = []
        ids = {id(v) for v in carried}
        self.trainable = [
            v for v in stage.trainable(stage.owned) if id(v) not in ids
        ]
        # Which of the carried values have a gradient: weights, not state.
        ids = {id(v) for v in stage.trainable(carried)}
        self.borrowed = [i for i, v in enumerate(carried) if id(v) in ids]
        # Frozen weights: TensorFlow would compute gradients for them.
        ids = {id(v) for v in [*carried, *self.trainable]}
        self._frozen = [
            v for v in stage.owned if id(v) not in ids and v.value.trainable
        ]
        self._remat = remat
        self._call: Callable[..., Result] = self._differentiable
        if compiled:
            body = self._call = called(self._call, inline, jit_compile)
            if not inline:
                # A function in a function: TensorFlow goes through the body
                # of each function that a graph calls, several times a call.
                self._call = called(
                    lambda inputs, carried: body(inputs, carried), inline
                )

    def __call__(self, inputs: Activations, carried: list) -> Result:
        with tf.device(self.stage.device):
            return self._call(inputs, carried)

    def _apply(self, inputs: Activations, carried: list) -> Result:
        x = inputs.unpack()
        if self.stop_inputs:
            x = keras.tree.map_structure(tf.stop_gradient, x)
        mapping = [
            (v, value if i in self.borrowed else tf.stop_gradient(value))
            for i, (v, value) in enumerate(
                zip(self.carried, carried, strict=True)
            )
        ]
        mapping += [(v, tf.stop_gradient(v.value)) for v in self._frozen]
        losses = []
        with (
            tf.device(self.stage.device),
            tf.name_scope(f"stage_{self.stage.index}"),
            _Recorder(mapping) as scope,
        ):
            for layer in self.stage.layers:
                x = call_layer(layer, x, self.training, self.stage)
                # Taken layer by layer: a layer that is called again clears
                # what it has added to the scope before.
                losses += scope.losses
                scope.losses.clear()
            self.updated = list(scope.updated.values())
            updates = [
                tf.stop_gradient(scope.get_current_value(v))
                for v in self.updated
            ]
            return Result(Activations.of(x), losses, updates)

    def _differentiable(self, inputs: Activations, carried: list) -> Result:
        """As `_apply`, with a gradient that runs on the stage's device.

        With `remat`, the gradient runs `_apply` once more for activations.
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
            weights = args[len(args) - len(self.borrowed) :]
            for i, x in zip(self.borrowed, weights, strict=True):
                values[i] = x
            xs = keras.tree.pack_sequence_as(inputs.tensors, xs)
            structure = self._apply(Activations(xs, inputs.masks), values)
            leaves = keras.tree.flatten(structure)
            return [leaves[i] for i in _differentiable_first(leaves)]

        args = [tensors[i] for i in floats] or [tf.zeros(())]
        args += [carried[i] for i in self.borrowed]
        if self._remat:
            run = tf.recompute_grad(run)
        results = _placed(run, self.stage.device)(*args)
        leaves = keras.tree.flatten(structure)
        for i, x in zip(_differentiable_first(leaves), results, strict=True):
            leaves[i] = x
        return keras.tree.pack_sequence_as(structure, leaves)


def _placed(function: Callable, device: str) -> Callable:
    """Returns `function`, with a gradient that runs on `device`.

    TensorFlow builds gradients of functions without the device scopes around
    or inside them. Where such a gradient is inlined, it would run on the
    client instead of the worker that has the activations.
    """

    @tf.custom_gradient
    def placed(*args):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(args)
            results = function(*args)
        targets = [x for x in results if x.dtype.is_floating]

        def gradient(*upstream, variables=None):
            with tf.device(device):
                found = tape.gradient(
                    targets,
                    [*args, *(variables or [])],
                    output_gradients=list(upstream[: len(targets)]),
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            if variables is None:
                return found
            return found[: len(args)], found[len(args) :]

        return results, gradient

    return placed


def _differentiable_first(leaves: list) -> list[int]:
    """Returns the places of the tensors in `leaves`, those of floats first."""
    return sorted(
        (i for i, x in enumerate(leaves) if x is not None),
        key=lambda i: not leaves[i].dtype.is_floating,
    )


class StageCall:
    """One forward pass of a micro-batch, kept for its backward pass.

    The tape of the pass is the store of its activations.

    Args:
        function: The `StageFunction`.
        inputs: `Activations` of the micro-batch.
        carried: List of values of `function.carried`.
    """

    def __init__(
        self,
        function: StageFunction,
        inputs: Activations,
        carried: list[tf.Tensor],
    ):
        self.function = function
        self._inputs = keras.tree.flatten(inputs.tensors)
        self._carried = carried
        self._weights = [v.value for v in function.trainable]
        self._sources = [x for x in self._inputs if x.dtype.is_floating]
        if function.stop_inputs:
            self._sources = []
        self._sources += [carried[i] for i in function.borrowed]
        self._sources += self._weights
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._sources)
            self.result = function(inputs, carried)
        self._tape = tape

    def gradient(
        self, output_gradients: list, loss_gradients: list
    ) -> tuple[list, list, list]:
        """Returns the gradients of a micro-batch's backward pass.

        Args:
            output_gradients: List with a tensor or `None` for each flat
                output tensor.
            loss_gradients: List with a scalar for each loss.

        Returns:
            Tuple of lists with a tensor or `None` for each flat input, each
            carried value and each trainable weight that the stage owns.
        """
        targets, upstream = [], []
        pairs = zip(
            keras.tree.flatten(self.result.outputs.tensors)
            + self.result.losses,
            output_gradients + loss_gradients,
            strict=True,
        )
        for target, gradient in pairs:
            if target.dtype.is_floating and gradient is not None:
                targets.append(target)
                upstream.append(tf.cast(gradient, target.dtype))
        found: list = [None] * len(self._sources)
        if targets and self._sources:
            found = self._tape.gradient(
                targets, self._sources, output_gradients=upstream
            )
        by_source = iter(found)
        by_input = [
            next(by_source)
            if x.dtype.is_floating and not self.function.stop_inputs
            else None
            for x in self._inputs
        ]
        by_carried = [
            next(by_source) if i in self.function.borrowed else None
            for i in range(len(self._carried))
        ]
        return by_input, by_carried, list(by_source)


def call_layer(
    layer: keras.Layer, x: Any, training: bool | None, stage: Stage
) -> Any:
    """Calls a layer as `keras.Sequential` does, and names it on failure."""
    try:
        if layer._call_has_training_arg:
            return layer(x, training=training)
        return layer(x)
    except Exception as e:
        shapes = keras.tree.map_structure(
            lambda t: tuple(getattr(t, "shape", ())), x
        )
        e.add_note(
            f"Raised by layer '{layer.name}' (of type "
            f"{type(layer).__name__}) in stage {stage.index} on "
            f"{stage.device}, called on inputs of shape {shapes}."
        )
        raise


def _unique(variables) -> list[keras.Variable]:
    return list({id(v): v for v in variables}.values())
