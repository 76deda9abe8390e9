"""What a pipeline will need, before anything of it is allocated."""

import dataclasses
import io
import math
import random
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import rich.box
import rich.console
import rich.table

from tf_gpipe import abstract
from tf_gpipe import schedule as schedules
from tf_gpipe import slots
from tf_gpipe.partition import costs
from tf_gpipe.partition import layer_graph
from tf_gpipe.partition.contiguous import split
from tf_gpipe.pipeline_config import PipelineConfig
from tf_gpipe.schedule import Schedule
from tf_gpipe.simulate import peaks
from tf_gpipe.simulate import simulate

Balance = str | Callable | Sequence[int]


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What one stage will need.

    Attributes:
        layers: List of the names of its layers.
        parameters: Integer.
        parameter_bytes: Integer: weights, gradient accumulators and
            optimizer slots.
        activation_bytes: Integer, the peak of what is there beside them.
        flops: Integer, floating-point operations of a micro-batch's forward
            pass.
        backward_flops: Integer, those of its backward pass.
        boundary_bytes: Integer, what it sends to the next stage for a
            micro-batch.
    """

    layers: list[str]
    parameters: int
    parameter_bytes: int
    activation_bytes: int
    flops: int
    backward_flops: int
    boundary_bytes: int

    @property
    def bytes(self) -> int:
        """The peak memory of the stage."""
        return self.parameter_bytes + self.activation_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a pipeline will need; see `plan`.

    Attributes:
        stages: List of `StagePlan`s.
        devices: List with the number of the device of each stage.
        num_micro_batches: Integer.
        schedule: String.
        remat: String.
        bubble: Float, the share of the time that devices will be idle, with
            operations taken for time.
        relative_step_time: Float, the time of a step relative to that of one
            device of the same speed without micro-batches or recomputation.
        device_memory: Integer, bytes of each device, or `None`.
        advice: String, the smallest change with which it would fit; empty
            where it fits.
    """

    stages: list[StagePlan]
    devices: list[int]
    num_micro_batches: int
    schedule: str
    remat: str
    bubble: float
    relative_step_time: float
    device_memory: int | None = None
    advice: str = ""

    @property
    def device_bytes(self) -> list[int]:
        """The peak memory of each device."""
        totals = [0] * (max(self.devices) + 1)
        for device, stage in zip(self.devices, self.stages, strict=True):
            totals[device] += stage.bytes
        return totals

    @property
    def fits(self) -> bool:
        """Whether every device has memory enough."""
        return (
            self.device_memory is None
            or max(self.device_bytes) <= self.device_memory
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON can hold it."""
        return {
            "parameters": sum(stage.parameters for stage in self.stages),
            "fits": self.fits,
            "bubble": self.bubble,
            "relative_step_time": self.relative_step_time,
            "advice": self.advice,
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
        }

    def __str__(self) -> str:
        table = rich.table.Table(box=rich.box.SQUARE)
        for name in (
            "Stage",
            "Device",
            "Layers",
            "Parameters",
            "Weights MiB",
            "Activations MiB",
            "GFLOPs",
            "Boundary MiB",
        ):
            table.add_column(name, justify="right")
        for k, stage in enumerate(self.stages):
            table.add_row(
                str(k),
                str(self.devices[k]),
                str(len(stage.layers)),
                f"{stage.parameters:,}",
                f"{stage.parameter_bytes / 2**20:,.1f}",
                f"{stage.activation_bytes / 2**20:,.1f}",
                f"{stage.flops / 1e9:,.2f}",
                f"{stage.boundary_bytes / 2**20:,.2f}",
            )
        total = sum(stage.parameters for stage in self.stages)
        lines = [
            f"{total:,} parameters; schedule {self.schedule} of "
            f"{self.num_micro_batches} micro-batches, remat {self.remat}",
            f"bubble {self.bubble:.1%}, step time "
            f"{self.relative_step_time:.3f} of one device's",
        ]
        if self.device_memory is not None:
            lines.append(
                f"the fullest device needs {_gib(max(self.device_bytes))} of "
                f"{_gib(self.device_memory)}: "
                + ("fits" if self.fits else "does not fit")
            )
        if self.advice:
            lines.append(self.advice)
        with io.StringIO() as text:
            console = rich.console.Console(
                file=text, width=100, highlight=False
            )
            console.print(table)
            for line in lines:
                console.print(f" {line}", soft_wrap=True)
            return text.getvalue()


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
    device_memory: int | None = None,
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
        device_memory: Integer, the bytes that a device has for weights and
            activations.

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
    # Copies of layers draw seeds that they do not need.
    drawn = random.getstate()
    planner = _Planner(layers, input_spec, optimizer)
    random.setstate(drawn)
    options = {
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

    def __init__(self, layers, input_spec, optimizer):
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
        copy = type(layer).from_config(layer.get_config())
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
        kept = peaks(schedule.order)
        stages, first = [], 0
        for k, count in enumerate(counts):
            part = slice(first, first + count)
            stages.append(self._stage(part, graphs, remat, kept[k]))
            first += count
        forward = [stage.flops for stage in stages]
        backward = [stage.backward_flops for stage in stages]
        simulation = simulate(
            schedule, forward, backward, recompute=forward, remat=remat
        )
        alone = num_micro_batches * (sum(forward) + sum(backward))
        return Plan(
            stages=stages,
            devices=schedule.devices,
            num_micro_batches=num_micro_batches,
            schedule=schedule.name,
            remat=remat,
            bubble=simulation.bubble,
            relative_step_time=simulation.makespan / alone if alone else 1.0,
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

    def _stage(self, part, graphs, remat, peak):
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
            activation_bytes=_activations(own, inputs, remat, peak),
            flops=sum(graph.forward_flops for graph in own),
            backward_flops=sum(graph.backward_flops for graph in own),
            boundary_bytes=own[-1].output_bytes,
        )


def _activations(
    graphs: Sequence[layer_graph.LayerGraph],
    inputs: int,
    remat: str,
    peak: int,
) -> int:
    """Returns the peak of a stage's activations in bytes.

    Args:
        graphs: List of the `LayerGraph`s of the stage.
        inputs: Integer, the bytes of its inputs for a micro-batch.
        remat: The remat mode.
        peak: Integer, of how many micro-batches the stage keeps something.
    """
    stored = inputs
    for i, graph in enumerate(graphs):
        follows = i + 1 < len(graphs) and graphs[i + 1].keeps_inputs
        stored += graph.stored_bytes
        if graph.keeps_outputs or follows:
            stored += graph.output_bytes
    # While a layer goes backward: the gradient that arrives, and those that
    # it makes, of about the size of its largest tensor.
    passing = max(
        2 * graph.largest_bytes + graph.output_bytes for graph in graphs
    )
    if remat == "never":
        kept = peak * stored
    else:
        kept = (peak - 1) * inputs + stored
    return kept + passing


def _standardize(spec: Any) -> Any:
    """Returns an input spec as `KerasTensor`s with a batch size."""
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


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
