"""Calls of a pipelined model as a Keras layer, within gradient tapes."""

import contextlib
import contextvars
import itertools
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import placement
from tf_gpipe.devices import replicas
from tf_gpipe.devices import worker_lost
from tf_gpipe.schedule import schedules
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.function_call import NO_SECOND_DERIVATIVES
from tf_gpipe.stage.stage import run_stage
from tf_gpipe.stage.structures import tensors
from tf_gpipe.step import batch_statistics
from tf_gpipe.step import micro_batch
from tf_gpipe.step.engine import MiniBatch
from tf_gpipe.step.running import Gradients
from tf_gpipe.step.running import StageMode

# The number of rows assumed for inference on mini-batches of unknown size, if
# more micro-batches are asked for than can be traced. It limits the number of
# micro-batches, on which results of inference do not depend.
_ROWS_ASKED = 32

# Whether a call is part of a step of `evaluate` or `predict`.
_in_inference_step = contextvars.ContextVar("in_inference_step", default=False)


@contextlib.contextmanager
def inference_step(model: Any) -> Iterator[None]:
    """A scope in which calls of the model keep nothing for a backward pass.

    Only while `fit`, `evaluate` or `predict` runs: they turn the results into
    arrays, so nobody can differentiate them. Elsewhere it has no effect: users
    may differentiate a step that they call themselves.
    """
    running = any(vars(model).get("_running", {}).values())
    token = _in_inference_step.set(running)
    try:
        yield
    finally:
        _in_inference_step.reset(token)


class PipelinedCalls(upstream.Mixin):
    """Mixin: `call` runs a Keras model as a pipeline.

    For a functional `keras.Model`, or one with its own `_pipeline_for`.
    """

    # What `compile` was given as `jit_compile`.
    _stage_jit_compile: bool = False

    @property
    def jit_compile(self) -> bool:
        """False: XLA compiles stages, if `compile` says so, not whole steps."""
        # Keras would compile the whole step, which spans several devices; XLA
        # compiles for one. The value given to `compile` applies to stages.
        return False

    @jit_compile.setter
    def jit_compile(self, value: bool | str) -> None:
        self._stage_jit_compile = value is True

    @worker_lost.naming_failures
    def __call__(self, inputs, *args, **kwargs):
        # Checked before Keras builds the layers for a ragged tensor's shape.
        for x in keras.tree.flatten(inputs):
            if isinstance(x, tf.RaggedTensor):
                raise micro_batch.not_dense(x)
        return super().__call__(inputs, *args, **kwargs)

    def call(self, inputs, training=None, mask=None):
        """Runs the pipeline forward; a gradient tape runs it backward.

        Gradients in inference mode are right, but neither pipelined nor
        rematerialised.

        Args:
            inputs: Nested structure of tensors of shape `(batch_size, ...)`.
            training: Boolean, or `None` to take it from the enclosing call.
            mask: Nested structure of boolean tensors with a row for each row
                of the inputs, or `None`.

        Returns:
            Nested structure of tensors: the outputs of the mini-batch.

        Raises:
            TypeError: If `training` is not known when the call is traced, or
                `mask` is no mask.
        """
        try:
            training = None if training is None else bool(training)
        except Exception as error:
            raise TypeError(
                "`training` must be True, False or None, known when the call "
                f"is traced. Received: training={training!r}"
            ) from error
        if mask is not None:
            inputs = _with_masks(inputs, mask)
        with upstream.without_autocast(), placement.eagerly_alone():
            return self._run(inputs, training)

    @tf.autograph.experimental.do_not_convert
    def _run(self, inputs, training):
        pipeline, inputs = self._pipeline_for(inputs)
        if training:
            return self._run_in_training(pipeline, inputs)
        recorded = upstream.tapes_record()
        if recorded and pipeline.graph.outputs_are_reused:
            return self._run_layers(pipeline, inputs, training)
        mini_batch = self._mini_batch(
            pipeline,
            inputs,
            training,
            Gradients.INPUTS_AND_WEIGHTS
            if recorded or not _in_inference_step.get()
            else Gradients.NONE,
        )
        mini_batch.forward(tape=False)
        self._finish(mini_batch, mini_batch.added.totals())
        return mini_batch.outputs.whole().unpack()

    def _run_in_training(self, pipeline, inputs):
        """Runs the pipeline with a gradient of its own, for tapes around it."""
        mini_batch: Any = None
        outputs: Any = None
        given = Activations.of(inputs)

        @tf.custom_gradient
        def pipelined(*args):
            nonlocal mini_batch, outputs
            # Hidden from the tapes around the call, which would otherwise
            # record the pipeline's operations and differentiate them again.
            hidden = given.with_floats(map(tf.stop_gradient, args))
            mini_batch = self._mini_batch(
                pipeline,
                hidden.unpack(),
                training=True,
                gradients=Gradients.FOR_OUTER_TAPE,
            )
            mini_batch.forward(tape=True)
            outputs = mini_batch.outputs.whole()

            def gradient(*arrived, variables=None):
                found = iter(arrived)
                mini_batch.backward(
                    [
                        next(found) if x.dtype.is_floating else None
                        for x in outputs.parts()
                    ],
                    list(found),
                )
                by_part = mini_batch.exchange.input_gradients()
                floating = [x.dtype.is_floating for x in given.parts()]
                by_input = list(itertools.compress(by_part, floating))
                by_weight = self._weight_gradients(mini_batch, variables or ())
                handles = [v.handle for v in variables or ()]
                _refuse_gradients(
                    by_input + by_weight, [*args, *arrived, *handles]
                )
                by_input = by_input or [None]
                return by_input if variables is None else (by_input, by_weight)

            return outputs.floats() + mini_batch.added.totals(), gradient

        # A custom gradient needs an argument, even if no input is a float.
        args = given.floats() or [tf.zeros(())]
        results = iter(tf.nest.flatten(pipelined(*args)))
        outputs = outputs.with_floats(results)
        self._finish(mini_batch, list(results))
        return outputs.unpack()

    def _weight_gradients(self, mini_batch, variables):
        """Returns the gradient of each of the `tf.Variable`s.

        It is `None` for one that is no weight of the model.
        """
        ids = {v.value.ref(): id(v) for v in self.variables}
        found = mini_batch.gradients() if variables else {}
        return [found.get(ids.get(v.ref())) for v in variables]

    def _pipeline_for(self, x: Any) -> tuple:
        """Returns the `Pipeline`, and the inputs of its graph, from `x`.

        Args:
            x: What the model is called with: a nested structure of tensors,
                arrays or variables.
        """
        x = self._as_tensors(x)
        # Keras checks inputs in `__call__`, which `fit` does not go through.
        self._assert_input_compatibility(x)
        return self._built_pipeline(), tuple(self._standardize_inputs(x))

    @staticmethod
    def _as_tensors(x: Any) -> Any:
        """Converts a nested structure of arrays and variables to tensors.

        A missing input stays `None`: Keras's error about it has its name.
        """

        def as_tensor(t):
            if t is None:
                return None
            if isinstance(t, (tf.Variable, keras.Variable)):
                return tf.convert_to_tensor(t)
            return t if tf.is_tensor(t) else keras.ops.convert_to_tensor(t)

        return keras.tree.map_structure(as_tensor, x)

    def _run_layers(self, pipeline, inputs, training):
        """Calls the layers on the whole mini-batch, each on its device.

        For graphs in which a layer computes one output from another: a tape
        around the call then records how.
        """
        values = dict(zip(pipeline.graph.inputs, inputs, strict=True))
        for stage in pipeline.stages:
            with tf.device(stage.device):
                list(run_stage(stage, values, training))
        return keras.tree.map_structure(values.get, pipeline.graph.outputs)

    def _mini_batch(
        self,
        pipeline,
        inputs,
        training,
        gradients=Gradients.INPUTS_AND_WEIGHTS,
        timed=False,
        previous=None,
    ):
        if timed and upstream.within_xla():
            raise ValueError(
                "The Timeline callback cannot take times where XLA compiles "
                "the whole step, as it does on TPUs."
            )
        return MiniBatch(
            self._with_rows_of(inputs, pipeline, training),
            inputs,
            training,
            gradients,
            self._stage_mode(pipeline),
            timed,
            previous,
        )

    def _stage_mode(self, pipeline) -> StageMode:
        """Returns how stages run, by `compile` and what surrounds the call."""
        # Synchronised batch normalisation needs an all-reduce over replicas,
        # which is not possible inside the function of a stage.
        needs_all_reduce = replicas.several() and any(
            x.synchronized
            for stage in pipeline.stages
            for x in batch_statistics.batch_norms(stage.layers)
        )
        if needs_all_reduce and self._stage_jit_compile:
            raise ValueError(
                "XLA cannot compile a stage with a BatchNormalization of "
                "synchronized=True for several replicas. Received: "
                "compile(jit_compile=True)"
            )
        if needs_all_reduce or upstream.within_xla() or self.run_eagerly:
            return StageMode.INLINE
        if self._stage_jit_compile:
            return StageMode.XLA_FUNCTIONS
        return StageMode.FUNCTIONS

    def _with_rows_of(self, inputs, pipeline, training):
        """Returns the pipeline for as many rows as inputs have at most.

        Args:
            inputs: Nested structure of the tensors of a mini-batch.
            pipeline: The `Pipeline`.
            training: Boolean or `None`. In training, results may depend on the
                number of micro-batches, so that it must not be lowered.

        Raises:
            ValueError: If the rows are not known, and there could be more
                micro-batches than can be traced.
        """
        rows = micro_batch.static_rows(inputs)
        if rows is not None:
            return pipeline.with_rows(rows)
        at_most = self._rows_at_most()
        if math.isfinite(at_most):
            return pipeline.with_rows(int(at_most))
        asked = self._built_pipeline().num_micro_batches or 0
        if asked <= schedules.MOST_MICRO_BATCHES:
            return pipeline.with_rows(schedules.MOST_MICRO_BATCHES)
        if not training:
            return pipeline.with_rows(_ROWS_ASKED)
        raise ValueError(
            "`num_micro_batches` is capped at the number of rows of a "
            "mini-batch, which is unknown when the step is traced. Make the "
            "mini-batches with `dataset.batch(batch_size, "
            "drop_remainder=True)`, or the pipeline with "
            "num_micro_batches=batch_size. Received: "
            f"num_micro_batches={asked}"
        )

    def _finish(self, mini_batch: MiniBatch, losses: list) -> None:
        upstream.add_losses(zip(mini_batch.added.layers(), losses, strict=True))
        mini_batch.commit_state()


def _with_masks(inputs: Any, mask: Any) -> Any:
    """Returns inputs with masks attached, the n-th flat one to the n-th input.

    As Keras does, whose inputs and masks may be nested differently.
    """
    given = Activations.of(inputs)
    masks = keras.tree.flatten(given.masks)
    for i, x in enumerate(keras.tree.flatten(mask)[: len(masks)]):
        shape = getattr(x, "shape", None)
        if x is not None and (shape is None or not len(shape)):
            raise TypeError(
                "`mask` must be None, or tensors of booleans with a row for "
                f"each row of the inputs. Received: mask={mask!r}"
            )
        if x is not None:
            masks[i] = tf.convert_to_tensor(x)
    return given._replace(
        masks=keras.tree.pack_sequence_as(given.masks, masks)
    ).unpack()


def _refuse_gradients(gradients: list, sources: list) -> None:
    """Makes second derivatives an error, by a gradient that raises.

    The backward pass is hidden from tapes, which would take its results for
    constants.

    Args:
        gradients: List of the tensors that the backward pass returns.
        sources: List of the tensors and variable handles that they depend on.
    """

    def refuse(*_):
        raise NotImplementedError(NO_SECOND_DERIVATIVES)

    upstream.record_gradient(tensors(gradients), sources, refuse)
