"""`plan`: the memory that a plan predicts, against a real one."""

import tf_gpipe
from tools import workers
from tools.benchmark import timing
from tools.benchmark import workloads

# What else would keep memory that TensorFlow has given back: the allocator of
# oneDNN all of it, that of the C library small pieces.
_GIVE_BACK = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


def add_arguments(parser):
    parser.add_argument("--num_stages", type=int, default=2)
    parser.add_argument("--num_micro_batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--remat", default="always")
    parser.add_argument(
        "--workload", choices=workloads.WORKLOADS, default="transformer"
    )
    parser.add_argument("--batch_size", type=int, default=256)


def main(args):
    """Peak memory of each stage in a step: planned, and in its worker.

    The plan leaves out what an operation needs while it runs: that of a
    convolution on a CPU adds about the size of the last cache.
    """
    make = workloads.WORKLOADS[args.workload]
    x, y = workloads.data(make(), args.batch_size)
    options = {
        "num_stages": args.num_stages,
        "num_micro_batches": args.num_micro_batches,
        "schedule": args.schedule,
        "remat": args.remat,
    }
    plan = tf_gpipe.plan(make(), x.shape, optimizer="sgd", **options)
    with workers.connected(
        args.num_stages, environment=_GIVE_BACK, one_core=True
    ) as processes:
        model = tf_gpipe.PipelinedSequential(
            make(), devices=[p.device for p in processes], **options
        )
        workloads.compiled(model)
        # What the first steps leave is not the activations'.
        for _ in range(2):
            model.train_on_batch(x, y)
        idle = [process.memory("VmRSS") for process in processes]
        for process in processes:
            process.forget_peak()
        model.train_on_batch(x, y)
        peaks = [
            process.memory("VmHWM") - before
            for process, before in zip(processes, idle, strict=True)
        ]
    # All that a stage will hold, without what it holds between steps.
    planned = [
        expected.bytes
        - sum(
            v.shape.num_elements() * v.value.dtype.size for v in stage.variables
        )
        for expected, stage in zip(plan.stages, model.stages, strict=True)
    ]
    timing.report(
        f"{args.workload}: K={args.num_stages}, M={args.num_micro_batches}, "
        f"{args.schedule}, remat {args.remat}, batch of {args.batch_size}; "
        "peak MiB of activations and gradients",
        [
            {
                "stage": k,
                "planned": planned[k] / 2**20,
                "measured": peaks[k] / 2**20,
                "measured / planned": peaks[k] / planned[k],
            }
            for k in range(args.num_stages)
        ],
        {"planned": planned, "measured": peaks},
        args.json,
    )
