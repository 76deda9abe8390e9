"""Constructor arguments of a pipeline, taken from a plan."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import placement
from tf_gpipe.devices import replicas
from tf_gpipe.partition import layer_costs
from tf_gpipe.partition import uncounted
from tf_gpipe.planning import planned_graph
from tf_gpipe.planning.candidates import Fixed
from tf_gpipe.planning.choice import Chooser
from tf_gpipe.planning.known_layers import KnownLayers
from tf_gpipe.planning.layer_times import LayerTimes
from tf_gpipe.planning.plans import Plan
from tf_gpipe.planning.speeds import Device
from tf_gpipe.planning.speeds import Machine
from tf_gpipe.planning.speeds import uses
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.stage import seeds

AUTO = "auto"
# The arguments that a plan or `num_stages="auto"` decides, by their defaults.
_DECIDED: dict[str, Any] = {
    "num_stages": None,
    "num_micro_batches": None,
    "balance": None,
    "schedule": "1f1b",
    "remat": "always",
    "memory_limit": None,
    "batch_size": None,
}


def arguments(plan: Any, layers: Any, **given: Any) -> dict[str, Any]:
    """Returns the constructor arguments, with those of the plan filled in.

    Args:
        plan: `Plan` or `None`. With `num_stages="auto"` one is made here.
        layers: The layers, or the model.
        **given: The user's values.

    Raises:
        TypeError: If `plan` is something else.
        ValueError: If the user has also given arguments that the plan decides,
            if it is for another number of replicas or for sizes that the model
            leaves open, or if no plan is found.
    """
    stages = given["num_stages"]
    auto = isinstance(stages, str) and stages == AUTO
    if plan is None and not auto:
        return given
    by = 'num_stages="auto"' if auto else "`plan`"
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(
            "`plan` must be a `tf_gpipe.Plan`, as `tf_gpipe.tune` and "
            f"`tf_gpipe.plan` return it. Received: plan={plan!r}"
        )
    if plan is not None and auto:
        raise ValueError(
            'Either `plan` decides, or num_stages="auto". Received both.'
        )
    others = [
        name
        for name, default in _DECIDED.items()
        if not (name == "num_stages" and auto)
        and not (type(given[name]) is type(default) and given[name] == default)
    ]
    if others:
        raise ValueError(
            f"{by} decides {', '.join(f'`{x}`' for x in _DECIDED)}. Leave them "
            "out, or ask `tf_gpipe.tune` for a plan with them. Received: "
            + ", ".join(f"{x}={given[x]!r}" for x in others)
        )
    spec = _spec_of(layers)
    length = given["nominal_length"]
    if auto:
        plan = _chosen(layers, spec, given["devices"], length)
    _check_replicas(plan)
    # What stands for sizes that are open depends on the model's inputs.
    decided = dataclasses.replace(plan, nominal_length=None).arguments
    if length == layer_costs.NOMINAL_LENGTH:
        length = _length_of(plan, spec) or length
    decided["nominal_length"] = length
    # With `num_stages="auto"`, the plan's devices are some of the given ones.
    if given["devices"] is not None and not auto:
        del decided["devices"]
    return {**given, **decided}


def _check_replicas(plan: Plan) -> None:
    strategy = None
    if tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    here = replicas.count(strategy)
    if here == plan.num_replicas:
        return
    rows = plan.device_names or []
    first = [row[0] for row in rows] if plan.num_replicas > 1 else []
    raise ValueError(
        f"`plan` is for {plan.num_replicas} replicas. Make the model under a "
        "strategy of as many: with tf.distribute.MirroredStrategy("
        f"{first or '...'}).scope(). Received: {here} replicas."
        if plan.num_replicas > 1
        else "`plan` is for one pipeline, and not for replicas of it. Ask "
        "`tf_gpipe.tune` within no strategy, or make the model outside. "
        f"Received: {here} replicas."
    )


def _length_of(plan: Plan, spec: Any) -> int | None:
    """Returns the size in the plan of the axes that the model leaves open.

    `None` if there are none, or if they have several sizes and nothing depends
    on them.

    Raises:
        ValueError: If they have several sizes, and what the plan recomputes
            depends on them.
    """
    inputs = [] if spec is None else keras.tree.flatten(spec)
    given = [[None, *sizes] for sizes in plan.input_shapes or ()]
    lengths = planned_graph.open_sizes(inputs, given)
    if len(lengths) > 1 and plan.remat == AUTO_REMAT:
        raise ValueError(
            "What `plan` recomputes is for inputs of the shapes "
            f"{plan.input_shapes}, and the model leaves several of these sizes "
            "open. Give the sizes with `keras.Input`. Received: a model with "
            f"inputs of the shapes {[tuple(x.shape[1:]) for x in inputs]}"
        )
    return lengths.pop() if len(lengths) == 1 else None


@uncounted.choosing()
@seeds.unchanged()
def _chosen(model: Any, spec: Any, devices: Any, length: int) -> Plan:
    """Returns the best plan, for mini-batches of the spec's batch size."""
    if spec is None:
        raise ValueError(
            'num_stages="auto" needs layers that begin with a `keras.Input`. '
            f"Received: layers={model!r}"
        )
    spec = keras.tree.map_structure(lambda x: _with_all_sizes(x, length), spec)
    names = placement.listed(devices) or placement.accelerators()
    if placement.is_grid(names):
        raise ValueError(
            'num_stages="auto" is for one pipeline: `devices` must be a list '
            f"of device strings. Received: devices={devices!r}"
        )
    names = [placement.find(x) for x in names]
    layers = KnownLayers(model, spec, "adam")
    machine = Machine(
        [Device(x) for x in names], sharing=uses(names), replicates=False
    )
    ranked = Chooser(layers, LayerTimes(layers), machine).ranked(Fixed(), 1)
    return ranked[0].plan


def _spec_of(layers: Any) -> Any:
    """Returns the spec of the inputs, `None` if layers don't begin with it."""
    if isinstance(layers, upstream.Functional):
        return layers.inputs
    if isinstance(layers, keras.Sequential):
        layers = keras.Model.layers.fget(layers)
    given = layers[0] if isinstance(layers, (list, tuple)) and layers else None
    if isinstance(given, keras.layers.InputLayer):
        given = given.output
    return given if isinstance(given, keras.KerasTensor) else None


def _with_all_sizes(x: Any, length: int) -> Any:
    """Returns a spec with `length` in place of unknown sizes but the rows."""
    if x.shape[0] is None:
        raise ValueError(
            'num_stages="auto" needs the size of a mini-batch: begin with '
            f"keras.Input({tuple(x.shape[1:])}, batch_size=64), or give "
            "plan=tf_gpipe.tune(layers, (64, ...))."
        )
    return keras.KerasTensor([n or length for n in x.shape], x.dtype)
