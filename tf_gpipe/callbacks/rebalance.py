"""`Rebalance`: cuts the model anew in training, by measured task times."""

import collections
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe.callbacks.step_times import StageSeconds
from tf_gpipe.callbacks.step_times import StepTimes
from tf_gpipe.callbacks.step_times import simulated
from tf_gpipe.callbacks.step_times import stage_seconds
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import measured_calls
from tf_gpipe.partition.contiguous import split
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.partition.uncounted import UncountedError
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import ranges
from tf_gpipe.stage.pipeline import Pipeline

# The costs by which the time of a stage is divided among its layers.
_BY = ("time", "flops")
# The number of steps that are measured before each decision.
_NUM_STEPS = 5


class NewCut(NamedTuple):
    """A cut, and the simulated seconds of a step before it and with it."""

    counts: list[int]
    before: float
    after: float


class Rebalance(StepTimes):
    """Cuts the model anew in training, where that pays for itself.

    The callback takes the times of the tasks of the last steps. It shares out a
    stage's time among the stage's layers, as `by` weighs them; devices may
    differ in speed. It calls `model.rebalance` with the cut that follows, if
    that is expected to save more seconds in the remaining steps than tracing
    takes, namely as many as the first step took longer than others. If the
    number of remaining steps is not known, as many steps are assumed as there
    were. Results do not change.

    Only with `remat="auto"` does the callback look at memory: then it keeps the
    cut if `memory_limit` does not allow another one.

    Args:
        every: Integer, the number of steps from one decision to the next.
        by: `"time"`, the seconds that layers take alone on the devices of their
            stages, which are measured once, at the first decision; or
            `"flops"`, the operations of layers. Where a layer has neither, such
            as one that refuses made-up inputs, a warning says so, and the cut
            is kept.

    Raises:
        ValueError: If an argument is not valid; or, as training begins, if
            replicas are on several hosts, which would not decide alike.

    Attributes:
        cuts: Dictionary from the numbers of the steps of `fit` after which the
            model was cut anew to the numbers of layers of each stage.

    Example:

    >>> layers = [keras.layers.Dense(n) for n in (512, 512, 8, 8)]
    >>> model = tf_gpipe.PipelinedSequential(
    ...     [keras.Input((64,)), *layers],
    ...     num_stages=2,
    ...     devices=["CPU:0", "CPU:0"],
    ... )
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((64, 64), "float32")
    >>> rebalance = tf_gpipe.callbacks.Rebalance(every=2)
    >>> fitted = model.fit(x, x[:, :8], 16, verbose=0, callbacks=[rebalance])
    >>> rebalance.cuts  # of so short a run, none pays for itself
    {}
    """

    def __init__(self, every: int = 100, by: str = "time"):
        super().__init__()
        self._every = checks.positive_integer("every", every)
        checks.one_of("by", by, _BY)
        self._by = by
        self.cuts: dict[int, list[int]] = {}

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        strategy = self.model.distribute_strategy
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise ValueError(
                "`Rebalance` is for pipelines of one program: each host would "
                "cut the model by times of its own. Call `model.rebalance` "
                "with the same layer counts on all hosts. Received: a model "
                f"under {type(strategy).__name__}"
            )
        self.cuts = {}
        self._first = self._next = 0
        self._epoch = 0
        self._costs: tuple[Graph, list[float] | None] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        # The seconds of the first call of the step function, which traces it
        # unless `Checkpoint` has resumed by that step, and the number of its
        # steps.
        self._first_seconds: float | None = None
        self._steps_of_call = 0
        self._seen: collections.deque[tuple[Pipeline, Execution]] = (
            collections.deque(maxlen=_NUM_STEPS)
        )

    def on_epoch_begin(self, epoch, logs=None):
        self._first = self._next
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()
        self._first_of_call = batch

    def on_train_batch_end(self, batch, logs=None):
        before, self._next = self._next, self._first + batch + 1
        if self._first_seconds is None:
            self._first_seconds = time.perf_counter() - self._start
            self._steps_of_call = batch + 1 - self._first_of_call
            return
        due = self._next // self._every > before // self._every
        if due or -self._next % self._every < _NUM_STEPS:
            _, step = self._read()
            whole = self.model._pipeline
            # Not of a mini-batch with fewer rows than micro-batches, which has
            # another pipeline.
            if self._pipeline is not None and (
                self._pipeline.schedule is whole.schedule
            ):
                self._seen.append((self._pipeline, step))
        if due and self._seen:
            self._decide()

    def _decide(self) -> None:
        """Cuts the model anew, if that saves more time than tracing takes."""
        pipeline = self._seen[-1][0]
        costs = self._costs_of(pipeline)
        if costs is None:
            return
        steps = [step for x, step in self._seen if x is pipeline]
        fastest = min(steps, key=lambda x: x.makespan)
        found = new_cut(
            pipeline,
            stage_seconds(pipeline, fastest.spans),
            costs,
        )
        if found is None:
            return
        price = max(
            0.0,
            (self._first_seconds or 0.0)
            - self._steps_of_call * fastest.makespan,
        )
        if (found.before - found.after) * self._steps_left() <= price:
            return
        try:
            self.model.rebalance(found.counts)
        except TooLittleMemoryError:
            return
        self.cuts[self._next] = found.counts
        self._begin_anew()

    def _steps_left(self) -> int:
        """Returns the number of steps left.

        If the length of an epoch is unknown, the number of steps done so far.
        """
        steps, epochs = (self.params or {}).get("steps"), self.params["epochs"]
        if steps is None:
            return self._next
        return max(
            0, steps * (epochs - self._epoch) - (self._next - self._first)
        )

    def _costs_of(self, pipeline: Pipeline) -> list[float] | None:
        """Returns the cost of each layer call, for dividing a stage's time.

        `None` if a cost cannot be found.
        """
        graph = pipeline.graph
        if self._costs is None or self._costs[0] is not graph:
            try:
                self._costs = graph, self._weighed(pipeline)
            except UncountedError as error:
                self._costs = graph, None
                warnings.warn(
                    f"`Rebalance` keeps the cut. {error.reason}", stacklevel=2
                )
        return self._costs[1]

    def _weighed(self, pipeline: Pipeline) -> list[float]:
        graph, config = pipeline.graph, self.model._config
        rows = layer_costs.rows_of_micro_batch(
            config.batch_size or graph.declared_rows,
            pipeline.schedule.num_micro_batches,
        )
        if self._by == "flops":
            traces, _ = layer_costs.trace(graph, rows, config.nominal_length)
            return [x.forward_flops + x.backward_flops for x in traces]

        devices = {
            id(node): stage.device
            for stage in pipeline.stages
            for node in stage.nodes
        }

        def visit(node, specs):
            return measured_calls.visit(node, specs, devices[id(node)])

        return layer_costs.walk(graph, visit, rows, config.nominal_length)[0]


def new_cut(
    pipeline: Pipeline, seconds: StageSeconds, costs: Sequence[float]
) -> NewCut | None:
    """Returns the best cut for measured stage times.

    `None` if the model is cut so already, or if a stage has no measured time or
    no costs.

    Args:
        pipeline: The `Pipeline`.
        seconds: Dict from kinds of tasks to their seconds in each stage.
        costs: List of the cost of each layer call, in any unit.
    """
    counts = [len(x.nodes) for x in pipeline.stages]
    weights = _sums(costs, counts)
    times = [sum(x) for x in zip(*seconds.values(), strict=True)]
    if not all(weights) or not all(times):
        return None
    found = split(
        costs,
        len(counts),
        pipeline.graph.crossing(lambda value: size_in_bytes(value.spec)),
        [t / w for t, w in zip(times, weights, strict=True)],
    )
    if found == counts:
        return None
    shares = [
        new / old for new, old in zip(_sums(costs, found), weights, strict=True)
    ]
    after = {
        kind: [x * share for x, share in zip(own, shares, strict=True)]
        for kind, own in seconds.items()
    }
    return NewCut(
        found,
        simulated(pipeline, seconds).makespan,
        simulated(pipeline, after).makespan,
    )


def _sums(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Returns the sum of the costs of each stage."""
    return [sum(costs[stage]) for stage in ranges(counts)]
