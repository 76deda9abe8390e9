"""What a pipeline will need, before anything of it is allocated."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import abstract
from tf_gpipe import schedule as schedules
from tf_gpipe import slots
from tf_gpipe.partition import costs
from tf_gpipe.partition import layer_graph
from tf_gpipe.partition.contiguous import split
from tf_gpipe.pipeline_config import PipelineConfig
from tf_gpipe.plans import Plan
from tf_gpipe.plans import StagePlan
from tf_gpipe.schedule import Schedule
from tf_gpipe.simulate import simulate
from tf_gpipe.stage_memory import peak_activations

Balance = str | Callable | Sequence[int]


def plan(
    layers: Sequence[keras.Layer] | keras.Sequential,
    input_spec: Any,
    *,
    num_stages: int,
    num_micro_batches: int | None = None,
    schedule: str | Schedule = "1f1b",
    num_devices: int | None = None,
    balance: Balance = "parameters",
    remat: str = "always",
    optimizer: str | keras.optimizers.Optimizer = "adam",
    dtype_policy: str | keras.DTypePolicy | None = None,
    device_memory: int | None = None,
    device_flops: float | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
) -> Plan:
    """Returns what each stage of a pipeline will need. Allocates nothing.

    The layers are copied without values for their weights, and traced in
    their own dtype policies. A stage's peak of activations is what its
    schedule keeps of several micro-batches, and what the backward pass of one
    of them needs at a time.

    Args:
        layers: List of Keras layers, or a `keras.Sequential`.
        input_spec: Nested structure of `keras.KerasTensor`s, `tf.TensorSpec`s
            or shapes (of float32), with the size of a mini-batch first.
        num_stages: Integer K.
        num_micro_batches: Integer M. Defaults to 4 a device.
        schedule: As for `PipelinedSequential`.
        num_devices: Integer, over which `"interleaved"` spreads the stages.
            Defaults to one a stage.
        balance: As for `PipelinedSequential`; not `"time"`.
        remat: As for `PipelinedSequential`.
        optimizer: Keras optimizer, or its name; its slots are counted.
        dtype_policy: Keras dtype policy, or its name, of the layers that have
            the global one. Defaults to the global one.
        device_memory: Integer, the bytes that a device has for weights and
            activations.
        device_flops: Float, the operations a second that a device achieves,
            for `Plan.step_seconds`.
        bandwidth: Float, bytes a second from a stage to the next one; needs
            `device_flops`. Defaults to `None`: transfers take no time.
        latency: Float, seconds that a transfer takes besides.

    Returns:
        A `Plan`. If it does not fit, `Plan.advice` tells the smallest change
        that would help.

    Raises:
        ValueError: If an argument is not valid, the batch size is not known,
            or the costs of a layer cannot be found.

    Example:

    >>> layers = [keras.layers.Dense(64) for _ in range(8)]
    >>> found = plan(layers, (32, 64), num_stages=2, num_micro_batches=8)
    >>> [stage.parameters for stage in found.stages]
    [16640, 16640]
    """
    config = PipelineConfig(
        num_stages, num_micro_batches, balance, schedule, remat, devices=None
    )
    with _policy(dtype_policy) as replaced:
        planner = _Planner(layers, input_spec, optimizer, replaced)
    _check_speeds(device_flops, bandwidth, latency)
    options = {
        "speeds": (device_flops, bandwidth, latency),
        "num_stages": config.num_stages,
        "num_micro_batches": config.num_micro_batches,
        "schedule": schedule,
        "num_devices": num_devices,
        "balance": config.balance,
        "remat": remat,
    }
    found = dataclasses.replace(
        planner.plan(**options), device_memory=device_memory
    )
    if found.fits:
        return found
    return dataclasses.replace(found, advice=planner.advice(found, options))


class _Planner:
    """Layers copied without values, and what is known of them.

    Of layers with the same configuration and inputs there is one copy, so
    that a thousand of them take no longer than one.
    """

    def __init__(self, layers, input_spec, optimizer, replaced):
        if isinstance(layers, keras.Sequential):
            layers = layers.layers
        layers = [
            x
            for x in layers
            if not isinstance(x, (keras.KerasTensor, keras.layers.InputLayer))
        ]
        if not layers:
            raise ValueError("A plan needs layers. Received none.")
        self.names = [layer.name for layer in layers]
        self.inputs = _standardize(input_spec)
        self.rows = keras.tree.flatten(self.inputs)[0].shape[0]
        self.layers = []
        self.weights = []
        self.replaced = replaced
        optimizer = keras.optimizers.get(optimizer)
        known: dict[str, tuple[keras.Layer, Any]] = {}
        self.bytes_of: dict[int, int] = {}
        seen: set[int] = set()
        x = self.inputs
        for layer in layers:
            key = layer_graph.key(layer, x)
            if key not in known:
                known[key] = self._copy(layer, x, optimizer)
            copy, x = known[key]
            self.layers.append(copy)
            # A layer that comes again brings no weights of its own.
            self.weights.append([] if id(layer) in seen else copy.weights)
            seen.add(id(layer))
        self.graphs: dict[int, list[layer_graph.LayerGraph]] = {}

    def _copy(self, layer, inputs, optimizer):
        """Returns a copy of a layer, built without values, and its outputs."""
        config = _replaced(layer.get_config(), *self.replaced)
        copy = type(layer).from_config(config)
        with abstract.no_values():
            outputs = copy(inputs)
        abstract.forget(copy.variables)
        weights = copy.trainable_weights
        for weight, own in zip(
            weights, slots.planned(optimizer, weights), strict=True
        ):
            # The weight, the sum of its gradients, and its slots.
            self.bytes_of[id(weight)] = layer_graph.size_in_bytes(
                [weight, weight, *own]
            )
        return copy, outputs

    def traced(self, rows):
        """Returns the graphs of the layers for micro-batches of `rows`."""
        if rows not in self.graphs:
            inputs = keras.tree.map_structure(
                lambda x: keras.KerasTensor((rows, *x.shape[1:]), x.dtype),
                self.inputs,
            )
            self.graphs[rows] = layer_graph.trace(self.layers, inputs)
        return self.graphs[rows]

    def plan(
        self,
        num_stages,
        num_micro_batches,
        schedule,
        num_devices,
        balance,
        remat,
        speeds,
    ):
        if num_stages > len(self.layers):
            raise ValueError(
                "`num_stages` must be at most the number of layers. Received: "
                f"num_stages={num_stages}, {len(self.layers)} layers"
            )
        if num_micro_batches is None:
            num_micro_batches = 4 * (num_devices or num_stages)
        schedule = schedules.get(
            schedule, num_stages, num_micro_batches, num_devices
        )
        graphs = self.traced(math.ceil(self.rows / num_micro_batches))
        counts = self._counts(balance, num_stages, remat)
        stages, first = [], 0
        for k, count in enumerate(counts):
            part = slice(first, first + count)
            stages.append(self._stage(k, part, graphs, schedule, remat))
            first += count
        # Without a speed, an operation is the unit of time.
        device_flops, bandwidth, latency = speeds
        forward = [stage.flops / (device_flops or 1) for stage in stages]
        backward = [
            stage.backward_flops / (device_flops or 1) for stage in stages
        ]
        transfer = [
            latency + stage.boundary_bytes / (bandwidth or math.inf)
            for stage in stages[:-1]
        ]

        def simulated(transfer):
            return simulate(
                schedule,
                forward,
                backward,
                recompute=forward,
                transfer=transfer,
                remat=remat,
            )

        simulation = simulated(transfer)
        makespan = simulation.makespan
        # Transfers that take no time need no simulation without them.
        computing = simulated(0.0).makespan if any(transfer) else makespan
        alone = num_micro_batches * (sum(forward) + sum(backward))
        return Plan(
            stages=stages,
            devices=schedule.devices,
            num_micro_batches=num_micro_batches,
            schedule=schedule.name,
            remat=remat,
            bubble=simulation.bubble,
            relative_step_time=makespan / alone if alone else 1.0,
            step_seconds=makespan if device_flops else None,
            transfer_share=1 - computing / makespan if makespan else 0.0,
        )

    def advice(self, found, options):
        """Returns the smallest change with which a plan would fit."""
        changes = []
        m = found.num_micro_batches
        own_schedule = isinstance(options["schedule"], Schedule)
        step = options["num_devices"] or 1
        while not own_schedule and m * 2 <= self.rows and m * 2 % step == 0:
            m *= 2
            changes.append({"num_micro_batches": m})
        if found.remat != "always":
            changes.append({"remat": "always"})
            changes += [{**x, "remat": "always"} for x in changes[:-1]]
        if not own_schedule and not isinstance(options["balance"], list):
            changes += [
                {"num_stages": k, "num_devices": None, "remat": "always"}
                for k in range(len(found.stages) + 1, len(self.layers) + 1)
                if options["schedule"] != "interleaved"
            ]
        for change in changes:
            changed = dataclasses.replace(
                self.plan(**{**options, **change}),
                device_memory=found.device_memory,
            )
            if changed.fits:
                words = ", ".join(
                    f"{name}={value!r}"
                    for name, value in change.items()
                    if value is not None
                )
                return f"It would fit with {words}."
        return (
            "Nothing that the planner tries would make it fit: the largest "
            "layer alone needs more, or the mini-batch is too large."
        )

    def _counts(self, balance, num_stages, remat):
        if isinstance(balance, list):
            if sum(balance) != len(self.layers):
                raise ValueError(
                    f"`balance` must have {num_stages} layer counts that sum "
                    f"to {len(self.layers)}. Received: balance={balance}"
                )
            return balance
        if balance == "time":
            raise ValueError(
                "A plan measures nothing: balance='time' is for a "
                "`PipelinedSequential`. Use 'flops'."
            )
        return split(
            costs.of_layers(
                balance, self.layers, self.inputs, "", remat, self.weights
            ),
            num_stages,
        )

    def _stage(self, k, part, graphs, schedule, remat):
        own = graphs[part]
        weights = [w for ws in self.weights[part] for w in ws]
        if part.start:
            inputs = graphs[part.start - 1].output_bytes
        else:
            inputs = own[0].input_bytes
        return StagePlan(
            layers=self.names[part],
            parameters=sum(math.prod(w.shape) for w in weights),
            parameter_bytes=sum(
                self.bytes_of.get(id(w), layer_graph.size_in_bytes(w))
                for w in weights
            ),
            activation_bytes=peak_activations(
                k,
                schedule,
                remat,
                inputs=inputs,
                stored=_stored(own),
                passing=_passing(own),
            ),
            flops=sum(graph.forward_flops for graph in own),
            backward_flops=sum(graph.backward_flops for graph in own),
            boundary_bytes=own[-1].output_bytes,
        )


def _check_speeds(
    device_flops: float | None, bandwidth: float | None, latency: float
) -> None:
    for name, value in (
        ("device_flops", device_flops),
        ("bandwidth", bandwidth),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(
                f"`{name}` must be a positive number. Received: {name}={value}"
            )
    if not 0 <= latency < math.inf:
        raise ValueError(
            "`latency` must be a number of seconds, 0 or more. Received: "
            f"latency={latency}"
        )
    if device_flops is None and (bandwidth is not None or latency):
        raise ValueError(
            "What transfers cost depends on the speed of the devices: "
            "`bandwidth` and `latency` need `device_flops`."
        )


def _stored(graphs: Sequence[layer_graph.LayerGraph]) -> int:
    """Returns what a stage keeps of a micro-batch beside its inputs."""
    total = 0
    for i, graph in enumerate(graphs):
        follows = i + 1 < len(graphs) and graphs[i + 1].keeps_inputs
        total += graph.stored_bytes
        if graph.keeps_outputs or follows:
            total += graph.output_bytes
    return total


def _passing(graphs: Sequence[layer_graph.LayerGraph]) -> int:
    """Returns what there is while a layer goes backward.

    The gradient that arrives, and those that it makes, of about the size of
    its largest tensor.
    """
    return max(2 * graph.largest_bytes + graph.output_bytes for graph in graphs)


@contextlib.contextmanager
def _policy(policy: Any) -> Iterator[tuple[dict, dict]]:
    """A scope to copy layers in, in which they have a policy by default.

    Yields the configuration of the global policy, and that of its stand-in.
    """
    before = keras.config.dtype_policy()
    # Copies of layers draw seeds that they do not need.
    drawn = random.getstate()
    if policy is not None:
        keras.config.set_dtype_policy(policy)
    try:
        yield tuple(
            keras.dtype_policies.serialize(x)
            for x in (before, keras.config.dtype_policy())
        )
    finally:
        keras.config.set_dtype_policy(before)
        random.setstate(drawn)


def _replaced(config: Any, old: Any, new: Any) -> Any:
    """Returns a nested configuration with each `old` replaced by `new`."""
    if config == old:
        return new
    if isinstance(config, dict):
        return {k: _replaced(x, old, new) for k, x in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(_replaced(x, old, new) for x in config)
    return config


def _standardize(spec: Any) -> Any:
    """Returns an input spec as `KerasTensor`s with a batch size."""
    if isinstance(spec, tf.TensorShape):
        spec = spec.as_list()
    if isinstance(spec, (tuple, list)) and all(
        n is None or isinstance(n, int) for n in spec
    ):
        spec = keras.KerasTensor(tuple(spec), "float32")
    spec = keras.tree.map_structure(
        lambda x: keras.KerasTensor(
            tuple(x.shape), keras.backend.standardize_dtype(x.dtype)
        ),
        spec,
    )
    for x in keras.tree.flatten(spec):
        if not x.shape or None in x.shape:
            raise ValueError(
                "`input_spec` must give all sizes, that of the mini-batch "
                f"first. Received a shape of {x.shape}"
            )
    return spec
