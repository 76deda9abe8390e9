"""Compares pipelines with the plain Keras models, number by number.

A model of the zoo takes a step on random data, over logical CPU devices where
there is no accelerator; or, with --random, as many models as wanted are drawn
by chance, and each takes one step. The exit status is 1 where something
differs.

Examples:

    python -m tools.verify --model=resnet_small --num_stages=2 --batch_size=8
    python -m tools.verify --random=1000 --seed=0
"""

import json
import os
import sys

# Before TensorFlow is imported: it reports at start that there is no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import tf_gpipe  # noqa: E402
from tools import command_line  # noqa: E402
from tools import random_models  # noqa: E402
from trainers import devices as host_devices  # noqa: E402
from trainers import models  # noqa: E402

# Of inputs whose length is left open.
_LENGTH = 8
# Those of a random model.
_MOST_STAGES = 4
_MODELS_A_LINE = 50


def make_parser():
    parser = command_line.make_parser("verify", __doc__)
    command_line.add_model_flags(parser)
    parser.add_argument(
        "--batch_size",
        type=command_line.positive,
        default=8,
        help="rows of the mini-batch",
    )
    parser.add_argument(
        "--num_micro_batches",
        type=command_line.positive,
        default=4,
        help="micro-batches M",
    )
    parser.add_argument(
        "--balance",
        choices=("parameters", "flops", "memory"),
        default="parameters",
        help="what stages have in nearly equal parts",
    )
    parser.add_argument(
        "--optimizer", default="adam", help="name of a Keras optimizer"
    )
    parser.add_argument(
        "--random",
        type=command_line.positive,
        metavar="N",
        help="compare N models that are drawn by chance instead",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="where chance begins: model i is that of seed + i",
    )
    return parser


def main(argv=None):
    parser = make_parser()
    args = command_line.parse(parser, argv)
    if args.random:
        for name in ("model", "model_args", "batch_size", "num_stages"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} is not for --random models")
        return _random(args)
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(args.dtype_policy)
        report = _verify(args)
    except (TypeError, ValueError, host_devices.UserError) as e:
        # Keras's messages have several lines.
        parser.error(" ".join(str(e).split()))
    finally:
        keras.config.set_dtype_policy(before)
    print(report, end="")
    if args.json:
        print(json.dumps(report.to_dict()))
    return 0 if report.ok else 1


def _verify(args):
    host_devices.ensure(args.num_devices or args.num_stages)
    keras.utils.set_random_seed(args.seed)
    model = models.pipelined(
        args.model,
        args.model_args,
        num_stages=args.num_stages,
        num_micro_batches=args.num_micro_batches,
        balance=args.balance,
        schedule=args.schedule,
        remat=args.remat,
        devices=host_devices.first(args.num_devices),
    )
    model.compile(args.optimizer, "mse")
    functional = isinstance(model, tf_gpipe.PipelinedModel)
    generator = np.random.default_rng(args.seed)
    # Tokens that are there in each of its vocabularies. 0 may be padding.
    tokens = min(
        (v.shape[0] for v in model.variables if v.name == "embeddings"),
        default=2,
    )

    def random(tensor):
        shape = [n or _LENGTH for n in tensor.shape[1:]]
        shape = (args.batch_size, *shape)
        if "float" in tensor.dtype:
            return generator.standard_normal(shape, dtype="float32")
        return generator.integers(1, tokens, shape, dtype=tensor.dtype)

    x, y = (
        keras.tree.map_structure(random, tensors)
        for tensors in (
            (model.input, model.output)
            if functional
            else (model.inputs[0], model.outputs[0])
        )
    )
    return tf_gpipe.verify(model, x, y)


def _random(args):
    host_devices.ensure(_MOST_STAGES)
    different = []
    for seed in range(args.seed, args.seed + args.random):
        # Functions and names of those before.
        keras.backend.clear_session()
        drawing = random_models.Drawing(seed, has_state=seed % 2 == 1)
        try:
            report = random_models.verified(drawing)
            found = "" if report.ok else str(report)
        except Exception as e:
            found = f"{type(e).__name__}: {e}"
        if found:
            different.append({"seed": seed, "kinds": drawing.has()})
            kinds = ", ".join(drawing.has()) or "of every day"
            print(f"seed {seed} ({kinds}) differs:\n{found}", flush=True)
        done = seed - args.seed + 1
        if done % _MODELS_A_LINE == 0:
            print(f"{done} of {args.random} models", flush=True)
    print(f"{len(different)} of {args.random} models differ")
    if args.json:
        print(json.dumps({"models": args.random, "different": different}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
