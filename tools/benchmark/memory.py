"""`memory`: what each remat mode adds to the memory of a process."""

import json

from tf_gpipe.remat import MODES
from tools.benchmark import fresh
from tools.benchmark import timing


def add_arguments(parser):
    parser.add_argument("--num_layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=32768)
    parser.add_argument("--num_micro_batches", type=int, default=8)
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--mode", choices=MODES, help="measure this one only")


def main(args):
    """Peak resident memory above the model's own, one process a remat mode."""
    if args.mode:
        print(json.dumps(_measure(args)))
        return
    peaks = {mode: fresh.measure(args, mode=mode) for mode in reversed(MODES)}
    timing.report(
        f"Peak MiB above the model's own: {args.num_layers} layers of width "
        f"{args.width}, batch of {args.batch_size}, K=1, "
        f"M={args.num_micro_batches}, {args.schedule}",
        [
            {
                "remat": mode,
                "MiB": peak / 2**20,
                "of never": peak / peaks["never"],
            }
            for mode, peak in peaks.items()
        ],
        {"bytes": peaks},
        args.json,
    )


def _measure(args):
    import keras
    import tensorflow as tf

    import tf_gpipe

    model = tf_gpipe.PipelinedSequential(
        [keras.Input((args.width,))]
        + [
            keras.layers.Dense(args.width, "tanh")
            for _ in range(args.num_layers)
        ],
        num_stages=1,
        num_micro_batches=args.num_micro_batches,
        schedule=args.schedule,
        remat=args.mode,
    )
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    x = tf.random.normal((args.batch_size, args.width))
    y = tf.zeros((args.batch_size, args.width))
    # A step on few rows, after which everything but the activations is there.
    rows = args.num_micro_batches
    model.train_on_batch(x[:rows], y[:rows])
    before = _status("VmRSS")
    model.train_on_batch(x, y)
    return _status("VmHWM") - before


def _status(field):
    """Returns a figure of the process's memory in bytes."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"The system does not tell {field}.")
