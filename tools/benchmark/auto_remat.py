"""`auto_remat`: whether pipelines stay within their `memory_limit`."""

import json
import os

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe
from tf_gpipe.commands import models
from tf_gpipe.partition.memory_limit import TooLittleMemoryError
from tf_gpipe.partition.tensor_memory import size_in_bytes
from tools import command_line
from tools import worker_usage
from tools.benchmark import fresh
from tools.benchmark import planned_models
from tools.benchmark.planned_models import MODELS
from tools.benchmark.report import Report

_SHARES = (0.25, 0.5, 0.75)


def add_arguments(parser):
    fresh.add_arguments(parser, MODELS, "build/auto_remat.json")
    parser.add_argument(
        "--num_micro_batches", type=command_line.positive, default=8
    )
    planned_models.add_kernels(parser)


def main(args):
    """Peak memory of pipelines with remat="auto" beside their `memory_limit`.

    Each model is one stage on one device, in a process of its own. The limits
    are shares of the memory planned for remat="never", or the least limit that
    the planner accepts where that is more. "measured" is the peak of the
    process's resident memory in a step, above its memory between steps, plus
    the size of the weights and of the mini-batch, which is on the device
    beforehand. "bit-equal" counts the variables that are the same
    after a step of SGD as with remat="never"; "differ by" is the largest
    difference, relative to the largest entry of its variable.
    """
    if args.only:
        print(json.dumps(_found(args, args.only)))
        return None
    rows = []
    for name in args.case:
        kernels = planned_models.kernels_of(name, args)
        found = fresh.once(
            args,
            worker_usage.KERNELS[kernels],
            only=name,
            case=name,
            kernels=kernels,
        )
        rows += [{"model": name, "kernels": kernels, **row} for row in found]
    within = sum(x["measured"] <= x["limit"] for x in rows)
    worst = max(rows, key=lambda x: x["measured"] / x["limit"])
    return Report(
        f"memory limits: K=1, M={args.num_micro_batches}; MiB",
        [
            {
                "model": x["model"],
                "kernels": x["kernels"],
                "of never": x["share"],
                **{
                    name: x[name] / 2**20
                    for name in ("limit", "planned", "measured")
                },
                "of the limit": x["measured"] / x["limit"],
                "recomputed": f"{x['recomputed']} of {x['layers']}",
                "bit-equal": f"{x['equal']} of {x['variables']}",
                "differ by": x["difference"],
            }
            for x in rows
        ],
        {"rows": rows},
        "of the limit",
        [
            f"{within} of {len(rows)} within the limit; the worst is "
            f"{worst['model']}: {worst['measured'] / worst['limit']:.2f}"
        ],
    )


def _found(args, name):
    """Returns a model's results, a dictionary for each limit."""
    make, num_rows, length, _ = MODELS[name]
    options = {"num_stages": 1, "num_micro_batches": args.num_micro_batches}
    model = make()
    spec = models.batch(model, num_rows, length)

    def plan(**kwargs):
        return tf_gpipe.plan(model, spec, optimizer="sgd", **options, **kwargs)

    never = plan(remat="never").device_bytes[0]
    weights, found, expected = None, [], []
    for share in (None, *_SHARES):
        kwargs = {"remat": "never"}
        if share is not None:
            limit = int(share * never)
            try:
                plan(remat="auto", memory_limit=limit)
            except TooLittleMemoryError as error:
                limit = int(error.least) + 1
            kwargs = {"remat": "auto", "memory_limit": limit}
        planned = plan(**kwargs)
        keras.backend.clear_session(free_memory=False)
        pipeline = models.pipelined(
            make(),
            devices=["CPU:0"],
            **options,
            **kwargs,
            **({"batch_size": num_rows} if share is not None else {}),
        )
        weights = weights or pipeline.get_weights()
        pipeline.set_weights(weights)
        # As tensors: Keras would copy arrays twice.
        x, y = keras.tree.map_structure(
            tf.identity, planned_models.data(pipeline, num_rows, length)
        )
        pipeline.compile(keras.optimizers.SGD(1.0), planned_models.losses(y))
        pipeline.train_on_batch(x, y)
        trained = pipeline.get_weights()
        if share is None:
            expected = trained
            continue
        (added,) = worker_usage.added(
            [os.getpid()],
            lambda pipeline=pipeline, x=x, y=y: pipeline.train_on_batch(x, y),
        )
        pairs = list(zip(trained, expected, strict=True))
        found.append(
            {
                "share": kwargs["memory_limit"] / never,
                "limit": kwargs["memory_limit"],
                "planned": planned.device_bytes[0],
                "measured": added + size_in_bytes([pipeline.variables, x, y]),
                "recomputed": len(planned.stages[0].recomputed),
                "layers": len(planned.stages[0].layers),
                "equal": sum(np.array_equal(a, b) for a, b in pairs),
                "variables": len(pairs),
                "difference": max(
                    float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9))
                    for a, b in pairs
                    if a.size and a.dtype.kind == "f"
                ),
            }
        )
    return found
