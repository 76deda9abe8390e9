"""`Pipelined`, the base of `PipelinedSequential` and `PipelinedModel`."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import slots
from tf_gpipe.devices import worker_lost
from tf_gpipe.models import planned
from tf_gpipe.models import refused
from tf_gpipe.models import several_steps
from tf_gpipe.models.arguments import Arguments
from tf_gpipe.models.deciding import bytes_of_weights
from tf_gpipe.models.deciding import decide
from tf_gpipe.models.placing import form_stages
from tf_gpipe.models.placing import put_on_devices
from tf_gpipe.models.saving import Saving
from tf_gpipe.models.step_functions import StepFunctions
from tf_gpipe.models.step_functions import while_running
from tf_gpipe.models.summary import stage_table
from tf_gpipe.models.training import PipelinedTraining
from tf_gpipe.partition import auto_remat
from tf_gpipe.partition.config import PipelineConfig
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage import layers_within
from tf_gpipe.stage import model_graph
from tf_gpipe.stage import seeds
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.stage import Stage
from tf_gpipe.step import batch_statistics


@worker_lost.naming_failures_of(
    *("_place", "rebalance", "export"),
    *("fit", "train_on_batch", "evaluate", "test_on_batch"),
    *("predict", "predict_on_batch", "get_weights", "set_weights"),
    *("save", "save_weights", "load_weights"),
)
class Pipelined(Arguments, Saving, StepFunctions, PipelinedTraining):
    """Mixin: a Keras model that is cut into stages.

    For a `keras.Model` that calls `_configure` in `__init__`, and `_place`
    with its `Graph` once its layers are built.
    """

    _config: PipelineConfig
    _pipeline: Pipeline | None
    # For each stage, its device in each replica.
    _stage_devices: list[list[str]]
    # A hash of the variables that the step functions have been traced with.
    _traced_with: int | None
    # What `_trains` and `bytes_of_weights` returned as the cut was decided.
    _decided_for: tuple
    # Whether the class is derived from a user's class and a pipeline's.
    _keeps_class = False

    fit: Any = while_running("train", PipelinedTraining.fit)
    evaluate = while_running("test", keras.Model.evaluate)
    predict = while_running("predict", keras.Model.predict)

    def _configure(self, plan: Any, layers: Any, **given: Any) -> None:
        # XLA compiles for one device: a model with a pipeline in it spans
        # several.
        self.supports_jit = False
        self._config = PipelineConfig(
            **planned.arguments(plan, layers, **given)
        )
        self._pipeline = None
        self._traced_with = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Tuple of the `Stage`s, first to last.

        Raises:
            ValueError: If the model has not been built.
        """
        return self._built_pipeline().stages

    def rebalance(self, balance: Any = "time") -> None:
        """Cuts a built model into stages anew.

        Weights and optimizer state move to the devices of their new stages,
        with their values. Functions that `fit`, `evaluate` and `predict` have
        traced are traced again, at the next step if a callback calls this while
        they run; a `tf.function` of your own that calls the model must be made
        again, and a model that has it as a layer compiled again.

        Args:
            balance: Layer counts, the name of what stages shall have in equal
                parts, or a function: what the argument `balance` of the class
                may be.

        Raises:
            ValueError: If `balance` is not valid, or the model has not been
                built.

        Example:

        >>> layers = [keras.layers.Dense(8) for _ in range(4)]
        >>> model = tf_gpipe.PipelinedSequential(
        ...     [keras.Input((8,)), *layers],
        ...     num_stages=2,
        ...     devices=["CPU:0", "CPU:0"],
        ... )
        >>> model.rebalance([1, 3])
        >>> [len(stage.layers) for stage in model.stages]
        [1, 3]
        """
        pipeline = self._built_pipeline()
        previous = self._config
        self._config = dataclasses.replace(
            previous, balance=balance, num_stages=len(pipeline.stages)
        )
        try:
            self._place(pipeline.graph)
        except BaseException:
            self._config = previous
            raise
        self._forget_traced()

    def make_train_function(self, force=False):
        """Makes the function of a step of `fit`; with `force`, anew."""
        self._decide_again()
        self._follow_changes()
        return super().make_train_function(force=force)

    def make_test_function(self, force=False):
        """Makes the function of a step of `evaluate`; with `force`, anew."""
        self._follow_changes()
        return super().make_test_function(force=force)

    def make_predict_function(self, force=False):
        """Makes the function of a step of `predict`; with `force`, anew."""
        self._follow_changes()
        return super().make_predict_function(force=force)

    def summary(
        self, line_length=None, positions=None, print_fn=None, *args, **kwargs
    ):
        """Prints Keras's summary, then a table of the stages.

        The table has a row a stage: its device, layers, parameters, and what
        it sends to which stage for a row of a batch, in KiB. Below it are the
        schedule and the bubble.

        Args:
            line_length: Integer, characters of a line. Defaults to the width
                of the terminal.
            positions: As for `keras.Model.summary`.
            print_fn: Function that is called with each text. Defaults to
                `print`.
            *args: Further arguments of `keras.Model.summary`.
            **kwargs: Further arguments of `keras.Model.summary`.

        Example:

        >>> layers = [keras.Input((8,)), keras.layers.Dense(8)]
        >>> model = tf_gpipe.PipelinedSequential(layers, num_stages=1)
        >>> texts = []
        >>> model.summary(print_fn=texts.append)
        >>> "Schedule 1f1b" in texts[-1]
        True
        """
        super().summary(line_length, positions, print_fn, *args, **kwargs)
        if self._pipeline is not None:
            found = stage_table(
                self._pipeline,
                self._config.nominal_length,
                line_length,
                several_steps.waits(self),
            )
            (print_fn or print)(found)

    def load_weights(self, filepath, skip_mismatch=False, **kwargs):
        # Keras drops the file's optimizer state, with a warning, if the
        # optimizer does not have its variables yet.
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and self.built:
            slots.build(self)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def stateless_call(self, *args, **kwargs):
        """Not supported: a pipeline reads its weights from their devices.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "A pipeline reads its weights on their devices, so they cannot be "
            "passed to it. Call the model itself, under a `tf.GradientTape` "
            "for gradients."
        )

    def _place(self, graph: Graph) -> None:
        """Forms the stages and puts the weights on their devices."""
        config = self._config
        schedule, devices = self._resolve(
            [x.layer for x in graph.nodes], len(graph.nodes)
        )
        with self._strategy_scope():
            layers_within.build(graph)
        worker_lost.note_devices(self, devices)
        optimizer = getattr(self, "optimizer", None)
        # Within a step, other threads may draw its data.
        running = self._training_run is not None or not tf.executing_eagerly()
        with contextlib.nullcontext() if running else seeds.drawn_again():
            found = decide(
                self.name, graph, config, schedule, devices, optimizer
            )
        stages = form_stages(graph, found.counts, found.devices)
        with self._strategy_scope():
            put_on_devices(stages)
            seeds.global_seed()
        self._pipeline = Pipeline(
            graph,
            stages,
            found.schedule,
            config.remat,
            config.boundary_dtype,
            None
            if isinstance(config.schedule, Schedule)
            else config.num_micro_batches or schedule.num_micro_batches,
            [(x, x.layers) for x in graph.models],
            chosen=found.recomputed,
        )
        if self._traced_with is None:
            # Otherwise `_follow_changes` notes it, once it has found that the
            # variables have moved: whatever fails until then.
            self._traced_with = self._places()
        self._note_decision(bytes_of_weights(graph, config, optimizer))

    def _places(self) -> int:
        """Returns a number that changes if any variable moves."""
        stages = self._pipeline.stages if self._pipeline is not None else ()
        ids = (upstream.variable_id(v) for x in stages for v in x.variables)
        return hash(tuple(ids))

    def _note_decision(self, size: Any) -> None:
        # Past `__setattr__`, with which Keras would track the optimizer.
        object.__setattr__(self, "_decided_for", (*self._trains(), size))

    def _trains(self) -> tuple:
        """Returns the optimizer, and whether each variable is trained."""
        stages = self._pipeline.stages if self._pipeline is not None else ()
        return getattr(self, "optimizer", None), [
            v.trainable for stage in stages for v in stage.variables
        ]

    def _decide_again(self) -> None:
        """Cuts the model anew if it trains other weights, or with more slots.

        Only where the cut depends on them: with `remat="auto"`.
        """
        config = self._config
        if self._pipeline is None or config.remat != AUTO_REMAT:
            return
        optimizer, trained, size = self._decided_for
        now, trained_now = self._trains()
        if trained == trained_now:
            if now is optimizer:
                return
            if size == bytes_of_weights(self._pipeline.graph, config, now):
                self._note_decision(size)
                return
        self.rebalance(config.balance)

    def _follow_changes(self) -> None:
        """Places weights that layers have got since, as by `enable_lora`.

        Also forgets traced functions if variables have moved, as another
        pipeline of the same layers moves them.
        """
        if self._pipeline is None:
            return
        stages = self._pipeline.stages
        if any(
            [*map(id, stage.used())] != [*map(id, stage.variables)]
            for stage in stages
        ):
            config = self._config
            balance: Any = [len(stage.nodes) for stage in stages]
            if config.remat == AUTO_REMAT and auto_remat.cuts(config.balance):
                balance = config.balance
            self.rebalance(balance)
            self._config = config
        found = self._places()
        if self._traced_with not in (None, found):
            self._forget_traced()
        self._traced_with = found

    def _forget_traced(self) -> None:
        """Drops the traced step functions; slots follow moved variables.

        An optimizer looks up its slots by the identity of variables.
        """
        self.train_function = None
        self.test_function = None
        self.predict_function = None
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and optimizer.built:
            with self._strategy_scope():
                slots.place(optimizer)
            slots.find_again(optimizer)

    def _resolve(
        self, layers: Sequence[keras.Operation], calls: int | None = None
    ) -> tuple[Schedule, list[list[str]]]:
        """Checks the layers; returns the schedule and the stages' devices.

        Args:
            layers: Sequence of layers, in the order of their calls.
            calls: Integer, the number of layer calls. Defaults to the number
                that `layers`, each called once, are opened into.

        Returns:
            The result of `PipelineConfig.resolve`.
        """
        if not layers:
            raise ValueError(
                f"Model '{self.name}' has no layers. Call `model.add(layer)`."
            )
        resolved = self._config.resolve(
            calls or model_graph.num_calls(layers),
            self._distribute_strategy,
            layers,
        )
        for layer in layers:
            refused.check_layer(layer)
            if resolved[0].num_micro_batches > 1:
                batch_statistics.check(layer)
        return resolved

    def _strategy_scope(self) -> contextlib.AbstractContextManager:
        """Returns the scope of the strategy that the model was made under."""
        if self._distribute_strategy is None or tf.distribute.has_strategy():
            return contextlib.nullcontext()
        return self._distribute_strategy.scope()

    def _built_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            self._resolve(self.layers)
            raise ValueError(
                f"Model '{self.name}' has no stages yet, because it has not "
                "been built. Give it an `Input` as its first layer, call "
                "`model.build(input_shape)`, or call it on data."
            )
        changed = self._pipeline.changed()
        if changed is not None:
            raise ValueError(
                f"Model '{changed.name}', whose layers are layers of the "
                f"pipeline '{self.name}', has got or lost layers since that "
                "was made. Make the pipeline anew."
            )
        return self._pipeline
