"""`memory`: a step's peak memory beside the plan and the paper's formula."""

import itertools

import tf_gpipe
from tf_gpipe.commands import workers
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tf_gpipe.planning.candidates import num_each
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.simulate import simulate
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import REMAT_MODES
from tf_gpipe.stage.stage import trainable
from tools import command_line
from tools import worker_usage
from tools.benchmark import workloads
from tools.benchmark.report import Report


def add_arguments(parser):
    parser.add_argument(
        "--num_devices",
        type=command_line.positive,
        default=2,
        help="devices of each pipeline; with interleaved schedules, auto, zb_v,"
        " v_half and v_min each has two stages, with the others one",
    )
    parser.add_argument(
        "--num_micro_batches", type=command_line.positive, default=8
    )
    parser.add_argument(
        "--schedule",
        type=command_line.choices(schedules.NAMES),
        default="gpipe,1f1b",
        help="the schedule of each pipeline",
    )
    parser.add_argument(
        "--remat",
        type=command_line.choices((*REMAT_MODES, AUTO_REMAT)),
        default="always,never",
        help="the remat mode of each pipeline",
    )
    parser.add_argument(
        "--memory_limit",
        type=command_line.positive_number,
        default=0.5,
        help="the share of the activations of never that auto may take",
    )
    parser.add_argument(
        "--workload", choices=workloads.WORKLOADS, default="transformer"
    )
    parser.add_argument("--batch_size", type=command_line.positive, default=256)


def main(args):
    """Peak memory of each device in a step: by formula, planned and measured.

    "measured" is the peak of the process's resident memory in a step, above
    its memory between steps: activations, gradients, and the workspace of
    operations while they run. The plan leaves out the workspace; on a CPU a
    convolution's is about as large as the last-level cache.

    The formula is the GPipe paper's N + (L / K) (N / M): a stage's inputs for
    the whole mini-batch, and the activations of its layers, each by its own
    size, for one micro-batch. Schedules such as 1F1B keep the inputs of fewer
    micro-batches at a time, and count these only; the model's own inputs are
    always counted whole. With remat="never" the formula is the activations of
    all micro-batches that a stage keeps. It leaves out gradients of weights,
    so these are subtracted before a measurement is divided by it.
    """
    make = workloads.WORKLOADS[args.workload]
    x, y = workloads.data(make(), args.batch_size)
    # What the whole model keeps, split in proportion to each layer's own size.
    (whole,) = _activations(make(), x.shape, 1)
    by_layer = _activations(make(), x.shape, len(make()) - 1)
    activations = [size / sum(by_layer) * whole for size in by_layer]
    rows = []
    with command_line.checking():
        processes = workers.connected(
            args.num_devices,
            environment=worker_usage.GIVE_BACK,
            one_core=True,
        )
    for schedule in args.schedule:
        for mode in args.remat:
            rows += _measured(
                args, schedule, mode, x, y, processes, activations
            )
    return Report(
        f"{args.workload}: {args.num_devices} devices, "
        f"M={args.num_micro_batches}, "
        f"batch of {args.batch_size}; peak MiB of activations and gradients",
        [
            {
                "schedule": row["schedule"],
                "remat": row["remat"],
                "stages": ", ".join(map(str, row["stages"])),
                **{
                    name: row[name] / 2**20
                    for name in ("formula", "planned", "measured")
                },
                "of the formula": (row["measured"] - row["sums"])
                / row["formula"],
                "of the plan": row["measured"] / row["planned"],
            }
            for row in rows
        ],
        {"rows": rows},
        "measured",
    )


def _activations(layers, shape, num_stages):
    """Returns the bytes that each stage keeps of a whole mini-batch."""
    plan = tf_gpipe.plan(
        layers,
        shape,
        num_stages=num_stages,
        num_micro_batches=1,
        remat="never",
    )
    return [stage.activation_bytes for stage in plan.stages]


def _measured(args, schedule, mode, x, y, processes, activations):
    """Measures a pipeline, and returns a row for each of its devices."""
    make = workloads.WORKLOADS[args.workload]
    options = {
        "num_stages": args.num_devices * num_each(schedule, args.num_devices),
        "num_micro_batches": args.num_micro_batches,
        "balance": "flops",
        "schedule": schedule,
        "remat": mode,
    }
    if mode == AUTO_REMAT:
        options["memory_limit"] = args.memory_limit
    with command_line.checking():
        plan = tf_gpipe.plan(
            make(),
            x.shape,
            optimizer="sgd",
            num_devices=args.num_devices
            if schedule in schedules.ANY_STAGES_A_DEVICE
            else None,
            **options,
        )
    model = tf_gpipe.PipelinedSequential(
        make(), devices=[p.device for p in processes], **options
    )
    workloads.compiled(model)
    measured = worker_usage.peak_memory(
        processes, lambda: model.train_on_batch(x, y)
    )
    formula = _formula(model, len(x), activations)
    found = []
    for device, expected in enumerate(plan.device_bytes):
        stages = [x for x in model.stages if plan.devices[x.index] == device]
        found.append(
            {
                "schedule": schedule,
                "remat": mode,
                "stages": [x.index for x in stages],
                "formula": sum(formula[x.index] for x in stages),
                # The device's peak, without its memory between steps.
                "planned": expected
                - sum(size_in_bytes(x.variables) for x in stages),
                "measured": measured[device],
                "sums": sum(
                    size_in_bytes(trainable(x.variables)) for x in stages
                ),
            }
        )
    return found


def _formula(model, num_rows, activations):
    """Returns the bytes of each stage by the paper's formula."""
    schedule = model._pipeline.schedule
    num_micro_batches = schedule.num_micro_batches
    rest = iter(activations)
    found = []
    peaks = simulate(schedule).peak_micro_batches
    for stage, kept in zip(model.stages, peaks, strict=True):
        own = sum(itertools.islice(rest, len(stage.nodes))) / num_micro_batches
        if model._pipeline.remat == "never":
            found.append(kept * own)
            continue
        given = model._pipeline.graph.inputs
        inputs = sum(
            num_rows
            * size_in_bytes(value.spec)
            * (1 if value in given else kept / num_micro_batches)
            for value in stage.inputs
        )
        found.append(inputs + own)
    return found
