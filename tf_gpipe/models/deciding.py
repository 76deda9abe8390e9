"""The decisions made when a model is built: cut, schedule, recomputation."""

import collections
import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras

from tf_gpipe.partition import auto_remat
from tf_gpipe.partition import balanced
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import lopsided
from tf_gpipe.partition import stage_costs
from tf_gpipe.partition.config import PipelineConfig
from tf_gpipe.partition.fitted_remat import AutoRemat
from tf_gpipe.partition.fitted_remat import FittedRemat
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.partition.parameter_bytes import ParameterBytes
from tf_gpipe.partition.parameter_bytes import bytes_of
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.partition.uncounted import UncountedError
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import Graph
from tf_gpipe.stage.graph import unique


class Decision(NamedTuple):
    """The cut of a model into stages, their devices and their schedule.

    Attributes:
        counts: List of integers, the number of layer calls of each stage.
        recomputed: For each stage, a tuple of the ranges of its layer calls
            that are recomputed, if `remat="auto"` chooses them; else `None`.
        schedule: The `Schedule`.
        devices: List with a list for each stage: its device in each replica.
    """

    counts: list[int]
    recomputed: tuple[tuple[range, ...], ...] | None
    schedule: Schedule
    devices: list[list[str]]


def bytes_of_weights(
    graph: Graph, config: PipelineConfig, optimizer: Any
) -> list[int] | None:
    """Returns the bytes of calls' weights that a decision depends on.

    With their gradients and slots, if `remat="auto"` has a memory limit in
    bytes; otherwise, and without an optimizer, `None`.

    Args:
        graph: `Graph` of built layers.
        config: The `PipelineConfig`.
        optimizer: The model's optimizer, or `None`.
    """
    if config.remat != AUTO_REMAT or optimizer is None:
        return None
    if MemoryLimit.of(config.memory_limit).is_share:
        return None
    return _parameters(graph, optimizer).new


def decide(
    name: str,
    graph: Graph,
    config: PipelineConfig,
    schedule: Schedule,
    devices: list[list[str]],
    optimizer: keras.optimizers.Optimizer | None,
) -> Decision:
    """Decides the cut, the schedule and which layers are recomputed.

    Args:
        name: Name of the model, for the warning about a lopsided cut.
        graph: `Graph` of built layers.
        config: The `PipelineConfig`.
        schedule: The `Schedule`; with `schedule="auto"` the one that the
            search starts from.
        devices: List with a list for each stage: its device in each replica.
        optimizer: The model's optimizer, or `None`.

    Raises:
        ValueError: If a stage cannot fit in the memory limit; or if the size
            of a mini-batch is needed and not known.
    """

    def counts() -> list[int]:
        """Returns the number of layer calls of each stage, by `balance`."""
        balance: Any = config.balance
        if isinstance(balance, list):
            return balance
        return balanced.counts(
            balance,
            graph,
            schedule,
            config.remat,
            devices[0][0],
            tell=functools.partial(lopsided.warn, name),
            length=config.nominal_length,
        )

    found = None
    if config.remat == AUTO_REMAT:
        found = _recomputed(graph, config, schedule, devices, optimizer, counts)
    decided = found.counts if found else counts()
    if config.schedule == schedules.AUTO:
        rows = [
            devices[schedule.devices.index(i)]
            for i in range(len(schedule.tasks))
        ]
        if found:
            names = collections.Counter(row[0] for row in rows)
            schedule = found.ordered(
                schedule, {}, num_sharing=max(names.values())
            )
        else:
            schedule = stage_costs.resolved(
                graph, decided, schedule, config.remat, config.nominal_length
            )
        devices = [rows[i] for i in schedule.devices]
    return Decision(decided, found.parts if found else None, schedule, devices)


def _recomputed(
    graph: Graph,
    config: PipelineConfig,
    schedule: Schedule,
    devices: Sequence[Sequence[str]],
    optimizer: keras.optimizers.Optimizer | None,
    counts: Callable[[], list[int]],
) -> AutoRemat:
    """Chooses the layer calls to recompute, for `remat="auto"`, and the cut.

    The arguments are those of `decide`, and `counts`. If the limit is in bytes,
    the optimizer's slots count. With `None`, Adam's slots are counted; if
    nothing fits with them, no slots are.

    Args:
        counts: Function that returns the number of layer calls of each stage
            that `balance` asks for, called if `balance` decides the cut.

    Raises:
        ValueError: If a stage cannot fit; or if the size of a mini-batch is
            needed and not known.
    """
    limit = MemoryLimit.of(config.memory_limit)
    size = config.batch_size or graph.declared_rows
    if size is None and not limit.is_share:
        raise ValueError(
            "A `memory_limit` in bytes is for mini-batches of some size. Give "
            "that with `batch_size`, or a share such as memory_limit=0.5. "
            f"Received: memory_limit={config.memory_limit!r}, batch_size=None"
        )
    if size is not None:
        # A small mini-batch has fewer micro-batches.
        schedule = config.schedule_of(
            len(graph.nodes), len(schedule.tasks), rows=size
        )
    rows = layer_costs.rows_of_micro_batch(size, schedule.num_micro_batches)
    try:
        traces, specs = layer_costs.trace(graph, rows, config.nominal_length)
    except UncountedError as error:
        raise ValueError(
            "remat='auto' must know the memory of each layer. "
            f"{error.reason} Use another `remat`, such as 'always'."
        ) from error

    def found(parameters: ParameterBytes | None) -> AutoRemat:
        fitted = FittedRemat(
            graph,
            traces,
            lambda x: size_in_bytes(specs[x]),
            parameters,
            schedule,
            [names[0] for names in devices],
            limit,
        )
        return auto_remat.decided(fitted, config.balance, counts)

    if limit.is_share:
        return found(None)
    try:
        return found(_parameters(graph, optimizer or keras.optimizers.Adam()))
    except TooLittleMemoryError:
        if optimizer is not None:
            raise
    # The optimizer given to `compile` later may have fewer slots than Adam.
    # `_decide_again` then calls this function again, with that optimizer.
    return found(_parameters(graph, keras.optimizers.SGD()))


def _parameters(
    graph: Graph, optimizer: keras.optimizers.Optimizer
) -> ParameterBytes:
    """Returns the bytes of the weights, their gradients and slots."""
    used = [getattr(node.layer, "weights", ()) for node in graph.nodes]
    weights = unique(itertools.chain(*used))
    found = dict(
        zip(map(id, weights), bytes_of(weights, optimizer), strict=True)
    )
    return ParameterBytes([{id(v): found[id(v)] for v in own} for own in used])
