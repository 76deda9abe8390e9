"""The stages of a pipeline as functions or inline, for one mini-batch."""

import enum
import functools
import threading
import weakref
from collections.abc import Collection
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage.blocks import likeness_of
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.graph import unique
from tf_gpipe.stage.likeness import Itself
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.seeds import global_seed
from tf_gpipe.stage.shared_layers import SharedLayers
from tf_gpipe.stage.shared_layers import shareable
from tf_gpipe.stage.stage import LayerRunner
from tf_gpipe.stage.stage import Stage
from tf_gpipe.stage.tape import TapedStage
from tf_gpipe.stage.tensorflow_state import TensorFlowState
from tf_gpipe.stage.tensorflow_state import find

# The most sets of traced stages that a pipeline keeps: for training and for
# inference, and for some sizes of mini-batches.
_MOST_TRACED = 8


class Gradients(enum.Enum):
    """The gradients that a mini-batch is run for.

    `INPUTS_AND_WEIGHTS`: all, asked for once.
    `WEIGHTS`: those of weights alone, for a training step.
    `NONE`: no gradients, in a step of `evaluate` or `predict`.
    `FOR_OUTER_TAPE`: all, for a gradient tape around the call of a model. It
    may ask more than once, and must not record reads of weights: stages get
    weights as tensors, which costs a copy in each recomputation, instead of
    reading their variables.
    """

    INPUTS_AND_WEIGHTS = enum.auto()
    WEIGHTS = enum.auto()
    NONE = enum.auto()
    FOR_OUTER_TAPE = enum.auto()


class StageMode(enum.Enum):
    """How stages run: as functions, which XLA may compile, or inline.

    Inline stages are operations of the surrounding program: eagerly, and if XLA
    compiles that program as a whole.
    """

    FUNCTIONS = enum.auto()
    XLA_FUNCTIONS = enum.auto()
    INLINE = enum.auto()


class RunningStages:
    """The runnable stages for one mini-batch, each made when first used.

    Eagerly they run inline, whatever is asked for.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        training: bool | None,
        gradients: Gradients,
        how: StageMode,
    ):
        self._pipeline = pipeline
        self._training = training
        self._gradients = gradients
        self._how = StageMode.INLINE if tf.executing_eagerly() else how
        # A step may freeze layers between its mini-batches.
        self._trained = tuple(
            v.trainable for stage in pipeline.stages for v in stage.variables
        )
        # Keys are numbers of stages, and whether backward passes are split.
        self._stages: dict[tuple[int, bool], Any] = {}
        self._shared: dict[bool, LayerRunner] = {}
        # The graph that the stages run in, if `traced_before` returned them.
        self._graph: weakref.ref | None = None
        # State in `tf.Variable`s, which layers of several stages may share.
        self._others: dict[Any, TensorFlowState] = {}
        # The current global seed: the user may have replaced it since the
        # model was built.
        self._seed = global_seed()
        # Kept alive for functions that read it after Keras has another one.
        pipeline.seeds.update((id(v), v) for v in self._seed)

    def _layer_runner(self, splits: bool) -> LayerRunner | None:
        """Returns what lets blocks that are alike share phases, if they may."""
        if (
            self._how is not StageMode.FUNCTIONS
            or self._gradients is Gradients.FOR_OUTER_TAPE
            or tf.distribute.has_strategy()
        ):
            return None

        def phases_of(stage: Stage) -> StagePhases:
            states = [v for v in stage.owned if not v.value.trainable]
            carried = [*self._seed, *states]
            return StagePhases(
                StageFunction(stage, carried, self._training, (), ()),
                splits,
                differentiated=self._differentiated,
            )

        if splits not in self._shared:
            self._shared[splits] = SharedLayers(self._blocks, phases_of).run
        return self._shared[splits]

    @functools.cached_property
    def _blocks(self) -> list[Graph]:
        """Blocks of layer calls that may share phases with others."""
        stages = self._pipeline.stages
        return shareable(
            self._pipeline.graph,
            stages,
            [self._recomputed(x.index) for x in stages],
        )

    def _recomputed(self, k: int) -> tuple[range, ...]:
        """Returns the ranges of stage `k`'s calls that are recomputed."""
        return self._pipeline.recomputed(k) if self._differentiated else ()

    @functools.cached_property
    def _untrained(self) -> Collection[Value]:
        """The values whose gradients no gradient of a weight depends on."""
        if self._gradients is not Gradients.WEIGHTS:
            return ()
        return self._pipeline.untrained()

    @property
    def _differentiated(self) -> bool:
        return self._gradients is not Gradients.NONE

    @property
    def inline(self) -> bool:
        return self._how is StageMode.INLINE

    @property
    def repeatable(self) -> bool:
        """Whether gradients may be asked for more than once."""
        return self._gradients is Gradients.FOR_OUTER_TAPE

    def reused_for(self, others: "RunningStages") -> "RunningStages":
        """Returns the stages for the next training step in the same graph.

        These stages if they are of the same kind as `others`, so that stages
        are traced once; otherwise `others`.
        """
        if self.inline or self._kind() != others._kind():
            return others
        self._read_weights_again()
        return self

    def traced_before(self, inputs: Any) -> "RunningStages":
        """Returns stages traced earlier that equal these, or these.

        Stages are traced earlier for example before the model was compiled
        again. If there are none, these are noted for the next time. Stages in
        use in the graph being built, or in one around it, are not returned: in
        that graph they keep the weights that they have read.

        Args:
            inputs: Nested structure of the model's inputs.
        """
        depends = self._depends(inputs)
        if depends is None:
            return self
        traced = self._pipeline.traced
        found = traced.pop(depends, self)
        graphs = upstream.graphs_being_built()
        if found._graph is not None and found._graph() in graphs:
            # In use in this graph, with the weights as they were read then.
            traced[depends] = found
            return self
        captured = [x for y in found._stages.values() for x in y.captured()]
        if any(map(tf.is_symbolic_tensor, captured)):
            # They have captured tensors of another step's graph.
            found = self
        traced[depends] = found
        found._graph = weakref.ref(graphs[0])
        for key in list(traced)[:-_MOST_TRACED]:
            del traced[key]
        found._read_weights_again()
        return found

    def _depends(self, inputs: Any) -> Hashable:
        """Returns a key of all that the stages' traces depend on.

        `None` if that is unknown, as for layers that are not Keras's own, which
        may depend on anything.
        """
        settings = upstream.settings_of_traces()
        if self.inline or tf.distribute.has_strategy() or settings is None:
            return None
        specs = [
            tf.DeviceSpec.from_string(x.device) for x in self._pipeline.stages
        ]
        if any(spec.job not in (None, "localhost") for spec in specs):
            # A worker that has been restarted does not have earlier traces.
            return None
        alike = likeness_of(self._pipeline.graph)
        if not alike.of_keras:
            return None
        variables = map(upstream.tensorflow_variable, alike.variables)
        return (
            self._kind()[1:],
            alike.form,
            (*map(Itself, [*variables, *self._seed]),),
            (*map(_spec, keras.tree.flatten(inputs)),),
            threading.get_ident(),
            keras.config.floatx(),
            keras.config.epsilon(),
            keras.config.image_data_format(),
            keras.config.is_flash_attention_enabled(),
            settings,
        )

    def _read_weights_again(self) -> None:
        for stage in self._stages.values():
            stage.read_weights_again()

    def _kind(self) -> tuple:
        """Returns a key that is equal for stages that run in the same way."""
        return (
            self._pipeline,
            self._training,
            self._gradients,
            self._how,
            self._trained,
        )

    def of(self, k: int, splits: bool) -> Any:
        """Returns the `StagePhases` or the `TapedStage` of a stage.

        Args:
            k: The number of the stage.
            splits: Whether it is for micro-batches whose backward pass is
                split. They have a trace of their own: to make whole backward
                passes of one for split ones takes longer.
        """
        splits = splits and self._differentiated
        if (k, splits) not in self._stages:
            function = self._function(k)
            self._stages[k, splits] = (
                TapedStage(function, repeatable=self.repeatable)
                if self.inline
                else StagePhases(
                    function,
                    splits,
                    self._recomputed(k),
                    jit_compile=self._how is StageMode.XLA_FUNCTIONS,
                    make_runner=lambda: self._layer_runner(splits),
                    differentiated=self._differentiated,
                )
            )
        return self._stages[k, splits]

    def _function(self, k: int) -> StageFunction:
        stage = self._pipeline.stages[k]
        # Passed in as snapshots: a recomputation must not see assignments made
        # since the forward pass.
        states = [
            v
            for v in stage.owned
            if self._gradients is Gradients.FOR_OUTER_TAPE
            or not v.value.trainable
        ]
        # Keras leaves the variables of metrics out of `Layer.variables`.
        metrics = [v for x in stage.layers for v in x.metrics_variables]
        several = tf.distribute.has_strategy()
        others = [] if several else find(stage.layers)
        for v in others:
            self._others.setdefault(v.ref(), TensorFlowState(v))
        return StageFunction(
            stage,
            [
                *self._seed,
                *states,
                *stage.borrowed,
                *unique(metrics),
                *(self._others[v.ref()] for v in others),
            ],
            self._training,
            self._untrained,
            # Only in training: in inference an outer tape would record reads
            # of foreign weights, so that no gradient is lost.
            self._pipeline.foreign(stage) if self._training else (),
        )


def _spec(x: tf.Tensor) -> tuple:
    """Returns the shape and dtype of an input, and whether it has a mask."""
    shape = x.shape.as_list() if x.shape.rank is not None else None
    return str(shape), x.dtype, upstream.mask(x) is not None
