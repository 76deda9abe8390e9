"""`tune`: the pipeline that `tf_gpipe.tune` chooses, against fixed ones."""

import json
import time

import keras

import tf_gpipe
from tf_gpipe.commands import workers
from tf_gpipe.planning import plans
from tf_gpipe.schedule import schedules
from tools import command_line
from tools import local_devices
from tools.benchmark import fresh
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report

# Schedule, micro-batches per device, remat.
_CANDIDATES = (
    ("1f1b", 1, "never"),
    ("1f1b", 2, "always"),
    ("1f1b", 4, "never"),
    ("1f1b", 4, "always"),
    ("gpipe", 2, "never"),
    ("gpipe", 4, "always"),
    ("eager_1f1b", 4, "never"),
    ("zero_bubble", 2, "never"),
    ("zero_bubble", 4, "never"),
    ("interleaved", 2, "never"),
    ("zb_v", 2, "never"),
)


def _waits(*shares):
    """Returns a function that makes layers which wait in these proportions."""
    return lambda: [
        keras.Input((workloads.NUM_CLASSES,)),
        *(workloads.Wait(0.002 * x) for x in shares),
    ]


_MODELS = {
    "transformer": lambda: workloads.transformer(4),
    "wide_transformer": lambda: workloads.transformer(2, width=512),
    "convolutional": lambda: workloads.convolutional(4),
    "dense": lambda: workloads.dense(40, 256),
    "equal_waits": _waits(*[1] * 8),
    "uneven_waits": _waits(1, 1, 1, 4, 1, 2, 1, 1),
    "long_tail": _waits(1, 1, 1, 1, 1, 1, 3, 5),
    "many_waits": _waits(*[0.5] * 16),
}
# For each case: where, the number of devices, the model, and the memory of a
# device, as a share of what 1F1B without remat needs on its fullest device, or
# `None` if memory is not limited. Nine tenths of it may be used: the shares let
# some of the fixed pipelines fit, and not the fastest.
CASES = {
    f"{where}{count}_{model}" + (f"_{share:g}" if share else ""): (
        where,
        count,
        model,
        share,
    )
    for where, count, model, share in (
        *(("logical", 2, x, None) for x in list(_MODELS)[:4]),
        ("logical", 4, "transformer", 0.9),
        ("logical", 4, "dense", None),
        *(("workers", 2, x, None) for x in list(_MODELS)[:4]),
        ("workers", 2, "transformer", 1.1),
        ("workers", 2, "wide_transformer", 1.1),
        ("workers", 2, "convolutional", 0.9),
        ("workers", 2, "dense", 1.15),
        *(("simulated", 4, x, None) for x in list(_MODELS)[4:]),
        ("simulated", 2, "uneven_waits", None),
        ("simulated", 2, "long_tail", None),
    )
}


def add_arguments(parser):
    fresh.add_arguments(parser, CASES, "build/tune.json")
    parser.add_argument("--batch_size", type=command_line.positive, default=32)
    parser.add_argument("--num_repeats", type=command_line.positive, default=2)
    parser.add_argument(
        "--budget_seconds", type=command_line.positive_number, default=60.0
    )


def main(args):
    """Step time of tune's choice and of up to twelve fixed pipelines.

    The fixed pipelines are one device, and several schedules, numbers of
    micro-batches and remat modes over all devices, cut by operations, or by
    layers if these wait. A pipeline whose plan needs more than nine tenths of
    a case's memory is not measured. All train the same batch, in turn. A step
    time is the mean of two steps, and the least of such means. The ratio is
    that of tune's choice over that of the best fixed one.
    """
    if args.only:
        print(json.dumps(_measured(args, *CASES[args.only])))
        return None
    cases = fresh.each_once(args)
    good = sum(x["ratio"] <= 1.05 for x in cases.values())
    return Report(
        f"tune: within 5 % of the best in {good} of {len(cases)} cases",
        [
            {
                "case": name,
                "chosen": x["chosen"],
                "s": x["seconds"],
                "best of the others": x["best"],
                "their s": min(x["others"].values()),
                "ratio": x["ratio"],
                "measured": len(x["others"]),
                "tune took s": x["tuning_seconds"],
            }
            for name, x in cases.items()
        ],
        {"cases": cases, "within": good},
        "ratio",
    )


def _devices(where, count):
    with command_line.checking():
        if where == "logical":
            return local_devices.find(count)[0]
        processes = workers.connected(count, one_core=where == "workers")
    return [x.device for x in processes]


def _measured(args, where, count, model, share):
    make, rows = _MODELS[model], args.batch_size
    names = _devices(where, count)
    if where == "simulated":
        x = y = keras.ops.ones((rows, workloads.NUM_CLASSES))
    else:
        x, y = workloads.data(make(), rows)
    fixed = _fixed(where, len(make()) - 1, count, rows)

    def plan(options):
        if options["schedule"] == "interleaved":
            options = {**options, "num_devices": count}
        return tf_gpipe.plan(make()[1:], x.shape, optimizer="sgd", **options)

    memory = None
    if share:
        most = plan(
            fixed[f"1f1b, M={min(rows, 4 * count)}, never"]
        ).device_bytes
        memory = int(share * max(most))
    options = fixed
    if memory is not None:
        options = {
            name: each
            for name, each in fixed.items()
            if max(plan(each).device_bytes) <= 0.9 * memory
        }
    start = time.perf_counter()
    chosen = tf_gpipe.tune(
        make()[1:],
        x.shape,
        names,
        memory,
        optimizer="sgd",
        budget_seconds=args.budget_seconds,
        # TensorFlow has one distribution strategy per process.
        replicas=False,
    )
    taken = time.perf_counter() - start
    runs = {
        name: _run(make(), x, y, devices=_named(names, each), **each)
        for name, each in options.items()
    }
    runs["tune"] = _run(make(), x, y, plan=chosen)
    found = timing.interleaved(runs, args.num_repeats)
    seconds = {name: min(times) for name, times in found.items()}
    own = seconds.pop("tune", float("nan"))
    best = min(seconds, key=seconds.get)
    return {
        "chosen": plans.words(
            chosen.num_devices,
            chosen.num_replicas,
            len(chosen.stages),
            chosen.num_micro_batches,
            chosen.schedule,
            chosen.remat,
        ),
        "seconds": own,
        "others": seconds,
        "best": best,
        "ratio": own / seconds[best],
        "tuning_seconds": taken,
        "memory": memory,
        "planned": max(chosen.device_bytes),
    }


def _named(names, options):
    count = schedules.num_devices_of(options["schedule"], options["num_stages"])
    if options["schedule"] == "interleaved":
        count = len(names)
    return names[: min(count, len(names))]


def _fixed(where, num_layers, count, rows):
    """Returns the arguments of the fixed pipelines."""
    balance = "parameters" if where == "simulated" else "flops"
    one = {
        "num_stages": 1,
        "num_micro_batches": 1,
        "schedule": "1f1b",
        "remat": "never",
        "balance": balance,
    }
    found = {"one device": one}
    for schedule, each, remat in _CANDIDATES:
        two = schedule in ("interleaved", "zb_v")
        number = min(rows, each * count)
        name = f"{schedule}, M={number}, {remat}"
        num_stages = (1 + two) * count
        if num_stages <= num_layers:
            found[name] = {
                "num_stages": num_stages,
                "num_micro_batches": number,
                "schedule": schedule,
                "remat": remat,
                "balance": balance,
            }
    return found


def _run(layers, x, y, **options):
    model = tf_gpipe.PipelinedSequential(layers, **options)
    if layers[1].__class__ is workloads.Wait:
        model.compile("sgd", "mse")
    else:
        workloads.compiled(model)
    timing.step_seconds(model, x, y, 1)
    return lambda: timing.step_seconds(model, x, y, 2)
