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


class StageFunction:
    """The layers of a stage as a pure function: state in, state out.

    Nothing is assigned while it runs, so running it once more (to recompute
    what the backward pass needs) has no effect and gives the same result. It
    reads the weights that the stage owns where they are. State that differs
    from one micro-batch to the next and borrowed variables come in as tensors.

    Args:
        stage: The `Stage`.
        carried: List of variables whose values are passed in.
        training: Boolean, or `None` for Keras's default.
        compiled: Boolean, whether to run as a `tf.function` of its own, traced
            once for all micro-batches.
        jit_compile: Boolean, whether XLA compiles that function.
        stop_inputs: Boolean, whether the inputs need no gradient.
    """

    def __init__(
        self,
        stage: Stage,
        carried: list[keras.Variable],
        training: bool | None,
        compiled: bool,
        jit_compile: bool,
        stop_inputs: bool,
    ):
        self.stage = stage
        self.carried = carried
        self.training = training
        self.stop_inputs = stop_inputs
        self.updated: list[keras.Variable] = []
        carried_ids = {id(v) for v in carried}
        self.trainable = stage.trainable(stage.owned)
        trainable_ids = {id(v) for v in self.trainable}
        # Frozen weights: TensorFlow would compute gradients for them.
        self._frozen = [
            v
            for v in stage.owned
            if id(v) not in trainable_ids | carried_ids and v.value.trainable
        ]
        self._call: Callable[..., Result] = self._apply
        if compiled:
            self._call = tf.function(
                self._apply,
                autograph=False,
                jit_compile=jit_compile or None,
                experimental_attributes={"_noinline": True},
            )

    def __call__(self, inputs: Activations, carried: list) -> Result:
        return self._call(inputs, carried)

    def _apply(self, inputs: Activations, carried: list) -> Result:
        x = inputs.unpack()
        if self.stop_inputs:
            x = keras.tree.map_structure(tf.stop_gradient, x)
        mapping = list(zip(self.carried, carried, strict=True))
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
            updates = [scope.get_current_value(v) for v in self.updated]
            return Result(Activations.of(x), losses, updates)


class StageCall:
    """One forward pass of a micro-batch, kept for its backward pass.

    The tape of the pass is the store of its activations. With `remat` the
    tape holds only the inputs, and `tf.recompute_grad` runs the function once
    more when the gradient is asked for.

    Args:
        function: The `StageFunction`.
        inputs: `Activations` of the micro-batch.
        carried: List of values of `function.carried`.
        remat: Boolean, whether to recompute activations.
    """

    def __init__(
        self,
        function: StageFunction,
        inputs: Activations,
        carried: list[tf.Tensor],
        remat: bool,
    ):
        self._inputs = keras.tree.flatten(inputs.tensors)
        self._floats = [
            i for i, x in enumerate(self._inputs) if x.dtype.is_floating
        ]
        # State has no gradient; weights borrowed from another stage do.
        ids = {id(v) for v in function.stage.trainable(function.carried)}
        self._borrowed = [
            i for i, v in enumerate(function.carried) if id(v) in ids
        ]
        self._num_carried = len(carried)
        self._weights = [v.value for v in function.trainable]
        structure: Result | None = None

        def run(*args):
            nonlocal structure
            tensors, values = list(self._inputs), list(carried)
            for i, x in zip(self._floats, args, strict=False):
                tensors[i] = x
            if not self._floats:
                # `recompute_grad` ties the recomputation to the gradient by
                # its floating-point arguments: the token where there is none.
                tensors = [
                    x + tf.cast(args[0], x.dtype) if x.dtype.is_integer else x
                    for x in tensors
                ]
            weights = args[len(args) - len(self._borrowed) :]
            for i, x in zip(self._borrowed, weights, strict=True):
                values[i] = x
            structure = function(
                Activations(
                    keras.tree.pack_sequence_as(inputs.tensors, tensors),
                    inputs.masks,
                ),
                values,
            )
            leaves = [x for x in keras.tree.flatten(structure) if x is not None]
            return sorted(leaves, key=lambda x: not x.dtype.is_floating)

        self._args = [self._inputs[i] for i in self._floats] or [tf.zeros(())]
        self._args += [carried[i] for i in self._borrowed]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._args)
            tape.watch(self._weights)
            values = (tf.recompute_grad(run) if remat else run)(*self._args)
        self._tape = tape

        # Stable sorting by dtype put the differentiable values first.
        leaves = keras.tree.flatten(structure)
        places = sorted(
            (i for i, x in enumerate(leaves) if x is not None),
            key=lambda i: not leaves[i].dtype.is_floating,
        )
        for i, value in zip(places, values, strict=True):
            leaves[i] = value
        self.result: Result = keras.tree.pack_sequence_as(structure, leaves)

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
        found: list = [None] * (len(self._args) + len(self._weights))
        if targets and (self._floats or self._borrowed or self._weights):
            found = self._tape.gradient(
                targets,
                self._args + self._weights,
                output_gradients=upstream,
            )
        by_input: list = [None] * len(self._inputs)
        for i, gradient in zip(self._floats, found, strict=False):
            by_input[i] = gradient
        by_carried: list = [None] * self._num_carried
        start = len(self._args) - len(self._borrowed)
        for i, gradient in zip(self._borrowed, found[start:], strict=False):
            by_carried[i] = gradient
        return by_input, by_carried, found[len(self._args) :]


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
