"""Runs a schedule: places its tasks on devices, in order, in one graph."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe.devices import placement
from tf_gpipe.devices import replicas
from tf_gpipe.schedule.tasks import BACKWARD
from tf_gpipe.schedule.tasks import FORWARD
from tf_gpipe.schedule.tasks import RECOMPUTE
from tf_gpipe.schedule.tasks import Task
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.gradients import of_devices
from tf_gpipe.stage.phases import StagePhases
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.stage.seeds import global_seed
from tf_gpipe.stage.stage import Activations
from tf_gpipe.stage.tape import TapedStage
from tf_gpipe.stage.tensorflow_state import TensorFlowState
from tf_gpipe.stage.tensorflow_state import find
from tf_gpipe.step.added_losses import AddedLosses
from tf_gpipe.step.clock import Clock
from tf_gpipe.step.exchange import Exchange
from tf_gpipe.step.exchange import total
from tf_gpipe.step.loss import MicroBatchLoss
from tf_gpipe.step.masks import masks_ahead
from tf_gpipe.step.micro_batch import ROWS
from tf_gpipe.step.micro_batch import Split
from tf_gpipe.step.returned import kinds_of_outputs
from tf_gpipe.step.row_dependence import RowDependence
from tf_gpipe.step.state import StateVersions
from tf_gpipe.step.task_order import TaskOrder


class MiniBatch:
    """One mini-batch on its way through the stages of a pipeline.

    The equivalent loop on one device:

        for task in schedule.steps(remat):
            if task is forward:
                call[k, m] = stages[k](what it takes of micro-batch m)
            elif task is recompute:
                call[k, m].recompute()
            elif task is backward:
                call[k, m].backward(gradients of what it made, sums[k])
            if task is weights, or is backward and that is not split:
                call[k, m].weights(sums[k])

    Walked while `tf.function` traces, the loop emits the operations of a task
    on its stage's device, after those of that device's previous task. Values
    travel between stages as tensors, which TensorFlow's runtime sends as soon
    as they are there, so stages work at the same time. Run eagerly, it is just
    the loop.

    Args:
        pipeline: The stages and their schedule.
        inputs: Contents of each input of the model: nested structures of the
            mini-batch's tensors.
        training: `None` for Keras's default.
        jit_compile: Whether XLA compiles the stages' functions.
        apart: Whether stages run as functions of their own, which they do not
            when run eagerly.
        stop_inputs: Whether no gradient by the inputs is needed.
        pass_weights: Whether stages get weights as tensors, which hides them
            from tapes outside, at the price of a copy in each recomputation,
            instead of reading them where they are.
        repeatable: Whether `backward` may run more than once, as under a
            persistent tape.
        timed: Whether to take the time of each task.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: tuple,
        training: bool | None,
        jit_compile: bool = False,
        apart: bool = True,
        stop_inputs: bool = False,
        pass_weights: bool = False,
        repeatable: bool = False,
        timed: bool = False,
    ):
        self.pipeline = pipeline
        inputs = replicas.fed(inputs)
        self.split = Split(inputs, pipeline.schedule.num_micro_batches)
        self._exchange = Exchange(pipeline, self.split, inputs)
        self._versions = StateVersions(self.split, pipeline.device_of)
        # `PhasedCall` or `TapedCall`.
        self._calls: dict[tuple[int, int], Any] = {}
        self._dependence = RowDependence(pipeline.graph, inputs, training)
        self._added = AddedLosses(pipeline.stages, self.split, self._dependence)
        # By the parts of the outputs of each micro-batch, from the loss.
        self._upstream: dict[int, list] = {}
        self._sums: list[GradientSum] = []
        self._loss_sum = GradientSum(self.split.num_micro_batches > 1)
        self._loss_weights: list[keras.Variable] = []
        self._stages: dict[int, Any] = {}
        self._others: dict[Any, TensorFlowState] = {}
        # Not that of the time of the build, which the user may have replaced.
        self._seed = global_seed()
        # Functions that read it run on when Keras has got another one.
        pipeline.seeds.update((id(v), v) for v in self._seed)
        self._steps = pipeline.schedule.steps(pipeline.remat)
        self._apart = apart and not tf.executing_eagerly()
        clock = Clock() if timed and not tf.executing_eagerly() else None
        self._order = TaskOrder(pipeline, clock)
        self._training = training
        self._jit_compile = jit_compile
        self._stop_inputs = stop_inputs
        self._pass_weights = pass_weights
        self._repeatable = repeatable

    def forward(self, tape: bool) -> None:
        """Runs all forward tasks; with a `tape` if backward ones follow."""
        for task in self._steps:
            if task.kind == FORWARD:
                self._forward(task, tape)

    def backward(
        self, output_gradients: list, loss_gradients: Sequence[tf.Tensor]
    ) -> None:
        """Runs all backward tasks.

        Args:
            output_gradients: A tensor or `None` for each part of `outputs()`.
            loss_gradients: A scalar for each of `losses()`.
        """
        self._sums = self._no_gradients()
        outputs = [
            self._exchange.outputs(m).parts()
            for m in range(self.split.num_micro_batches)
        ]
        # By part of the outputs, then by micro-batch.
        pieces = [
            [None] * self.split.num_micro_batches
            if gradient is None
            else self.split.unmerge(gradient, parts, kind)
            for kind, gradient, *parts in zip(
                self._kinds_of_parts, output_gradients, *outputs, strict=True
            )
        ]
        for m in range(self.split.num_micro_batches):
            self._upstream[m] = [x[m] for x in pieces]
        # A tape may ask for it, outside of the call of the model.
        with placement.eagerly_alone():
            for task in self._steps:
                if task.kind != FORWARD:
                    self._after_forward(task, loss_gradients)

    def interleave(
        self,
        make_loss: Callable[[Activations, int], MicroBatchLoss],
        loss_inputs: Callable[[int], tuple],
        loss_gradient: tf.Tensor,
    ) -> list[list[tf.Tensor]]:
        """Runs all tasks in the order of the schedule.

        Args:
            make_loss: Function from the outputs of a micro-batch, and from
                its number, to the loss. That runs on the last stage's device.
            loss_inputs: Function from the number of a micro-batch to a tuple
                of nested structures of tensors.
            loss_gradient: Scalar, the gradient by each of `losses()`.

        Returns:
            List with the list of scalars of each micro-batch.
        """
        self._sums = self._no_gradients()
        loss: MicroBatchLoss | None = None
        losses: dict[int, list[tf.Tensor]] = {}
        for task in self._steps:
            m = task.micro_batch
            if task.kind == FORWARD:
                self._forward(task, tape=True)
                continue
            if task.kind == BACKWARD and task.stage == self.pipeline.last:
                outputs = self._exchange.outputs(m)
                # Unfinished: the backward task itself follows.
                with self._order.task(task):
                    if loss is None:
                        loss = make_loss(self.pipeline.packed(outputs), m)
                        differentiate = self._on_last_device(loss)
                        weights = self._weights_of(loss)
                    losses[m], self._upstream[m], by_weight = differentiate(
                        outputs, weights, *loss_inputs(m)
                    )
                    self._loss_sum.add(
                        (v, x)
                        for v, x in zip(loss.weights, by_weight, strict=True)
                        if x is not None
                    )
                    self._check_loss(outputs, self._upstream[m])
            self._after_forward(task, [loss_gradient] * self._added.count(m))
        return [losses[m] for m in range(self.split.num_micro_batches)]

    def outputs(self) -> Activations:
        """Returns the outputs of the mini-batch."""
        parts = [
            self.pipeline.packed(self._exchange.outputs(m))
            for m in range(self.split.num_micro_batches)
        ]
        kinds = keras.tree.pack_sequence_as(parts[0].tensors, self._kinds)
        with tf.device(self.pipeline.stages[-1].device):
            return Activations(
                *(
                    self.split.merge(list(x), kinds)
                    for x in zip(*parts, strict=True)
                )
            )

    def masks(self) -> Any:
        """Returns the Keras masks of the outputs of the mini-batch.

        They are there before the forward tasks are done; see `masks_ahead`.
        """
        stages = range(len(self.pipeline.stages))
        found = masks_ahead(
            self.pipeline,
            [self._stage(k).function for k in stages],
            self._exchange,
            self._versions,
            self.split.num_micro_batches,
        )
        kinds = keras.tree.pack_sequence_as(found[0], self._kinds)
        return self.split.merge(found, kinds)

    def like_outputs(self, outputs: Any, m: int) -> Any:
        """Returns tensors like those of the mini-batch.

        `outputs` is what the model returns for micro-batch `m`.
        """
        kinds = keras.tree.pack_sequence_as(outputs, self._kinds)
        return keras.tree.map_structure(
            lambda x, kind: self.split.like_whole(x, m, kind), outputs, kinds
        )

    @functools.cached_property
    def _kinds(self) -> list[str]:
        """How each flat tensor that the model returns is put together."""
        m = self._exchange.done()
        outputs = self._exchange.outputs(m).tensors
        if self.split.num_micro_batches == 1:
            return [ROWS] * len(keras.tree.flatten(outputs))
        rows = self.split.size(m)
        return kinds_of_outputs(
            self.pipeline,
            self._dependence,
            outputs,
            rows if isinstance(rows, int) else tf.get_static_value(rows),
        )

    @property
    def _kinds_of_parts(self) -> list[str]:
        """As `_kinds`, of each part of the outputs."""
        tensors = self._exchange.outputs(self._exchange.done()).by_tensor()
        return [
            kind
            for kind, parts in zip(self._kinds, tensors, strict=True)
            for _ in parts
        ]

    def _check_loss(self, outputs: Activations, gradients: list) -> None:
        """Refuses losses of what a micro-batch does not have its part of."""
        parts = outputs.parts()
        kinds = self._kinds_of_parts
        for x, kind, gradient in zip(parts, kinds, gradients, strict=True):
            if kind != ROWS and gradient is not None:
                raise ValueError(
                    "The model returns a tensor without a batch axis, of shape "
                    f"{x.shape}. Its loss cannot be put together from micro-"
                    "batches, as a schedule that starts backward passes before "
                    "all forward passes are done needs. Use schedule='gpipe', "
                    "which computes the loss on the whole mini-batch, or "
                    "num_micro_batches=1."
                )

    def losses(self) -> list[tf.Tensor]:
        """Returns the losses that layers added, for the whole mini-batch."""
        return self._added.totals()

    def commit_state(self) -> None:
        """Assigns the state that layers have updated."""
        self._versions.commit(
            layer for stage in self.pipeline.stages for layer in stage.layers
        )

    def gradients(self) -> dict[int, Any]:
        """Returns the accumulated gradients by the ids of their variables."""
        stages = self.pipeline.stages
        sums = [
            (stage.device, stage.variables, gradient_sum)
            for stage, gradient_sum in zip(stages, self._sums, strict=True)
        ]
        last = stages[-1].device
        sums.append((last, self._loss_weights, self._loss_sum))
        return of_devices(self.pipeline, sums)

    def input_gradients(self) -> list:
        """Returns a gradient or `None` for each flat input tensor."""
        return self._exchange.input_gradients()

    def _forward(self, task: Task, tape: bool) -> None:
        k, m = task.stage, task.micro_batch
        stage = self._stage(k)
        device = self.pipeline.stages[k].device
        function: StageFunction = stage.function
        inputs = self._exchange.inputs(k, m)
        carried = [self._versions.read(v, m, device) for v in function.carried]
        with self._order.task(task, inputs) as finish:
            if tape:
                backward = task._replace(kind=BACKWARD)
                remat = self.pipeline.schedule.recomputes(
                    backward, self.pipeline.remat
                )
                call = stage.start(inputs, carried, remat)
                self._calls[k, m] = call
                result = call.result
            else:
                result = stage(inputs, carried)
            finish(result)
        self._exchange.put(k, m, result.outputs)
        self._added.put(k, m, result.losses, function.added)
        self._versions.write(function.updated, result.updates, m)

    def _after_forward(
        self, task: Task, loss_gradients: Sequence[tf.Tensor]
    ) -> None:
        if task.kind == BACKWARD:
            self._backward(task, loss_gradients)
            return
        # What takes nothing from other stages.
        with self._order.task(task) as finish:
            if task.kind == RECOMPUTE:
                finish(self._calls[task.stage, task.micro_batch].recompute())
            else:
                finish(self._add_gradients(task))

    def _backward(
        self, task: Task, loss_gradients: Sequence[tf.Tensor]
    ) -> None:
        k, m = task.stage, task.micro_batch
        call = self._calls[k, m]
        last = k == self.pipeline.last
        arrived = self._upstream.pop(m) if last else self._exchange.back(k, m)
        with self._order.task(task, arrived) as finish:
            if last:
                # Those of a loss that gathers rows are sparse.
                upstream = [
                    None if x is None else tf.convert_to_tensor(x)
                    for x in arrived
                ]
            else:
                upstream = [total(x) for x in arrived]
            added = self._added.gradients(k, m, loss_gradients)
            inputs = call.backward(upstream + added, self._sums[k])
            self._exchange.put_gradients(k, m, inputs)
            # A split backward pass has a task of its own for weights.
            splits = self.pipeline.schedule.splits
            rest = call.kept if splits else self._add_gradients(task)
            finish((inputs, rest))

    def _no_gradients(self) -> list[GradientSum]:
        several = self.split.num_micro_batches > 1
        return [GradientSum(several) for _ in self.pipeline.stages]

    def _add_gradients(self, task: Task) -> list[tf.Tensor]:
        """Adds the gradients of weights of a micro-batch.

        Returns what is there when they have been added.
        """
        key = task.stage, task.micro_batch
        call = self._calls[key] if self._repeatable else self._calls.pop(key)
        return call.weights(self._sums[task.stage])

    def _weights_of(self, loss: MicroBatchLoss) -> list[tf.Tensor]:
        """Returns the weights that a loss uses, on the last stage's device."""
        self._loss_weights = loss.weights
        device = self.pipeline.stages[-1].device
        return [self._versions.start(v, 0, device) for v in loss.weights]

    def _on_last_device(self, loss: MicroBatchLoss) -> Callable:
        """Returns the loss of flat outputs, on the last stage's device."""
        device = self.pipeline.stages[-1].device

        def on_device(outputs, *args):
            with tf.device(device):
                return loss(self.pipeline.packed(outputs), *args)

        if not self._apart:
            return on_device
        return tf.function(on_device, autograph=False)

    def _stage(self, k: int) -> Any:
        """Returns the `StagePhases` or the `TapedStage` of a stage."""
        if k not in self._stages:
            stage = self.pipeline.stages[k]
            # Snapshots: a recomputation must not see what has been assigned
            # since the forward pass.
            states = [
                v
                for v in stage.owned
                if self._pass_weights or not v.value.trainable
            ]
            several = tf.distribute.has_strategy()
            others = [] if several else find(stage.layers)
            for v in others:
                # Layers of several stages may share it.
                self._others.setdefault(v.ref(), TensorFlowState(v))
            function = StageFunction(
                stage,
                [
                    *self._seed,
                    *states,
                    *stage.borrowed,
                    *(self._others[v.ref()] for v in others),
                ],
                self._training,
                self.pipeline.graph.inputs if self._stop_inputs else (),
                # In inference a tape outside would find them.
                self.pipeline.elsewhere(stage) if self._training else (),
            )
            self._stages[k] = (
                StagePhases(
                    function,
                    self.pipeline.schedule.splits,
                    self._jit_compile,
                )
                if self._apart
                else TapedStage(function, self._repeatable)
            )
        return self._stages[k]

    def times(self) -> tf.Tensor | None:
        """Returns when tasks ran; see `TaskOrder.times`."""
        return self._order.times()
