"""The stages of a pipeline as they run for one mini-batch."""

import enum
import functools
import itertools
from typing import Any

import tensorflow as tf

from tf_gpipe.stage import blocks
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.seeds import global_seed
from tf_gpipe.stage.shared_layers import SharedLayers
from tf_gpipe.stage.stage import Instead
from tf_gpipe.stage.stage import in_line
from tf_gpipe.stage.tape import TapedStage
from tf_gpipe.stage.tensorflow_state import TensorFlowState
from tf_gpipe.stage.tensorflow_state import find


class Gradients(enum.Enum):
    """Which gradients a mini-batch is run for.

    `OF_ALL`: by inputs and weights. `OF_STEP`: by weights alone, as a training
    step needs them. `OF_LAYER`: by both, for a gradient tape around the call
    of a model. That tape may ask more than once, and it must not see weights:
    stages get them as tensors, at the price of a copy in each recomputation,
    instead of reading them where they are.
    """

    OF_ALL = enum.auto()
    OF_STEP = enum.auto()
    OF_LAYER = enum.auto()


class StageMode(enum.Enum):
    """How stages run: as functions of their own, which XLA may compile.

    Or inline, as operations of the program around them: eagerly, and where
    that program is compiled as a whole.
    """

    FUNCTIONS = enum.auto()
    XLA_FUNCTIONS = enum.auto()
    INLINE = enum.auto()


class RunningStages:
    """The stages as they run for one mini-batch, each made when first used.

    Args:
        pipeline: The stages.
        training: `None` for Keras's default.
        gradients: Which gradients are asked for.
        how: How the stages run. Eagerly that is inline.
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
        self._stages: dict[int, Any] = {}
        # Layers of several stages may share it.
        self._others: dict[Any, TensorFlowState] = {}
        # Not that of the time of the build, which the user may have replaced.
        self._seed = global_seed()
        # Functions that read it run on when Keras has got another one.
        pipeline.seeds.update((id(v), v) for v in self._seed)

    @functools.cached_property
    def _instead(self) -> Instead:
        """What runs layers in place of their calls, where gradients follow."""
        if (
            self._how is not StageMode.FUNCTIONS
            or self._gradients is Gradients.OF_LAYER
            or tf.distribute.has_strategy()
        ):
            return in_line
        pipeline = self._pipeline
        return SharedLayers(
            blocks.find(
                pipeline.graph,
                [len(x.nodes) for x in pipeline.stages],
                self._pieces(),
            ),
            self._seed,
            self._training,
            pipeline.schedule.splits,
        ).run

    def _pieces(self) -> list[int]:
        """Returns how many calls there are, in a row, with the same fate.

        Of a stage those that are recomputed together, or not at all.
        """
        found = []
        for stage in self._pipeline.stages:
            bounds = {0, len(stage.nodes)}
            for part in self._pipeline.recomputed(stage.index):
                bounds |= {part.start, part.stop}
            found += [b - a for a, b in itertools.pairwise(sorted(bounds))]
        return found

    @property
    def inline(self) -> bool:
        return self._how is StageMode.INLINE

    @property
    def asked_again(self) -> bool:
        """Whether gradients may be asked for more than once."""
        return self._gradients is Gradients.OF_LAYER

    def serving(self, others: "RunningStages") -> "RunningStages":
        """Returns stages for the next training step of a graph.

        These, if they run as `others` would, so that they are traced once.
        """
        if self.inline or self._kind() != others._kind():
            return others
        for stage in self._stages.values():
            stage.read_weights_again()
        return self

    def _kind(self) -> tuple:
        return self._pipeline, self._training, self._gradients, self._how

    def __getitem__(self, k: int) -> Any:
        """Returns the `StagePhases` or the `TapedStage` of a stage."""
        if k not in self._stages:
            function = self._function(k)
            self._stages[k] = (
                TapedStage(function, repeatable=self.asked_again)
                if self.inline
                else StagePhases(
                    function,
                    self._pipeline.schedule.splits,
                    self._pipeline.recomputed(k),
                    jit_compile=self._how is StageMode.XLA_FUNCTIONS,
                    instead=lambda: self._instead,
                )
            )
        return self._stages[k]

    def _function(self, k: int) -> StageFunction:
        stage = self._pipeline.stages[k]
        # Snapshots: a recomputation must not see what has been assigned since
        # the forward pass.
        states = [
            v
            for v in stage.owned
            if self._gradients is Gradients.OF_LAYER or not v.value.trainable
        ]
        several = tf.distribute.has_strategy()
        others = [] if several else find(stage.layers)
        for v in others:
            self._others.setdefault(v.ref(), TensorFlowState(v))
        inputs = self._pipeline.graph.inputs
        return StageFunction(
            stage,
            [
                *self._seed,
                *states,
                *stage.borrowed,
                *(self._others[v.ref()] for v in others),
            ],
            self._training,
            inputs if self._gradients is Gradients.OF_STEP else (),
            # In inference a tape outside would find them.
            self._pipeline.foreign(stage) if self._training else (),
        )
