"""Compares the planner with Table 1 of the GPipe paper, row by row.

Plans each model that the paper trained, on devices with as much memory as the
paper's, and searches for the largest that fits. Memory is counted twice: with
the paper's 12 bytes a parameter (a weight and two slots of the optimizer), and
with the 16 that `tf_gpipe` needs, which adds up gradients over micro-batches.

Naive-1 is one stage without micro-batches or rematerialisation. Pipeline-K is
K stages with rematerialisation. The paper does not tell its micro-batches.
Here they have one row, which takes the least memory; and with 32 rows for 128
stages, the rule of at least 4 K micro-batches could not be kept anyway. The
schedule is the library's default: the paper's own, `gpipe`, keeps the
predictions of the whole mini-batch for the loss.

`--run` measures. Where there is a GPU it is split into virtual devices of
8 GB, and takes a step of each AmoebaNet-D for which they are enough. (Written
against TensorFlow's documentation, not run on hardware.) Elsewhere, it trains
small versions over two worker processes, and compares the resident memory of
each with the plan.

Example:

    python -m tools.table1 --model=transformer_lm --rows Naive-1 Pipeline-8
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable

# Before TensorFlow is imported: it reports at start that there is no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import rich.box  # noqa: E402
import rich.console  # noqa: E402
import rich.table  # noqa: E402
import tensorflow as tf  # noqa: E402

import model_zoo  # noqa: E402
import tf_gpipe  # noqa: E402
from tools import command_line  # noqa: E402
from tools import local_devices  # noqa: E402
from tools import workers  # noqa: E402
from tools.benchmark import report  # noqa: E402
from tools.benchmark.report import Report  # noqa: E402

# Of each virtual device of a GPU.
_GPU_MIB = 8192


_NUM_CLASSES = 10

_MERGED = (
    "TensorFlow merges operations that are equal, such as the ReLU of a "
    "tensor that two cells take; the plan counts each."
)
_SHAPES = (
    "Without rematerialisation a stage returns to its backward pass also "
    "tensors of which that takes but the shape, such as the scores of masked "
    "attention; the plan does not count these."
)

# The bytes a parameter, and how they count those of a stage.
_COUNTS = {
    "12": lambda stage: 12 * stage.parameters,
    "16": lambda stage: stage.parameter_bytes,
}


@dataclasses.dataclass(frozen=True)
class _Family:
    """What the rows of a model of the zoo have in common.

    Attributes:
        title: String.
        optimizer: Function that returns a Keras optimizer.
        device_gib: Integer, the memory of a device.
        batch_size: Integer, rows of a mini-batch.
        small: Dict, the hyper-parameters that `--run` takes on a CPU.
        small_batch_size: Integer, with as much in activations that what else
            a process needs is small beside them.
    """

    title: str
    optimizer: Callable
    device_gib: int
    batch_size: int
    small: dict
    small_batch_size: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """A column of the paper's table.

    Attributes:
        model: String, a model of the zoo.
        name: String, what the paper calls it, with the number of stages.
        sizes: Dict, hyper-parameters of the model.
        grows: String, the one of them that the search makes larger.
        parameters: Float, as published; and so the next two.
        parameter_gb: Float.
        activation_gb: Float.
    """

    model: str
    name: str
    sizes: dict
    grows: str
    parameters: float
    parameter_gb: float
    activation_gb: float

    @property
    def family(self):
        return _FAMILIES[self.model]

    @property
    def num_stages(self):
        return int(self.name.partition("-")[2])

    @property
    def naive(self):
        return self.name == "Naive-1"

    @property
    def step(self):
        """By how much it grows: a layer a stage, as the paper's Transformers.

        An AmoebaNet has three groups of layers, all of the same length.
        """
        if self.grows == "num_filters":
            return 16
        return self.num_stages if self.model == "transformer_lm" else 3

    def with_size(self, size):
        """Returns the hyper-parameters with another size, or `None`."""
        return None if size is None else {**self.sizes, self.grows: size}


_FAMILIES = {
    "amoebanet_d": _Family(
        title="AmoebaNet-D",
        optimizer=lambda: keras.optimizers.RMSprop(1e-4, rho=0.9, momentum=0.9),
        device_gib=8,
        batch_size=128,
        small={
            "num_layers": 3,
            "num_filters": 32,
            "num_classes": _NUM_CLASSES,
            "input_shape": (32, 32, 3),
            "num_stem_reductions": 0,
        },
        small_batch_size=128,
    ),
    "transformer_lm": _Family(
        title="Transformer-L",
        optimizer=lambda: keras.optimizers.Adam(1e-4),
        device_gib=16,
        batch_size=32,
        small={
            "num_layers": 6,
            "dim": 256,
            "ffn_dim": 1024,
            "num_heads": 8,
            "vocabulary": 1000,
            "length": 256,
        },
        small_batch_size=32,
    ),
}


def _amoebanet(name, num_layers, num_filters, grows, *published):
    sizes = {"num_layers": num_layers, "num_filters": num_filters}
    return _Row("amoebanet_d", name, sizes, grows, *published)


def _transformer(name, num_layers, *published):
    sizes = {"num_layers": num_layers}
    return _Row("transformer_lm", name, sizes, "num_layers", *published)


# The AmoebaNets grow as they do in the table: in filters, then in layers.
_ROWS = [
    _amoebanet("Naive-1", 18, 208, "num_filters", 82e6, 1.05, 6.26),
    _amoebanet("Pipeline-1", 18, 416, "num_filters", 318e6, 3.8, 3.46),
    _amoebanet("Pipeline-2", 18, 544, "num_filters", 542e6, 6.45, 8.11),
    _amoebanet("Pipeline-4", 36, 544, "num_layers", 1.05e9, 12.53, 15.21),
    _amoebanet("Pipeline-8", 72, 512, "num_layers", 1.8e9, 24.62, 26.24),
    _transformer("Naive-1", 3, 282.2e6, 11.7, 3.15),
    _transformer("Pipeline-1", 13, 785.8e6, 8.8, 6.4),
    _transformer("Pipeline-8", 103, 5.3e9, 59.5, 50.9),
    _transformer("Pipeline-32", 415, 21.0e9, 235.1, 199.9),
    _transformer("Pipeline-128", 1663, 83.9e9, 937.9, 796.1),
]


def make_parser():
    parser = argparse.ArgumentParser(
        prog="python -m tools.table1",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=_FAMILIES, help="only this model, not both"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(dict.fromkeys(row.name for row in _ROWS)),
        help="only these rows, not all",
    )
    parser.add_argument(
        "--micro_batch_size",
        type=command_line.positive,
        help="rows of a micro-batch in a pipeline; 1 if not given",
    )
    parser.add_argument(
        "--dtype_policy",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        default="float32",
        help="Keras dtype policy; float32 if not given",
    )
    parser.add_argument(
        "--run", action="store_true", help="measure instead of planning"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    return parser


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    rows = [
        row
        for row in _ROWS
        if args.model in (None, row.model)
        and (args.rows is None or row.name in args.rows)
    ]
    if not rows:
        parser.error(f"{args.model} has no row {' '.join(args.rows)}")
    if (args.micro_batch_size or 1) > min(x.family.batch_size for x in rows):
        parser.error("--micro_batch_size: a mini-batch has fewer rows")
    gpus = tf.config.list_physical_devices("GPU")
    if args.run and gpus and args.model == "transformer_lm":
        parser.error("--run on a GPU trains amoebanet_d only")
    if args.run and not gpus and (args.rows or args.micro_batch_size):
        parser.error("--rows and --micro_batch_size with --run need a GPU")
    if not args.run:
        _compare(rows, args)
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(args.dtype_policy)
    try:
        if gpus:
            rows = [row for row in rows if row.model == "amoebanet_d"]
            _measure(rows, local_devices.split_gpu(gpus[0], mib=_GPU_MIB), args)
        else:
            _check([args.model] if args.model else list(_FAMILIES), args)
    finally:
        keras.config.set_dtype_policy(before)


def _compare(rows, args):
    """Prints the table of what is published and planned.

    A row takes up to a minute or two, so cores plan several at a time.
    """
    planned = functools.partial(_planned, args=args)
    num_processes = min(len(rows), len(os.sched_getaffinity(0)))
    if num_processes > 1:
        with concurrent.futures.ProcessPoolExecutor(
            num_processes, multiprocessing.get_context("spawn")
        ) as pool:
            found = list(pool.map(planned, rows))
    else:
        found = list(map(planned, rows))
    for model, family in _FAMILIES.items():
        own = [x for x in found if x["model"] == model]
        if own:
            _print_table(family, own)
    notes = _notes(found)
    _print_notes(notes)
    if args.json:
        print(json.dumps({"rows": found, "notes": notes}))


def _planned(row, args):
    """Returns what is published and planned for a row, as JSON can hold it."""

    @functools.cache
    def plan(size):
        sizes = row.with_size(size)
        print(f"{row.model} {row.name}: {_text(sizes)}", file=sys.stderr)
        layers = model_zoo.get(row.model, **sizes)
        return _plan(
            layers,
            row.family,
            row.family.batch_size,
            dtype_policy=args.dtype_policy,
            **options,
        )

    options = _options(row, args)
    device_memory = row.family.device_gib * 2**30
    found = plan(row.sizes[row.grows])
    by_bytes = {}
    for name, count in _COUNTS.items():

        def fullest(size, count=count):
            needs = [(count(x), x.activation_bytes) for x in plan(size).stages]
            return max(needs, key=sum)

        needs = sum(fullest(row.sizes[row.grows]))
        largest = _largest(row, fullest, device_memory)
        by_bytes[name] = {
            "parameter_bytes": [count(stage) for stage in found.stages],
            "needs": needs,
            "fits": needs <= device_memory,
            "largest": row.with_size(largest),
        }
    return {
        "model": row.model,
        "name": row.name,
        "sizes": row.sizes,
        "device_memory": device_memory,
        "dtype_policy": args.dtype_policy,
        **options,
        "paper": {
            "parameters": row.parameters,
            "parameter_gb": row.parameter_gb,
            "activation_gb": row.activation_gb,
        },
        "parameters": sum(stage.parameters for stage in found.stages),
        "activation_bytes": [x.activation_bytes for x in found.stages],
        "by_bytes": by_bytes,
    }


def _options(row, args):
    """Returns how a row is cut, as arguments of a plan or a pipeline."""
    rows = row.family.batch_size if row.naive else args.micro_batch_size or 1
    return {
        "num_stages": row.num_stages,
        "num_micro_batches": math.ceil(row.family.batch_size / rows),
        "remat": "never" if row.naive else "always",
    }


def _plan(layers, family, batch_size, **options):
    first, *layers = layers
    x = first.output
    return tf_gpipe.plan(
        layers,
        keras.KerasTensor((batch_size, *x.shape[1:]), x.dtype),
        optimizer=family.optimizer(),
        **options,
    )


def _largest(row, fullest, device_memory):
    """Returns the largest size that fits, or `None`.

    Args:
        row: The `_Row`.
        fullest: Function from a size to the bytes of the fullest device, for
            parameters and for activations. It takes long, so where a size
            would just fit is guessed from the last one.
        device_memory: Integer.
    """
    start, step = row.sizes[row.grows], row.step
    power = 2 if row.grows == "num_filters" else 1
    # In steps: `low` fits, `high` does not.
    number, low, high = start // step, 0, math.inf
    while high - low > 1:
        parameters, activations = fullest(number * step + start % step)
        if parameters + activations <= device_memory:
            low = number
        else:
            high = number

        def fits(guess, number=number, needs=(parameters, activations)):
            ratio = guess / number
            guessed = needs[0] * ratio**power + needs[1] * ratio
            return guessed <= device_memory

        while fits(number + 1):
            number += 1
        while number > 0 and not fits(number):
            number -= 1
        number = min(max(number, low + 1), high - 1)
    return low * step + start % step if low else None


def _print_table(family, found):
    """Prints the rows of a model."""
    table = rich.table.Table(
        title=f"{family.title} on devices of {family.device_gib} GiB, "
        f"{type(family.optimizer()).__name__}, mini-batches of "
        f"{family.batch_size}\n"
        "GiB of the fullest device, and of all; the paper's GB",
        box=rich.box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for name in ("", "bytes"):
        table.add_column(name)
    for name in (
        "param-\neters",
        "weights\na device",
        "\nall",
        "activations\na device",
        "\nall",
        "needs\na device",
        "\nfits",
        "\nlargest",
    ):
        table.add_column(name, justify="right")
    for x in found:
        paper = x["paper"]
        table.add_row(
            x["name"],
            "paper",
            _count(paper["parameters"]),
            "",
            f"{paper['parameter_gb']:.2f}",
            "",
            f"{paper['activation_gb']:.2f}",
            "",
            "yes",
            _text(x["sizes"]),
        )
        activations = x["activation_bytes"]
        for name, planned in x["by_bytes"].items():
            weights = planned["parameter_bytes"]
            table.add_row(
                "",
                name,
                _count(x["parameters"]),
                *(
                    f"{size / 2**30:.2f}"
                    for size in (
                        max(weights),
                        sum(weights),
                        max(activations),
                        sum(activations),
                        planned["needs"],
                    )
                ),
                "yes" if planned["fits"] else "no",
                _text(planned["largest"]) if planned["largest"] else "none",
            )
    _console().print(table)


def _notes(found):
    """Returns why plan and paper differ, a line each."""
    worst = max(
        abs(x["parameters"] / x["paper"]["parameters"] - 1) for x in found
    )
    notes = [
        f"Parameters are within {worst:.1%} of the paper's, which are rounded.",
        "12 bytes are a weight and two slots. tf_gpipe needs 16: the gradients "
        "of a parameter add up over the micro-batches.",
    ]
    for model, write in (
        ("amoebanet_d", _notes_on_amoebanet),
        ("transformer_lm", _notes_on_transformer),
    ):
        own = [x for x in found if x["model"] == model]
        naive = [x for x in own if x["name"] == "Naive-1"]
        piped = [x for x in own if x not in naive]
        title = _FAMILIES[model].title
        if own:
            notes += [f"{title}: {note}" for note in write(naive, piped)]
    return notes


def _notes_on_amoebanet(naive, piped):
    per_parameter = [
        f"{x['paper']['parameter_gb'] * 1e9 / x['parameters']:.1f}"
        for x in naive + piped
    ]
    yield (
        f"the paper's parameter memory is {', '.join(per_parameter)} bytes for "
        "each of our parameters, its GB taken for 10^9. Why it is not 12 in "
        "all rows is not known."
    )
    for x in naive:
        yield _note_on_naive(x, x["paper"]["activation_gb"])
    if piped:
        note = (
            f"activations in the pipelines are {_activations(piped)} of the "
            f"paper's, with M={piped[0]['num_micro_batches']}. They grow with "
            "the rows of a micro-batch; the paper does not tell its M."
        )
        defaults = {"num_micro_batches": 128, "dtype_policy": "float32"}
        if defaults.items() <= piped[0].items():
            note += (
                " With --micro_batch_size=4 they are less than the paper's in "
                "all rows, with 16 more in all rows."
            )
        yield note
        last = piped[-1]["activation_bytes"]
        if len(last) > 1:
            yield (
                f"the first of {len(last)} stages has "
                f"{last[0] / sum(last):.0%} of the activations: images are "
                "largest there, and stages have nearly equal parameters."
            )
        yield (
            "measured on a CPU (--run), stages need less than planned. "
            + _MERGED
        )


def _notes_on_transformer(naive, piped):
    for x in naive:
        paper = x["paper"]
        yield (
            f"the paper's {paper['parameter_gb']} GB of parameters in Naive-1 "
            f"would be {paper['parameter_gb'] * 2**30 / x['parameters']:.0f} "
            "bytes each. At 12 bytes they are "
            f"{12 * x['parameters'] / 2**30:.2f} GiB, what it gives for "
            "activations: the two seem to be swapped."
        )
        yield _note_on_naive(x, paper["parameter_gb"])
    if piped:
        per_parameter = [
            x["paper"]["parameter_gb"] * 2**30 / x["parameters"] for x in piped
        ]
        yield (
            "the paper's parameter memory in the pipelines is "
            f"{_range(per_parameter)} bytes a parameter, its GB taken for 2^30."
        )
        yield (
            f"activations in the pipelines are {_activations(piped)} of the "
            "paper's; with the sums of gradients, 4 bytes a parameter, "
            f"{_activations(piped, 4)}. That the paper counts those among them "
            "is supposed."
        )
    if (naive + piped)[0]["dtype_policy"] == "float32":
        yield (
            "--dtype_policy=mixed_bfloat16 brings more activations, not fewer: "
            "the softmax of attention is kept in float32 and in bfloat16, and "
            "weights as bfloat16 copies."
        )


def _note_on_naive(x, paper_gb):
    """Returns what Naive-1 has in activations, against the paper's figure."""
    ratio = sum(x["activation_bytes"]) / 2**30 / paper_gb
    batch_size = _FAMILIES[x["model"]].batch_size
    return (
        f"activations in Naive-1 are {ratio:.1f} times the paper's. They are "
        "proportional to the mini-batch, and would agree with one of "
        f"{batch_size / ratio:.0f} rows instead of {batch_size}. That the "
        "paper's was smaller, or that XLA keeps less, is supposed."
    )


def _activations(found, more=0):
    """Returns activations against the paper's, as text.

    Args:
        found: List of what `_planned` returns.
        more: Integer, bytes a parameter to count with them.
    """
    return _range(
        (sum(x["activation_bytes"]) + more * x["parameters"])
        / 2**30
        / x["paper"]["activation_gb"]
        for x in found
    )


def _range(values):
    values = sorted(values)
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def _measure(rows, devices, args):
    """Prints what the devices need at most in a step of each row."""
    lines, runs = [], []
    for row in rows:
        peaks = None
        if row.num_stages <= len(devices):
            peaks = _peaks(row, devices[: row.num_stages], args)
            result = "fits" if peaks else "does not fit"
        else:
            result = f"needs {row.num_stages} devices"
        # What the row has left on the devices.
        keras.backend.clear_session()
        gc.collect()
        sizes = [f"{x / 2**30:.2f}" for x in peaks or []]
        lines.append(
            {
                "row": row.name,
                "(L, D)": _text(row.sizes),
                "result": result,
                "peak GiB": " ".join(sizes),
            }
        )
        runs.append({"name": row.name, "result": result, "peaks": peaks})
    Report(
        f"AmoebaNet-D on {len(devices)} virtual devices of {_GPU_MIB} MiB",
        lines,
        {"runs": runs},
    ).print(args.json)


def _peaks(row, devices, args):
    """Returns the peak memory of each device; `None` where it is too little."""
    layers = model_zoo.get(row.model, **row.sizes)
    x, y = _data(layers, row.family.batch_size)
    try:
        model = _model(layers, row.family, devices, _options(row, args))
        model.train_on_batch(x, y)
        # The first step also tries out algorithms for convolutions.
        for device in devices:
            tf.config.experimental.reset_memory_stats(device)
        model.train_on_batch(x, y)
    except tf.errors.ResourceExhaustedError:
        return None
    return [
        tf.config.experimental.get_memory_info(device)["peak"]
        for device in devices
    ]


def _check(models, args):
    """Prints the memory of worker processes beside what is planned for it."""
    lines, runs, notes = [], [], []
    with workers.connected(
        2, environment=workers.GIVE_BACK, one_core=True
    ) as processes:
        for model, remat in itertools.product(models, ("never", "always")):
            print(f"{model}, remat {remat}", file=sys.stderr)
            options = {
                "num_stages": len(processes),
                "num_micro_batches": 4,
                "remat": remat,
            }
            planned, measured = _memory(model, processes, options)
            ratios = [x / y for x, y in zip(measured, planned, strict=True)]
            lines += [
                {
                    "model": model,
                    "remat": remat,
                    "stage": k,
                    "planned": planned[k] / 2**20,
                    "measured": measured[k] / 2**20,
                    "measured / planned": ratio,
                }
                for k, ratio in enumerate(ratios)
            ]
            runs.append(
                {
                    "model": model,
                    "remat": remat,
                    "planned": planned,
                    "measured": measured,
                }
            )
            if model == "amoebanet_d" and min(ratios) < 0.8:
                notes.append(f"AmoebaNet-D, remat {remat}: {_MERGED}")
            if remat == "never" and max(ratios) > 1.2:
                notes.append(f"{_FAMILIES[model].title}: {_SHAPES}")
    Report(
        "Small versions, a worker process a stage; peak MiB of activations and "
        "gradients",
        lines,
        {},
    ).print()
    _print_notes(notes)
    if args.json:
        result = {"runs": runs, "notes": notes, "machine": report.machine()}
        print(json.dumps(result))


def _memory(model, processes, options):
    """Returns the peaks of activations and gradients, planned and measured.

    Each is a list with the bytes of each stage.
    """
    family = _FAMILIES[model]
    make = functools.partial(model_zoo.get, model, **family.small)
    plan = _plan(make(), family, family.small_batch_size, **options)
    x, y = _data(make(), family.small_batch_size)
    pipeline = _model(
        make(), family, [process.device for process in processes], options
    )
    measured = workers.peak_memory(
        processes, lambda: pipeline.train_on_batch(x, y)
    )
    planned = [
        expected.activation_bytes
        + sum(
            v.shape.num_elements() * v.value.dtype.size
            for v in stage.trainable(stage.owned)
        )
        for expected, stage in zip(plan.stages, pipeline.stages, strict=True)
    ]
    return planned, measured


def _model(layers, family, devices, options):
    model = tf_gpipe.PipelinedSequential(layers, devices=devices, **options)
    model.compile(
        family.optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _data(layers, batch_size):
    """Returns a mini-batch of random inputs and labels."""
    inputs = layers[0].output
    shape = (batch_size, *inputs.shape[1:])
    generator = np.random.default_rng(0)
    if inputs.dtype == "int32":
        tokens = generator.integers(0, _NUM_CLASSES, shape, dtype="int32")
        return tokens, tokens
    labels = generator.integers(0, _NUM_CLASSES, batch_size, dtype="int32")
    return generator.standard_normal(shape, dtype="float32"), labels


def _console():
    return rich.console.Console(width=100, highlight=False)


def _print_notes(notes):
    for note in notes:
        _console().print(f"- {note}")


def _text(sizes):
    return ", ".join(map(str, sizes.values()))


def _count(parameters):
    if parameters < 1e9:
        return f"{parameters / 1e6:.1f}M"
    return f"{parameters / 1e9:.2f}B"


if __name__ == "__main__":
    main()
