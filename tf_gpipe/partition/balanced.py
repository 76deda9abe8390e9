"""The cut of a graph into stages that cost nearly the same."""

from collections.abc import Callable
from collections.abc import Sequence

import keras

from tf_gpipe.graph import Graph
from tf_gpipe.partition import costs
from tf_gpipe.partition.contiguous import split
from tf_gpipe.schedule import Schedule


def counts(
    balance: str | Callable,
    graph: Graph,
    schedule: Schedule,
    remat: str,
    device: str = "",
    weights: Sequence[Sequence[keras.Variable]] | None = None,
) -> list[int]:
    """Returns the number of calls of layers in each stage.

    Args:
        balance: As of `costs.of_nodes`.
        graph: As of `costs.of_nodes`.
        schedule: The `Schedule`, which tells what stages recompute.
        remat: The remat mode.
        device: As of `costs.of_nodes`.
        weights: As of `costs.of_nodes`.

    Raises:
        ValueError: As `costs.of_nodes`.
    """
    return split(
        costs.of_nodes(balance, graph, device, remat, weights),
        schedule.num_stages,
        costs.of_cuts(graph),
        costs.of_stages(balance, schedule, remat),
    )
