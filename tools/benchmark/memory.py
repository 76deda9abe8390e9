"""`memory`: what a step needs, beside the plan and the paper's formula."""

import math

import keras

import tf_gpipe
from tf_gpipe import schedules
from tf_gpipe.schedule import REMAT_MODES
from tf_gpipe.simulate import simulate
from tools import command_line
from tools import workers
from tools.benchmark import workloads
from tools.benchmark.report import Report

_FLOAT = 4


def add_arguments(parser):
    parser.add_argument("--num_stages", type=command_line.positive, default=2)
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
        type=command_line.choices(REMAT_MODES),
        default="always,never",
        help="the remat mode of each pipeline",
    )
    parser.add_argument(
        "--workload", choices=workloads.WORKLOADS, default="transformer"
    )
    parser.add_argument("--batch_size", type=command_line.positive, default=256)


def main(args):
    """Peak memory of each stage in a step: planned, and in its worker.

    Measured is the peak of the resident memory of the stage's process above
    that between steps: activations, gradients and what operations need while
    they run. The plan leaves out the latter; on a CPU a convolution's is
    about the size of the last cache.

    The formula is the GPipe paper's N + (L / K) (N / M): what a stage takes
    in from the mini-batch, and the activations of its layers for a
    micro-batch; with 1F1B of as many micro-batches as a stage keeps.
    """
    make = workloads.WORKLOADS[args.workload]
    x, y = workloads.data(make(), args.batch_size)
    # The activations of all layers for all rows.
    whole = (
        tf_gpipe.plan(
            make(), x.shape, num_stages=1, num_micro_batches=1, remat="never"
        )
        .stages[0]
        .activation_bytes
    )
    rows = []
    with workers.connected(
        args.num_stages, environment=workers.GIVE_BACK, one_core=True
    ) as processes:
        for schedule in args.schedule:
            for mode in args.remat:
                rows += _measured(args, schedule, mode, x, y, processes, whole)
    return Report(
        f"{args.workload}: K={args.num_stages}, M={args.num_micro_batches}, "
        f"batch of {args.batch_size}; peak MiB of activations and gradients",
        [
            {
                "schedule": row["schedule"],
                "remat": row["remat"],
                "stage": row["stage"],
                **{
                    name: row[name] / 2**20
                    for name in ("formula", "planned", "measured")
                },
                "of the formula": row["measured"] / row["formula"],
                "of the plan": row["measured"] / row["planned"],
            }
            for row in rows
        ],
        {"rows": rows},
        "measured",
    )


def _measured(args, schedule, mode, x, y, processes, whole):
    """Returns a row for each stage of a pipeline."""
    make = workloads.WORKLOADS[args.workload]
    options = {
        "num_stages": args.num_stages,
        "num_micro_batches": args.num_micro_batches,
        "balance": "flops",
        "schedule": schedule,
        "remat": mode,
    }
    plan = tf_gpipe.plan(make(), x.shape, optimizer="sgd", **options)
    model = tf_gpipe.PipelinedSequential(
        make(), devices=[p.device for p in processes], **options
    )
    workloads.compiled(model)
    measured = workers.peak_memory(
        processes, lambda: model.train_on_batch(x, y)
    )
    formula = _formula(model, len(x), whole)
    # All that a stage will hold, without what it holds between steps.
    planned = [
        expected.bytes
        - sum(
            v.shape.num_elements() * v.value.dtype.size for v in stage.variables
        )
        for expected, stage in zip(plan.stages, model.stages, strict=True)
    ]
    return [
        {
            "schedule": schedule,
            "remat": mode,
            "stage": k,
            "formula": formula[k],
            "planned": planned[k],
            "measured": measured[k],
        }
        for k in range(args.num_stages)
    ]


def _formula(model, num_rows, whole):
    """Returns the bytes that the paper's formula gives each stage."""
    num_layers = sum(len(stage.nodes) for stage in model.stages)
    schedule = model._pipeline.schedule
    num_micro_batches = schedule.num_micro_batches
    kept = simulate(schedule).peak_micro_batches
    found = []
    for k, stage in enumerate(model.stages):
        share = len(stage.nodes) / num_layers / num_micro_batches
        activations = share * whole
        if model._pipeline.remat == "never":
            found.append(kept[k] * activations)
            continue
        inputs = sum(
            num_rows * math.prod(tensor.shape[1:]) * _FLOAT
            for value in stage.inputs
            for tensor in keras.tree.flatten(value.spec)
        )
        found.append(kept[k] / num_micro_batches * inputs + activations)
    return found
