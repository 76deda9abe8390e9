"""What a pipeline will need, before anything of it is allocated."""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from tf_gpipe import abstract
from tf_gpipe import planned_graph
from tf_gpipe import slots
from tf_gpipe.graph import Graph
from tf_gpipe.graph import Value
from tf_gpipe.partition import balanced
from tf_gpipe.partition import layer_graph
from tf_gpipe.pipeline_config import PipelineConfig
from tf_gpipe.plans import Plan
from tf_gpipe.plans import StagePlan
from tf_gpipe.schedule import Schedule
from tf_gpipe.simulate import simulate
from tf_gpipe.stage_memory import peak_activations

Balance = str | Callable | Sequence[int]


def plan(
    layers: Sequence[keras.Layer] | keras.Model,
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
        layers: List of Keras layers, a `keras.Sequential`, or a functional
            `keras.Model`.
        input_spec: `keras.KerasTensor`, `tf.TensorSpec` or shape (of float32)
            with the size of a mini-batch first; a nested structure of them
            for several inputs.
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
    if num_devices is not None and (
        schedule != "interleaved" or num_devices > num_stages
    ):
        raise ValueError(
            "`num_devices` is for schedule='interleaved', and at most "
            "`num_stages`. Others have a device for each stage. Received: "
            f"num_devices={num_devices}, num_stages={num_stages}, "
            f"schedule={schedule!r}"
        )
    with abstract.policy(dtype_policy) as replaced:
        planner = _Planner(layers, input_spec, optimizer, replaced)
    _check_speeds(device_flops, bandwidth, latency)
    speeds = device_flops, bandwidth, latency
    found = dataclasses.replace(
        planner.plan(config, num_devices, speeds), device_memory=device_memory
    )
    if found.fits:
        return found
    advice = planner.advice(found, config, num_devices, speeds)
    return dataclasses.replace(found, advice=advice)


class _Planner:
    """Layers copied without values, and what is known of them.

    Of layers with the same configuration and inputs there is one copy, so
    that a thousand of them take no longer than one.
    """

    def __init__(self, model, input_spec, optimizer, replaced):
        graph = planned_graph.of(model, input_spec)
        self.rows = keras.tree.flatten(graph.inputs[0].spec)[0].shape[0]
        self.weights: list[list] = []
        self.replaced = replaced
        optimizer = keras.optimizers.get(optimizer)
        known: dict[str, tuple[Any, Any]] = {}
        self.bytes_of: dict[int, int] = {}
        seen: set[int] = set()
        specs = {value: value.spec for value in graph.inputs}
        copies = []
        for node in graph.nodes:
            contents = [specs[value] for value in node.inputs]
            key = layer_graph.key(node, contents)
            if key not in known:
                args, kwargs = node.arguments(specs)
                known[key] = self._copy(node.layer, args, kwargs, optimizer)
            copy, results = known[key]
            specs.update(node.contents(results))
            copies.append(dataclasses.replace(node, layer=copy))
            # A layer that comes again brings no weights of its own.
            weights = getattr(copy, "weights", [])
            self.weights.append([] if id(node.layer) in seen else weights)
            seen.add(id(node.layer))
        for value, spec in specs.items():
            value.spec = spec
        self.graph = dataclasses.replace(graph, nodes=copies)
        self.names = [node.layer.name for node in graph.nodes]
        self.traces: dict[int, list[layer_graph.LayerGraph]] = {}

    def _copy(self, layer, args, kwargs, optimizer):
        """Returns a copy of a layer, built without values, and its outputs."""
        if not isinstance(layer, keras.Layer):
            return layer, layer.compute_output_spec(*args, **kwargs)
        config = abstract.replaced(layer.get_config(), *self.replaced)
        copy = type(layer).from_config(config)
        with abstract.NoValues():
            outputs = copy(*args, **kwargs)
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
        """Returns what the layers do with micro-batches of `rows`."""
        if rows not in self.traces:
            inputs = keras.tree.map_structure(
                lambda x: keras.KerasTensor((rows, *x.shape[1:]), x.dtype),
                [value.spec for value in self.graph.inputs],
            )
            self.traces[rows] = layer_graph.trace(self.graph, inputs)
        return self.traces[rows]

    def plan(self, config, num_devices, speeds):
        schedule = config.schedule_of(
            len(self.graph.nodes), num_devices or config.num_stages
        )
        num_micro_batches, remat = schedule.num_micro_batches, config.remat
        traces = self.traced(math.ceil(self.rows / num_micro_batches))
        counts = self._counts(config.balance, schedule, remat)
        stages = self._stages(counts, traces, schedule, remat)
        # Without a speed, an operation is the unit of time.
        device_flops, bandwidth, latency = speeds
        forward = [stage.flops / (device_flops or 1) for stage in stages]
        backward = [
            stage.backward_flops / (device_flops or 1) for stage in stages
        ]
        # Between two stages, however many tensors.
        transfer = {
            (k, int(to)): latency + size / (bandwidth or math.inf)
            for k, stage in enumerate(stages)
            for to, size in stage.sends.items()
        }

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
        computing = simulated({}).makespan
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

    def advice(self, found, config, num_devices, speeds):
        """Returns the smallest change with which a plan would fit."""
        changes = []
        m = found.num_micro_batches
        own_schedule = isinstance(config.schedule, Schedule)
        step = num_devices or 1
        while not own_schedule and m * 2 <= self.rows and m * 2 % step == 0:
            m *= 2
            changes.append({"num_micro_batches": m})
        if found.remat != "always":
            changes.append({"remat": "always"})
            changes += [{**x, "remat": "always"} for x in changes[:-1]]
        cut_anew = not own_schedule and not isinstance(config.balance, list)
        if cut_anew and config.schedule != "interleaved":
            changes += [
                {"num_stages": k, "remat": "always"}
                for k in range(len(found.stages) + 1, len(self.graph.nodes) + 1)
            ]
        for change in changes:
            changed = self.plan(
                dataclasses.replace(config, **change), num_devices, speeds
            )
            changed = dataclasses.replace(
                changed, device_memory=found.device_memory
            )
            if changed.fits:
                words = ", ".join(f"{k}={v!r}" for k, v in change.items())
                return f"It would fit with {words}."
        return (
            "Nothing that the planner tries would make it fit: the largest "
            "layer alone needs more, or the mini-batch is too large."
        )

    def _counts(self, balance, schedule, remat):
        if isinstance(balance, list):
            return balance
        if balance == "time":
            raise ValueError(
                "A plan measures nothing, as balance='time' would. Use 'flops'."
            )
        return balanced.counts(
            balance, self.graph, schedule, remat, weights=self.weights
        )

    def _stages(self, counts, traces, schedule, remat):
        """Returns the `StagePlan`s of a cut."""
        parts = self.graph.parts(counts)
        # Of what is given and made for a micro-batch.
        sizes = {
            value: layer_graph.size_in_bytes(value.spec)
            * math.ceil(self.rows / schedule.num_micro_batches)
            // self.rows
            for value in self.graph.inputs
        }
        for node, trace in zip(self.graph.nodes, traces, strict=True):
            for value, content in node.contents(trace.outputs):
                sizes[value] = layer_graph.size_in_bytes(content)
        stages, first = [], 0
        for k, part in enumerate(parts):
            own = slice(first, first + len(part.nodes))
            first = own.stop
            weights = [w for ws in self.weights[own] for w in ws]
            given = [x for x in part.inputs if x in self.graph.inputs]
            taken = [x for x in part.inputs if x not in self.graph.inputs]
            stages.append(
                StagePlan(
                    layers=self.names[own],
                    parameters=sum(math.prod(w.shape) for w in weights),
                    parameter_bytes=sum(
                        self.bytes_of.get(id(w), layer_graph.size_in_bytes(w))
                        for w in weights
                    ),
                    activation_bytes=peak_activations(
                        k,
                        schedule,
                        remat,
                        given=sum(sizes[x] for x in given),
                        inputs=sum(sizes[x] for x in taken),
                        stored=_stored(part, traces[own], sizes),
                        passing=max(map(_passing, traces[own])),
                    ),
                    flops=sum(x.forward_flops for x in traces[own]),
                    backward_flops=sum(x.backward_flops for x in traces[own]),
                    sends={
                        to: size
                        for to, other in enumerate(parts)
                        if to > k
                        and (
                            size := sum(
                                sizes[x]
                                for x in other.inputs
                                if x in part.outputs
                            )
                        )
                    },
                )
            )
        return stages


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


def _stored(
    part: Graph,
    traces: Sequence[layer_graph.LayerGraph],
    sizes: Mapping[Value, int],
) -> int:
    """Returns what a stage keeps of a micro-batch beside its inputs."""
    kept: set[Value] = set()
    for node, trace in zip(part.nodes, traces, strict=True):
        pairs = zip(node.inputs, trace.kept_inputs, strict=True)
        kept.update(value for value, keeps in pairs if keeps)
        if trace.keeps_outputs:
            kept.update(node.made)
    own = kept.difference(part.inputs)
    return sum(x.stored_bytes for x in traces) + sum(sizes[x] for x in own)


def _passing(trace: layer_graph.LayerGraph) -> int:
    """Returns what there is while a layer goes backward.

    The gradient that arrives, and those that it makes, of about the size of
    its largest tensor.
    """
    return 2 * trace.largest_bytes + trace.output_bytes
