"""Compares a pipeline with the plain Keras model, number by number.

A model takes a step on random data, over logical CPU devices where there is no
accelerator. The exit status is 1 where something differs, or nothing could be
compared.

Examples:

    python -m tf_gpipe verify --model=resnet_small --num_stages=2
    python -m tf_gpipe verify --model=my_models:make --batch_size=16
"""

import argparse
import json
from collections.abc import Sequence

import tf_gpipe
from tf_gpipe.commands import flags
from tf_gpipe.schedule import schedules


def make_parser() -> argparse.ArgumentParser:
    parser = flags.make_parser(
        "verify", __doc__, num_micro_batches=4, batch_size=8
    )
    parser.add_argument(
        "--balance",
        choices=("parameters", "flops", "memory"),
        help="what stages have in nearly equal parts; flops by default",
    )
    parser.add_argument(
        "--optimizer", default="adam", help="name of a Keras optimizer"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and data"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = flags.parse(parser, argv)
    with flags.in_effect(parser, args):
        import keras

        from tf_gpipe.commands import devices
        from tf_gpipe.commands import models
        from tf_gpipe.planning import optimizers

        devices.ensure(
            schedules.num_devices_of(
                args.schedule, args.num_stages, args.num_devices
            )
        )
        keras.utils.set_random_seed(args.seed)
        model = models.pipelined(
            models.get(args.model, args.model_args),
            num_stages=args.num_stages,
            num_micro_batches=args.num_micro_batches,
            balance=args.balance,
            schedule=args.schedule,
            remat=args.remat,
            **flags.limit(args),
            devices=devices.first(args.num_devices),
        )
        model.compile(optimizers.get(args.optimizer), "mse")
        report = tf_gpipe.verify(
            model, *models.random_data(model, args.batch_size, args.seed)
        )
    print(report, end="")
    if args.json:
        print(json.dumps(report.to_dict()))
    return 0 if report.ok else 1
