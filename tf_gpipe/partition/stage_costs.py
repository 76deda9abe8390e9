"""FLOPs and bytes of stages, summed over their layer calls."""

import dataclasses
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe.partition import layer_costs
from tf_gpipe.partition.call_costs import LayerCosts
from tf_gpipe.partition.recomputed import Recomputation
from tf_gpipe.partition.recomputed import StageCalls
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.partition.uncounted import UncountedError
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.search import search
from tf_gpipe.schedule.simulate import Times
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import Value
from tf_gpipe.stage.stage import Stage


@dataclasses.dataclass(frozen=True)
class StageCosts:
    """FLOPs and bytes of a stage for one micro-batch.

    Attributes:
        flops: Integer, floating-point operations of the forward pass.
        backward_flops: Integer, of the backward pass.
        weight_flops: Integer, the part of `backward_flops` for gradients of
            weights alone.
        before_flops: Integer, of recomputation before the backward pass, for
            the micro-batches that the remat mode recomputes.
        within_flops: Integer, of recomputation within the backward pass.
        differentiated: Boolean, whether any of its calls has a backward pass.
        given: Bytes of the model's inputs that the stage takes, and of the
            targets.
        sizes: `Sizes` in bytes, with `fixed` 0.
        sends: Dictionary from each later stage to the bytes sent there.
    """

    flops: int
    backward_flops: int
    weight_flops: int
    given: int
    sizes: Sizes
    sends: dict[int, int]
    before_flops: int = 0
    within_flops: int = 0
    differentiated: bool = True

    @property
    def whole_backward_flops(self) -> int:
        """The FLOPs of the backward pass and of recomputation within it."""
        return self.backward_flops + self.within_flops

    def recomputing(self, choice: Recomputation, splits: bool) -> "StageCosts":
        """Returns the costs of the stage if it recomputes `choice`.

        If the schedule `splits` backward passes, recomputed activations live
        until the gradients of the weights are computed: those of all parts
        then add up.
        """
        work = int(choice.work)
        return dataclasses.replace(
            self,
            before_flops=work if choice.before else 0,
            within_flops=0 if choice.before else work,
            sizes=self.sizes._replace(
                kept=choice.kept,
                adds_at_a_time=choice.adds_in_all
                if splits
                else choice.adds_at_a_time,
            ),
        )

    def of_micro_batches(self, count: int, fixed: float = 0) -> Sizes:
        """Returns `sizes` with the model's inputs of `count` micro-batches.

        They are fixed, as other bytes may be: a step holds its mini-batch and
        the targets from start to end.
        """
        return self.sizes._replace(fixed=count * self.given + fixed)


def find(
    parts: Sequence[Graph],
    traces: Sequence[LayerCosts],
    size: Callable[[Value], int],
) -> list[StageCosts]:
    """Returns the costs of stages.

    Args:
        parts: List with the graph of each stage.
        traces: The `LayerCosts` of all calls, in the order of the model.
        size: Function that returns the bytes of a `Value`.
    """
    made_before: set[Value] = set()
    found: list[StageCosts] = []
    first, last = 0, len(parts) - 1
    for k, part in enumerate(parts):
        own = traces[first : first + len(part.nodes)]
        first += len(part.nodes)
        received = sum(size(x) for x in part.inputs if x in made_before)
        kept = _kept(part, own)
        flops = sum(x.forward_flops for x in own)
        differentiated = any(x.differentiated for x in own)
        found.append(
            StageCosts(
                before_flops=flops if differentiated else 0,
                flops=flops,
                backward_flops=sum(x.backward_flops for x in own),
                weight_flops=sum(x.weight_flops for x in own),
                given=sum(map(size, part.inputs))
                - received
                + (_targets(part, size) if k == last else 0),
                sizes=Sizes(
                    inputs=received,
                    stored=sum(x.stored_bytes for x in own)
                    + sum(map(size, kept.difference(part.inputs))),
                    temporary=max(
                        _temporary(part, own, size, made_before)
                        if differentiated
                        else 0,
                        _of_loss(part, kept, size) if k == last else 0,
                    ),
                    slices=sum(x.slices_bytes for x in own),
                    arriving=received,
                ),
                sends=sends(parts, k, size),
                differentiated=differentiated,
            )
        )
        made_before.update(x for node in part.nodes for x in node.made)
    return found


def of_graph(
    graph: Graph,
    counts: Sequence[int],
    length: int = layer_costs.NOMINAL_LENGTH,
    recomputed: Sequence[Sequence[range]] | None = None,
    num_micro_batches: int | None = None,
) -> list[StageCosts]:
    """Returns the costs of the stages that a graph is cut into.

    Args:
        graph: `Graph` of built layers.
        counts: List of the number of calls in each stage.
        length: Integer, stands for unknown sizes, see `layer_costs.walk`.
        recomputed: For each stage, ranges of indices of its calls that are
            recomputed, those of a range together, under a schedule that does
            not split backward passes. Defaults to the whole stage as one part.
        num_micro_batches: Integer, to count the rows of a micro-batch.
            Defaults to `None`: those of the graph's inputs, or one row.

    Raises:
        ValueError: If the costs of a layer cannot be found.
    """
    rows = None
    if num_micro_batches is not None:
        rows = layer_costs.rows_of_micro_batch(
            graph.declared_rows, num_micro_batches
        )
    traces, specs = layer_costs.trace(graph, rows, length)
    parts = graph.parts(list(counts))

    def size(value: Value) -> int:
        return size_in_bytes(specs[value])

    found = find(parts, traces, size)
    for k, again in enumerate(recomputed or ()):
        own = traces[sum(counts[:k]) : sum(counts[: k + 1])]
        work = [x.forward_flops for x in own]
        choice = StageCalls(parts[k], own, size, work).choice(again)
        found[k] = found[k].recomputing(choice, splits=False)
    return found


def searched(
    costs: Sequence[StageCosts],
    num_micro_batches: int,
    num_devices: int,
    remat: str,
    transfer: Mapping[tuple[int, int], float],
    device_flops: float = 1.0,
    memory: float | None = None,
    fixed: Sequence[float] | None = None,
) -> Schedule:
    """Searches the schedule `"auto"` for the costs of stages.

    Args:
        costs: The `StageCosts`.
        num_micro_batches: Integer.
        num_devices: Integer.
        remat: The remat mode.
        transfer: Dictionary from pairs of stages to the time of a transfer.
        device_flops: Float, FLOPs in a unit of time. By default one FLOP is
            the unit.
        memory: Bytes of a device. Defaults to the activations of the fullest
            one under 1F1B.
        fixed: Bytes of the weights, gradients and slots of each stage, which
            count if `memory` is given. By default none.

    Raises:
        ValueError: If no order is found that needs at most `memory`.
    """
    times = Times.of(
        len(costs),
        [x.flops / device_flops for x in costs],
        [x.whole_backward_flops / device_flops for x in costs],
        recompute=[x.before_flops / device_flops for x in costs],
        transfer=transfer,
        weights=[x.weight_flops / device_flops for x in costs],
    )
    sizes = [
        x.of_micro_batches(num_micro_batches, more)
        for x, more in zip(costs, fixed or [0] * len(costs), strict=True)
    ]
    return search(times, num_micro_batches, num_devices, remat, sizes, memory)


def sends(parts: Sequence[Graph | Stage], k: int, size: Callable) -> dict:
    """Returns a dictionary from each later part to the bytes `k` sends to it.

    `size` is a function that returns the bytes of a `Value`.
    """
    made = set(parts[k].outputs)
    sent = {
        to: sum(size(x) for x in parts[to].inputs if x in made)
        for to in range(k + 1, len(parts))
    }
    return {to: total for to, total in sent.items() if total}


def resolved(
    graph: Graph,
    counts: Sequence[int],
    schedule: Schedule,
    remat: str,
    length: int = layer_costs.NOMINAL_LENGTH,
) -> Schedule:
    """Searches the schedule `"auto"` for a graph that is cut.

    If the costs of a layer cannot be found, it is searched for stages of equal
    cost, and its description says so. The time of transfers is unknown, and
    taken for 0.

    Args:
        graph: `Graph` of built layers.
        counts: List of the number of calls in each stage.
        schedule: A `Schedule` of as many stages, micro-batches and devices.
        remat: The remat mode.
        length: As of `of_graph`.
    """
    num_micro_batches, num_devices = (
        schedule.num_micro_batches,
        len(schedule.tasks),
    )
    try:
        # The memory of weights' gradients does not depend on the rows.
        costs = of_graph(
            graph, counts, length, num_micro_batches=num_micro_batches
        )
    except ValueError as error:
        times = Times.of(
            len(counts), recompute=0.0 if remat == "never" else 1.0
        )
        found = search(times, num_micro_batches, num_devices, remat)
        reason = error.reason if isinstance(error, UncountedError) else error
        return Schedule(
            found.tasks,
            schedules.AUTO,
            f"{found.description}; stages are taken for equal. {reason}",
        )
    return searched(costs, num_micro_batches, num_devices, remat, {})


def _temporary(
    part: Graph,
    traces: Sequence[LayerCosts],
    size: Callable[[Value], int],
    received: Collection[Value],
) -> int:
    """Returns the peak bytes that live only during a stage's backward pass.

    While the backward pass of one call runs, the stage also holds gradients of
    skip connections: of values that earlier calls made or other stages sent
    (`received`), one for each later call that took the value, as they are added
    up when there are all. The gradients of the stage's outputs are there to its
    end, since its caller holds them. The model's inputs have no gradient.
    """
    made = {x for node in part.nodes for x in node.made}
    # Bytes of the gradients that wait, by value; and of those of outputs whose
    # calls have read them.
    waiting = {x: size(x) for x in part.outputs if x in made or x in received}
    arrived = most = 0
    for node, trace in reversed(list(zip(part.nodes, traces, strict=True))):
        for x in node.made:
            waiting.pop(x, None)  # read by this call: a part of `temporary`
        held = sum(waiting.values()) + arrived
        most = max(most, trace.temporary + held)
        arrived += sum(size(x) for x in node.made if x in part.outputs)
        for x in node.inputs:
            if x in made or x in received:
                waiting[x] = waiting.get(x, 0) + size(x)
    return most


def _of_loss(
    part: Graph, kept: Collection[Value], size: Callable[[Value], int]
) -> int:
    """Estimates the bytes that the loss adds to what the last stage stores.

    The loss is not known here. It takes the outputs, returns their gradients,
    and usually computes a tensor of the same size for these, such as
    differences or probabilities.
    """
    return sum(size(x) * (2 if x in kept else 3) for x in part.outputs)


def _targets(part: Graph, size: Callable[[Value], int]) -> int:
    """Estimates the bytes of the targets of the last stage's outputs.

    Targets are not known here. They are assumed to have one number for all
    numbers along the last axis of an output, such as the scores of classes.
    """
    found = 0
    for x in part.outputs:
        shapes: list[Any] = [
            getattr(y, "shape", ()) for y in keras.tree.flatten(x.spec)
        ]
        last = [shape[-1] or 1 for shape in shapes if len(shape or ()) > 1]
        found += size(x) // max(last, default=1)
    return found


def _kept(part: Graph, traces: Sequence[LayerCosts]) -> set[Value]:
    """Returns the values that the backward pass of a stage needs, each once."""
    kept: set[Value] = set()
    for node, trace in zip(part.nodes, traces, strict=True):
        pairs = zip(node.inputs, trace.kept_inputs, strict=True)
        kept.update(value for value, keeps in pairs if keeps)
        if trace.keeps_outputs:
            kept.update(node.made)
    return kept
