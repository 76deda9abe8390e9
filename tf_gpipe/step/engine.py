"""Runs a schedule: places its tasks on devices, in order, in one graph."""

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
from tf_gpipe.stage.activations import Activations
from tf_gpipe.stage.function import StageFunction
from tf_gpipe.stage.gradients import GradientSum
from tf_gpipe.stage.gradients import of_devices
from tf_gpipe.stage.pipeline import Pipeline
from tf_gpipe.step.added_losses import AddedLosses
from tf_gpipe.step.exchange import Exchange
from tf_gpipe.step.exchange import total
from tf_gpipe.step.loss import MicroBatchLoss
from tf_gpipe.step.masks import masks_ahead
from tf_gpipe.step.micro_batch import Split
from tf_gpipe.step.outputs import Outputs
from tf_gpipe.step.row_dependence import RowDependence
from tf_gpipe.step.running import Gradients
from tf_gpipe.step.running import RunningStages
from tf_gpipe.step.running import StageMode
from tf_gpipe.step.state import StateVersions
from tf_gpipe.step.task_order import TaskOrder


class MiniBatch:
    """The run of one mini-batch through the stages of a pipeline.

    The equivalent loop on one device:

        for task in schedule.steps(remat):
            if task is forward:
                call[k, m] = stages[k](inputs of stage k, micro-batch m)
            elif task is recompute:
                call[k, m].recompute()
            elif task is backward:
                call[k, m].backward(gradients of its outputs, sums[k])
            if task is weights, or is backward and that is not split:
                call[k, m].weights(sums[k])

    While `tf.function` traces it, the loop emits the operations of each task on
    its stage's device, after the previous task of that device. Tensors between
    stages are sent by TensorFlow's runtime as soon as they are ready, so stages
    work at the same time. Eagerly, the loop runs as it is written.

    Args:
        pipeline: The stages and their schedule.
        inputs: For each input of the model a nested structure of the
            mini-batch's tensors.
        training: `None` for Keras's default.
        gradients: Which gradients are asked for, a `Gradients`.
        stages: How the stages run, a `StageMode`. Eagerly they run `INLINE`.
        timed: Whether to take the time of each task.
        previous: The mini-batch of the previous training step, if that is in
            the same graph: its stages are used again, and each device starts
            this mini-batch after its tasks of the previous one.

    Attributes:
        pipeline: As given.
        split: `Split` of the mini-batch.
        outputs: `Outputs`, of the mini-batch.
        added: `AddedLosses`, of all layers.
        exchange: `Exchange`, which has the gradients of the inputs.
        order: `TaskOrder`, which has the times of tasks.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: tuple,
        training: bool | None,
        gradients: Gradients = Gradients.INPUTS_AND_WEIGHTS,
        stages: StageMode = StageMode.FUNCTIONS,
        timed: bool = False,
        previous: "MiniBatch | None" = None,
    ):
        self.pipeline = pipeline
        inputs = replicas.fed(inputs)
        self.split = Split(inputs, pipeline.schedule.num_micro_batches)
        self.exchange = Exchange(pipeline, self.split, inputs)
        self._versions = StateVersions(
            self.split, pipeline.device_of, watched=not training
        )
        # `PhasedCall` or `TapedCall`.
        self._calls: dict[tuple[int, int], Any] = {}
        self._dependence = RowDependence(pipeline.graph, inputs, training)
        self.added = AddedLosses(pipeline.stages, self.split, self._dependence)
        # By micro-batch: the gradient of each part of the outputs, or `None`.
        self._output_gradients: dict[int, list] = {}
        self._sums: list[GradientSum] = []
        self._loss_sum = GradientSum(self.split.num_micro_batches > 1)
        self._loss_weights: list[keras.Variable] = []
        # Ids of the variables that losses of micro-batches read.
        self._read_by_loss: set[int] = set()
        self._stages = RunningStages(pipeline, training, gradients, stages)
        if previous is not None:
            self._stages = previous._stages.reused_for(self._stages)
        else:
            self._stages = self._stages.traced_before(inputs)
        self.outputs = Outputs(
            pipeline, self.split, self.exchange, self._dependence
        )
        # A tape asks for gradients after all forward tasks. Then even the last
        # stage recomputes, or it would keep all micro-batches. Eager runs keep
        # the usual order: with all stages recomputed, a `ForwardAccumulator`
        # would silently find no derivatives, where it should raise.
        at_once = (
            gradients is not Gradients.FOR_OUTER_TAPE or tf.executing_eagerly()
        )
        self._steps = pipeline.steps(at_once)
        self._recomputed = {t for t in self._steps if t.kind == RECOMPUTE}
        self.order = TaskOrder(pipeline, timed and not tf.executing_eagerly())
        if previous is not None:
            self.order.follow(previous.order)

    def forward(self, tape: bool) -> None:
        """Runs all forward tasks.

        Args:
            tape: Whether backward tasks follow.
        """
        for task in self._steps:
            if task.kind == FORWARD:
                self._forward(task, tape)

    def backward(
        self, output_gradients: list, loss_gradients: Sequence[tf.Tensor]
    ) -> None:
        """Runs all backward tasks.

        Args:
            output_gradients: A gradient or `None` for each part of
                `outputs.whole()`.
            loss_gradients: A scalar gradient for each of `added.totals()`.
        """
        self._sums = self._no_gradients()
        self._output_gradients.update(
            self.outputs.split_gradients(output_gradients)
        )
        # A tape may run this after the model's call has returned.
        with placement.eagerly_alone():
            for task in self._steps:
                if task.kind != FORWARD:
                    self._run_task(task, loss_gradients)

    def interleave(
        self,
        loss: MicroBatchLoss,
        loss_gradient: tf.Tensor,
    ) -> list[list[tf.Tensor]]:
        """Runs all tasks in the order of the schedule.

        Args:
            loss: The loss, which runs on the last stage's device.
            loss_gradient: Scalar, the gradient of each of `added.totals()`.

        Returns:
            For each micro-batch the list of scalars from its loss.
        """
        self._sums = self._no_gradients()
        last = self.pipeline.last
        differentiate = loss.on_last_device(self.pipeline, self._stages.inline)
        weights: list[tf.Tensor] | None = None
        losses: dict[int, list[tf.Tensor]] = {}
        for task in self._steps:
            m = task.micro_batch
            if task.kind == FORWARD:
                self._forward(task, tape=True)
                continue
            if task.kind == BACKWARD and task.stage == last:
                # Labels are cut where they are, and before the task's turn.
                labels = loss.labels(m)
                # Not finished here: the backward task follows, and finishes it.
                with self.order.task(task):
                    if weights is None:
                        loss.prepare(self._like_whole(m))
                        weights = self._weights_of(loss)
                    outputs = self.exchange.outputs(m)
                    rows = self.split.valid(m), self.split.weight(m)
                    losses[m], by_output, by_weight = differentiate(
                        outputs, weights, *labels, *rows
                    )
                    self.outputs.check_loss(outputs, by_output)
                    self._output_gradients[m] = by_output
                    self._loss_sum.add(
                        zip(loss.weights, by_weight, strict=True)
                    )
            self._run_task(task, [loss_gradient] * self.added.count(m))
        return [losses[m] for m in range(self.split.num_micro_batches)]

    def commit_state(self) -> None:
        """Assigns the state that layers have updated.

        Raises:
            ValueError: If the loss has read it before.
        """
        for variable in self._versions.updated():
            if id(variable) in self._read_by_loss:
                raise ValueError(
                    f"The loss reads variable '{variable.path}', which layers "
                    "assign. Keras computes a loss after all layers, but "
                    f"schedule '{self.pipeline.schedule.name}' computes that "
                    "of a micro-batch before others' layers. Use "
                    "schedule='gpipe'."
                )
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

    def _forward(self, task: Task, tape: bool) -> None:
        k, m = task.stage, task.micro_batch
        backward = task._replace(kind=BACKWARD)
        stage = self._stages.of(k, backward in self.pipeline.schedule.split)
        device = self.pipeline.stages[k].device
        function: StageFunction = stage.function
        inputs = self.exchange.inputs(k, m)
        carried = [self._versions.read(v, m, device) for v in function.carried]
        with self.order.task(task, inputs) as finish:
            if tape:
                remat = task._replace(kind=RECOMPUTE) in self._recomputed
                call = stage.start(inputs, carried, remat)
                self._calls[k, m] = call
                result = call.result
            else:
                result = stage(inputs, carried)
            finish(result)
        self._versions.check_unmapped(function.unmapped, k, m)
        self.exchange.put(k, m, result.outputs)
        self.added.put(k, m, result.losses, function.added)
        self._versions.write(function.updated, result.updates, m)

    def _run_task(
        self, task: Task, loss_gradients: Sequence[tf.Tensor]
    ) -> None:
        """Runs a task that is no forward task."""
        if task.kind == BACKWARD:
            self._backward(task, loss_gradients)
            return
        # These tasks take nothing from other stages.
        with self.order.task(task) as finish:
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
        arrived = (
            self._output_gradients.pop(m)
            if last
            else self.exchange.output_gradients(k, m)
        )
        with self.order.task(task, arrived) as finish:
            if last:
                # The gradient of a loss that gathers rows is sparse.
                output_gradients = [
                    None if x is None else tf.convert_to_tensor(x)
                    for x in arrived
                ]
            else:
                output_gradients = [total(x) for x in arrived]
            added = self.added.gradients(k, m, loss_gradients)
            inputs = call.backward(output_gradients + added, self._sums[k])
            self.exchange.put_gradients(k, m, inputs)
            # A split backward pass has a task of its own for weights.
            splits = task in self.pipeline.schedule.split
            rest = call.for_weights if splits else self._add_gradients(task)
            finish((inputs, rest))

    def _no_gradients(self) -> list[GradientSum]:
        several = self.split.num_micro_batches > 1
        return [GradientSum(several) for _ in self.pipeline.stages]

    def _add_gradients(self, task: Task) -> list[tf.Tensor]:
        """Adds the gradients of weights of a micro-batch to the stage's sum.

        Returns tensors that are ready once all gradients have been added.
        """
        key = task.stage, task.micro_batch
        call = self._calls[key]
        if not self._stages.repeatable:
            del self._calls[key]
        return call.weights(self._sums[task.stage])

    def _like_whole(self, m: int) -> Any:
        """Returns stand-ins for the mini-batch's outputs, with its masks.

        Args:
            m: Index of a micro-batch, whose forward tasks have run.
        """
        tensors, masks, *_ = self.pipeline.packed(self.exchange.outputs(m))
        if any(x is not None for x in keras.tree.flatten(masks)):
            stages = range(len(self.pipeline.stages))
            of_each = masks_ahead(
                self.pipeline,
                [self._stages.of(k, splits=False).function for k in stages],
                self.exchange,
                self._versions,
                self.split.num_micro_batches,
            )
            masks = self.outputs.merged(of_each)
        like = self.outputs.like_whole(tensors, m)
        return Activations.of(like)._replace(masks=masks).unpack()

    def _weights_of(self, loss: MicroBatchLoss) -> list[tf.Tensor]:
        """Returns a loss's weights as tensors for the last stage's device."""
        self._loss_weights = loss.weights
        self._read_by_loss |= loss.read
        device = self.pipeline.stages[-1].device
        return [self._versions.start(v, 0, device) for v in loss.weights]
