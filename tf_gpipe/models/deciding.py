"""The cut of a model, and what `remat="auto"` decides, when it is placed."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe.devices import slots
from tf_gpipe.partition import auto_remat
from tf_gpipe.partition import balanced
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import lopsided
from tf_gpipe.partition.config import PipelineConfig
from tf_gpipe.partition.memory_limit import MemoryLimit
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.stage.graph import Graph


def counts_of(
    name: str,
    graph: Graph,
    config: PipelineConfig,
    schedule: Schedule,
    devices: Sequence[Sequence[str]],
) -> list[int]:
    """Returns how many calls each stage has, as `balance` says.

    `name` is that of the model, for a warning of a lopsided cut.
    """
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


def decided(
    graph: Graph,
    config: PipelineConfig,
    schedule: Schedule,
    devices: Sequence[Sequence[str]],
    optimizer: keras.optimizers.Optimizer | None,
    counts: Callable[[], list[int]],
) -> auto_remat.AutoRemat:
    """Returns what stages recompute, and how many calls each has.

    Args:
        graph: `Graph` of built layers.
        config: The `PipelineConfig`.
        schedule: The `Schedule`.
        devices: Those of each stage, one a replica.
        optimizer: That of the model, whose slots count where the limit is in
            bytes. `None` for Adam; or for one without slots, where only that
            fits.
        counts: Returns the numbers of calls, where `balance` says them.

    Raises:
        ValueError: If a stage cannot fit; or if the size of a mini-batch is
            needed and not known.
    """
    limit = MemoryLimit.of(config.memory_limit)
    size = config.batch_size or layer_costs.rows_of(graph)
    if size is None and not limit.is_share:
        raise ValueError(
            "A `memory_limit` in bytes is for mini-batches of some size. Give "
            "that with `batch_size`, or a share such as memory_limit=0.5. "
            f"Received: memory_limit={config.memory_limit!r}, batch_size=None"
        )
    rows = layer_costs.rows_of_micro_batch(size, schedule.num_micro_batches)
    traces, specs = layer_costs.trace(graph, rows, config.nominal_length)

    def found(fixed: list[int]) -> auto_remat.AutoRemat:
        return auto_remat.Search(
            graph,
            traces,
            lambda x: layer_costs.size_in_bytes(specs[x]),
            fixed,
            schedule,
            [names[0] for names in devices],
            limit,
        ).decided(config.balance, counts)

    if limit.is_share:
        return found([0] * len(traces))
    try:
        return found(_fixed(graph, optimizer or keras.optimizers.Adam()))
    except TooLittleMemoryError:
        if optimizer is not None:
            raise
    # That of `compile` may have fewer slots. For it all is decided again.
    return found(_fixed(graph, keras.optimizers.SGD()))


def _fixed(graph: Graph, optimizer: keras.optimizers.Optimizer) -> list[int]:
    """Returns the bytes of weights, their gradients and slots, by call."""
    found = []
    for new in balanced.weights_of_calls(graph):
        trained = [v for v in new if v.trainable]
        found.append(
            layer_costs.size_in_bytes(
                [new, trained, slots.planned(optimizer, trained)]
            )
        )
    return found
