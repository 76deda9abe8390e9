"""`generate`: the time per generated token, as a pipeline and without."""

import argparse
import statistics
import tempfile
import time

import keras
import numpy as np

import tf_gpipe
from tf_gpipe.commands import devices
from tf_gpipe.commands import workers
from tools import command_line
from tools import worker_usage
from tools.benchmark import timing
from tools.benchmark.report import Report

_VOCABULARY = 1000


def add_arguments(parser):
    parser.add_argument(
        "--num_stages", type=command_line.positives, default="2,4"
    )
    parser.add_argument(
        "--on",
        choices=("here", "workers"),
        default="here",
        help="devices of this process, or a worker process a stage",
    )
    parser.add_argument("--batch_size", type=command_line.positive, default=4)
    parser.add_argument("--num_layers", type=command_line.positive, default=8)
    parser.add_argument("--hidden_dim", type=command_line.positive, default=256)
    parser.add_argument(
        "--length",
        type=command_line.positive,
        default=64,
        help="tokens of a text, the first of which is given",
    )
    parser.add_argument("--num_repeats", type=command_line.positive, default=5)


def main(args):
    """`generate` of KerasHub's GPT-2: plain, as pipelines, and loaded again.

    "loaded again" is a plain task on one device, loaded from the preset that
    the pipeline with the most stages has saved.
    """
    if args.length < 2:
        raise argparse.ArgumentError(
            None, "--length=1 leaves no token to generate"
        )
    processes = []
    if args.on == "workers":
        processes = workers.connected(max(args.num_stages))
        places = [worker.device for worker in processes]
    else:
        devices.ensure(max(args.num_stages))
        places = devices.first(max(args.num_stages))
    rows = _measured(args, places, processes)
    return Report(
        f"generate on {args.on}: GPT-2 of {args.num_layers} layers, width "
        f"{args.hidden_dim}; {args.batch_size} texts of {args.length} tokens",
        rows,
        {"rows": rows},
        "ms a token",
    )


def _measured(args, places, processes):
    """Returns the rows of the report.

    Args:
        args: The parsed arguments of the command.
        places: List of the stages' devices.
        processes: List of the workers.
    """
    rng = np.random.default_rng(0)
    shape = args.batch_size, args.length
    prompt = {
        "token_ids": rng.integers(1, _VOCABULARY, shape),
        "padding_mask": np.broadcast_to(np.arange(args.length) < 1, shape),
    }
    tasks = {"plain": _task(args)}
    for k in args.num_stages:
        task = _task(args)
        with command_line.checking():
            tasks[f"K={k}"] = tf_gpipe.PipelinedModel.from_model(
                task, num_stages=k, devices=places[:k]
            )
    with tempfile.TemporaryDirectory() as folder:
        tasks[f"K={max(args.num_stages)}"].save_to_preset(folder)
        tasks["loaded again"] = type(tasks["plain"]).from_preset(folder)
    first = {}
    for name, task in tasks.items():
        task.compile(sampler="greedy")
        first[name] = _measured_once(task, prompt, processes)
    found = timing.interleaved(
        {
            name: lambda task=task: _measured_once(task, prompt, processes)
            for name, task in tasks.items()
        },
        args.num_repeats,
    )
    num_tokens = args.length - 1
    rows = []
    for name, (seconds, _, said) in first.items():
        wall, cpu, _ = zip(*found[name], strict=True)
        plain = list(zip(*found["plain"], strict=True))
        rows.append(
            {
                "task": name,
                "ms a token": 1000 * statistics.median(wall) / num_tokens,
                "of plain": timing.median_ratio(wall, plain[0]),
                "CPU of plain": timing.median_ratio(cpu, plain[1]),
                "first call s": seconds,
                "same tokens": np.array_equal(said, first["plain"][-1]),
            }
        )
    return rows


def _task(args):
    """Returns a new task, with the same weights every time."""
    # Imported here, so that other benchmarks do not need KerasHub.
    from keras_hub import models

    keras.utils.set_random_seed(0)
    backbone = models.GPT2Backbone(
        vocabulary_size=_VOCABULARY,
        num_layers=args.num_layers,
        num_heads=4,
        hidden_dim=args.hidden_dim,
        intermediate_dim=4 * args.hidden_dim,
        max_sequence_length=args.length,
        dropout=0.0,
    )
    return models.GPT2CausalLM(backbone, preprocessor=None)


def _measured_once(task, prompt, processes):
    """Returns a call's wall and CPU seconds, in all processes, and tokens."""

    def cpu():
        of_workers = sum(map(worker_usage.cpu_seconds, processes))
        return of_workers + time.process_time()

    start, start_cpu = time.perf_counter(), cpu()
    said = task.generate(prompt, stop_token_ids=None)["token_ids"]
    return time.perf_counter() - start, cpu() - start_cpu, said
