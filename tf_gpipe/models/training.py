"""The Keras training step over a pipeline."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gpipe import random_numbers
from tf_gpipe import upstream
from tf_gpipe.devices import slots
from tf_gpipe.devices import worker_lost
from tf_gpipe.devices.colocation import colocate
from tf_gpipe.devices.colocation import following_inputs
from tf_gpipe.devices.replicas import SeveralHosts
from tf_gpipe.models import mini_batch_loss
from tf_gpipe.models import several_steps
from tf_gpipe.models.callback_order import in_order
from tf_gpipe.models.calls import PipelinedCalls
from tf_gpipe.models.calls import inference_step
from tf_gpipe.models.traced_once import traced_once
from tf_gpipe.stage import seeds
from tf_gpipe.stage.call_overrides import CALLS
from tf_gpipe.stage.call_overrides import builds_optimizer
from tf_gpipe.stage.call_overrides import check_penalty
from tf_gpipe.stage.call_overrides import overrides
from tf_gpipe.step import penalties
from tf_gpipe.step.running import Gradients

_FIT = inspect.signature(keras.Model.fit)


class Run(NamedTuple):
    """The arguments and data of a running `fit`, which callbacks need.

    Attributes:
        initial_epoch: Integer.
        callbacks: The argument of `fit`, in the order of `in_order`.
        at_end: List of functions that are called when `fit` has ended or
            failed.
        logs: Dictionary, the logs of the epoch that `callbacks.Checkpoint` has
            resumed, in case no step of it is left.
        drawn: Function that returns where random numbers have been drawn from
            since `fit` began, as of `random_numbers.watched`.
        validation_data: The argument of `fit`.
        epochs: Keras's iterator over the epochs of the data.
        draws: What it returned once Keras had made `epochs`, for which it made
            the first batches: where these draw from.
    """

    initial_epoch: int
    callbacks: Any
    at_end: list[Callable[[], None]]
    logs: dict[str, Any]
    drawn: Callable[[], dict[str, str]]
    validation_data: Any = None
    epochs: Any = None
    draws: Mapping[str, str] = {}


class PipelinedTraining(PipelinedCalls, SeveralHosts):
    """Mixin: the `fit`, training step and test step of a pipelined model."""

    # What `make_train_function` makes, in Keras an attribute.
    train_function: Any
    # Set by `callbacks.Timeline`: a function that gets the times of tasks.
    _record_times: Any = None
    # While several steps are traced in one graph: a list with the previous
    # step's `MiniBatch`, or an empty one.
    _previous: list | None = None
    # While `fit` runs: read by `callbacks.Checkpoint`.
    _training_run: Run | None = None
    # Set by `worker_lost`, for the messages of errors.
    _newest_checkpoint: str | None = None

    @tf.autograph.experimental.do_not_convert
    @worker_lost.naming_failures
    def loss_and_gradients(self, x, y=None, sample_weight=None):
        """Runs a mini-batch forward and backward without applying gradients.

        For those who override `train_step`. The losses are those given to
        `compile`, and those that layers and regularisers add.

        Args:
            x: Nested structure of inputs of shape `(batch_size, ...)`.
            y: Labels, as for `fit`.
            sample_weight: Sample weights, as for `fit`, or `None`.

        Returns:
            Tuple of the loss of the mini-batch, a scalar; the list of its
            gradients, one for each of `trainable_variables`, ready for
            `optimizer.apply` (any loss scale of the optimizer is in them);
            and the outputs of the mini-batch.

        Raises:
            ValueError: If the schedule interleaves forward and backward
                passes and the loss needs the whole mini-batch at once.

        Example:

        >>> class Signs(tf_gpipe.PipelinedSequential):
        ...     def train_step(self, data):
        ...         x, y = data
        ...         loss, gradients, y_pred = self.loss_and_gradients(x, y)
        ...         signs = [keras.ops.sign(g) for g in gradients]
        ...         self.optimizer.apply(signs, self.trainable_variables)
        ...         for metric in self.metrics:  # `fit` shows this loss.
        ...             if metric.name == "loss":
        ...                 metric.update_state(loss)
        ...         return self.compute_metrics(x, y, y_pred)
        >>> layers = [keras.Input((8,)), keras.layers.Dense(1)]
        >>> model = Signs(layers, num_stages=1)
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((4, 8), "float32"), np.ones((4, 1), "float32")
        >>> model.fit(x, y, verbose=0).history["loss"][0] > 0
        True
        """
        pipeline, inputs = self._pipeline_for(x)
        pipeline = self._with_rows_of(inputs, pipeline, training=True)
        overridden = [
            name
            for name in (*CALLS, "compute_loss", "_compute_loss", "losses")
            if overrides(self, name)
        ]
        forwards_first = pipeline.schedule.forwards_first
        if forwards_first and any(name in overridden for name in CALLS):
            return mini_batch_loss.of_call(self, x, y, sample_weight)
        check_penalty(self)
        if overridden and not forwards_first:
            raise ValueError(
                f"{type(self).__name__} overrides `{overridden[0]}`, which "
                f"sees whole mini-batches, but schedule "
                f"'{pipeline.schedule.name}' starts backward passes before "
                "all forward passes are done. Use schedule='gpipe'."
            )
        run = self._mini_batch(
            pipeline,
            inputs,
            training=True,
            gradients=Gradients.WEIGHTS,
            timed=self._record_times is not None,
            previous=self._previous[-1] if self._previous else None,
        )
        if self._previous is not None:
            self._previous[:] = [run]
        # Eager tasks do not overlap, so their order does not matter.
        if forwards_first or tf.executing_eagerly():
            found = mini_batch_loss.after_all_forwards(
                self, run, x, y, sample_weight
            )
        else:
            found = mini_batch_loss.by_micro_batch(self, run, y, sample_weight)
        times = run.order.times()
        if times is not None:
            self._record_times(times, run.pipeline)
        return found

    def make_train_function(self, force=False):
        # Keras may have dropped the seed since the build. It must be made
        # again here, outside of the replicas, which cannot create it.
        with self.distribute_strategy.scope():
            seeds.global_seed()
        if self.optimizer is not None:
            if self.built and (
                self.optimizer.built or not builds_optimizer(self)
            ):
                slots.build(self)
            colocate(self.optimizer)
        if self.train_function is not None and not force:
            return
        super().make_train_function(force=force)
        count = several_steps.number(self)
        if count > 1:
            self.train_function = several_steps.in_one_graph(
                self, self.train_function, count
            )

    @contextlib.contextmanager
    def _steps_in_one_graph(self):
        """A scope in which training steps are traced one after another."""
        object.__setattr__(self, "_previous", [])
        try:
            yield
        finally:
            object.__setattr__(self, "_previous", None)

    @traced_once
    def train_step(self, data):
        """Trains on a mini-batch; `fit` traces it. Override it at will.

        Args:
            data: A mini-batch: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            Dictionary from the names of metrics to their values.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients, y_pred = self.loss_and_gradients(x, y, sample_weight)
        self._loss_tracker.update_state(
            upstream.unscaled_for_replicas(loss),
            sample_weight=tf.shape(keras.tree.flatten(x)[0])[0],
        )
        if self.trainable_variables:
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables, strict=True)
            )
        else:
            # Keras's own words.
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=2
            )
        with following_inputs():
            return self.compute_metrics(
                x, y, y_pred, sample_weight=sample_weight
            )

    @traced_once
    def test_step(self, data):
        """Evaluates a mini-batch; `evaluate` traces it. Override it at will.

        Args:
            data: A mini-batch: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            Dictionary from the names of metrics to their values.
        """
        with following_inputs(), inference_step(self):
            return super().test_step(data)

    def predict_step(self, data):
        """Predicts a mini-batch; `predict` traces it. Override it at will.

        Args:
            data: A mini-batch: `x`, `(x, y)` or `(x, y, sample_weight)`, of
                which `x` alone is used.

        Returns:
            What the model makes of `x`.
        """
        with inference_step(self):
            return super().predict_step(data)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args, **kwargs):
        bound = _FIT.bind(self, *args, **kwargs)
        given = bound.arguments
        if "callbacks" in given:
            given["callbacks"] = in_order(given["callbacks"])
        run = Run(
            given.get("initial_epoch", 0),
            given.get("callbacks"),
            at_end=[],
            logs={},
            drawn=random_numbers.watched(given.get("x")),
            validation_data=given.get("validation_data"),
        )
        self._note_run(run)
        try:
            return super().fit(*bound.args[1:], **bound.kwargs)
        finally:
            # Keras does not call `on_train_end` if `fit` fails.
            self._stop_recording()
            for end in run.at_end:
                end()
            self._note_run(None)
            upstream.start_at_epoch(self, None)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # The first iterator is that of `fit`, a later one of its validation.
        run = self._training_run
        if run is not None and run.epochs is None:
            self._note_run(run._replace(epochs=iterator, draws=run.drawn()))
        super()._maybe_symbolic_build(iterator, data_batch)

    def _get_metrics_result_or_logs(self, logs):
        run = self._training_run
        if run is not None and run.logs and not logs:
            # Keras has none if an epoch has no step.
            logs = dict(run.logs)
            run.logs.clear()
        return super()._get_metrics_result_or_logs(logs)

    def _note_run(self, run):
        # Keras's `__setattr__` would track the callbacks and the data in it.
        object.__setattr__(self, "_training_run", run)

    def _stop_recording(self):
        if self._record_times is not None:
            self._record_times = None
            self.train_function = None

    def _get_regularization_losses(self):
        return [
            penalties.of_weight(
                variable, self._built_pipeline().device_of(variable)
            )
            for variable in self.trainable_variables
            if variable.regularizer is not None
        ]
