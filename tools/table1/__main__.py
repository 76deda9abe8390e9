"""Compares the planner with Table 1 of the GPipe paper.

Plans each model of the table on devices with as much memory as the paper's,
and searches for the largest one that fits. Memory is counted twice: with
the paper's 12 bytes a parameter (a weight and two optimizer slots), and with
the 16 bytes of `tf_gpipe`, which also sums gradients over micro-batches.

Naive-1 is one stage without micro-batches or rematerialisation. Pipeline-K is
K stages with rematerialisation. The paper does not give its micro-batches.
Here each has one row, which takes the least memory; 128 stages could not have
the paper's 4 K micro-batches anyway, with a mini-batch of 32 rows. The schedule
is the library's default: the paper's own, `gpipe`, keeps the predictions of
the whole mini-batch for the loss.

`--run` measures instead. With a GPU, it splits the GPU into virtual devices of
8 GiB and runs two steps of each AmoebaNet-D that does not need more of them.
(Not yet run on hardware.) Without a GPU, it trains small versions over two
worker processes and compares the peak memory of each with the plan.

Example:

    python -m tools.table1 --model=transformer_lm --rows Naive-1 Pipeline-8
"""

import argparse
import os

# Comes before TensorFlow is imported, which reports that there is no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402

from tf_gpipe import progress  # noqa: E402
from tf_gpipe.commands import models  # noqa: E402
from tools import command_line  # noqa: E402
from tools import local_devices  # noqa: E402
from tools.table1 import comparison  # noqa: E402
from tools.table1 import measured  # noqa: E402
from tools.table1.published import FAMILIES  # noqa: E402
from tools.table1.published import ROWS  # noqa: E402


def make_parser():
    parser = argparse.ArgumentParser(
        prog="python -m tools.table1",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=FAMILIES, help="only this model, not both"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(dict.fromkeys(row.name for row in ROWS)),
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
        for row in ROWS
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
    with progress.shown(not args.json):
        _compare_or_measure(rows, gpus, args)


def _compare_or_measure(rows, gpus, args):
    if not args.run:
        comparison.compare(rows, args)
        return
    with models.dtype_policy(args.dtype_policy):
        if gpus:
            rows = [row for row in rows if row.model == "amoebanet_d"]
            measured.on_gpu(
                rows,
                local_devices.split_gpu(gpus[0], mib=measured.GPU_MIB),
                args,
            )
        else:
            measured.on_workers(
                [args.model] if args.model else list(FAMILIES), args
            )


if __name__ == "__main__":
    main()
