"""`baselines`: pipelines beside model and data parallelism on K workers.

Run as a module, this file is one process of the data-parallel baseline.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing.connection
import os
import socket
import statistics
import subprocess
import sys
import time

import keras
import tensorflow as tf

import tf_gpipe
from tf_gpipe.commands import workers
from tf_gpipe.devices import listening
from tf_gpipe.schedule.schedules import NAMES
from tf_gpipe.schedule.schedules import TWO_STAGES_A_DEVICE
from tf_gpipe.schedule.tasks import REMAT_MODES
from tools import child_process
from tools import command_line
from tools.benchmark import timed_runs
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report

_WORKLOADS = {**workloads.WORKLOADS, "resnet50": workloads.resnet50}
_HOST = "127.0.0.1"


def add_arguments(parser):
    parser.add_argument("--workload", choices=_WORKLOADS, default="transformer")
    parser.add_argument(
        "--num_stages",
        type=command_line.positive,
        default=2,
        help="K, also the number of workers",
    )
    parser.add_argument(
        "--num_micro_batches",
        type=command_line.positives,
        default="1,2,4,8,16",
        help="the M of each pipeline",
    )
    parser.add_argument("--batch_size", type=command_line.positive, default=64)
    parser.add_argument("--schedule", choices=NAMES, default="1f1b")
    parser.add_argument("--remat", choices=REMAT_MODES, default="never")
    parser.add_argument("--num_steps", type=command_line.positive, default=3)
    parser.add_argument("--num_repeats", type=command_line.positive, default=5)


def main(args):
    """One device, naive model parallelism, data parallelism and pipelines.

    All run on processes with one core each. Naive model parallelism is a
    pipeline with M=1 and no remat, in which one stage works at a time. Data
    parallelism does not use tf_gpipe: K processes, each with the whole model
    and a part of the batch, run Keras's train_step under
    MultiWorkerMirroredStrategy. The bound is the speed-up without any
    communication; the fraction is the measured speed-up over the bound.
    """
    num_stages = args.num_stages
    _check(args)
    make = _WORKLOADS[args.workload]
    x, y = workloads.data(make(), args.batch_size)
    with command_line.checking():
        processes = workers.connected(num_stages, one_core=True)
    with _data_parallel(args) as data_parallel:

        def run(num_stages, num_micro_batches, remat="never", schedule="1f1b"):
            with command_line.checking():
                model = tf_gpipe.PipelinedSequential(
                    make(),
                    num_stages=num_stages,
                    num_micro_batches=num_micro_batches,
                    balance="flops",
                    schedule=schedule,
                    remat=remat,
                    devices=[process.device for process in processes],
                )
            workloads.compiled(model)
            return timed_runs.Run(model, x, y, processes, args.num_steps)

        pipelines = {
            f"pipeline, M={m}": run(
                num_stages * (2 if args.schedule in TWO_STAGES_A_DEVICE else 1),
                m,
                args.remat,
                args.schedule,
            )
            for m in args.num_micro_batches
        }
        runs = {
            "one device": run(1, 1),
            "naive model parallel": run(num_stages, 1),
            "data parallel": data_parallel,
            **pipelines,
        }
        seconds = timed_runs.timed(runs, args.num_repeats)
    bounds = {
        "one device": 1.0,
        "naive model parallel": 1.0,
        "data parallel": float(num_stages),
        **{
            name: timed_runs.simulated_speedup(each.model)
            for name, each in pipelines.items()
        },
    }
    found = {}
    for name, each in runs.items():
        speedup = timing.median_ratio(seconds["one device"], seconds[name])
        found[name] = {
            "samples_per_second": args.batch_size
            / statistics.median(seconds[name]),
            "speedup": speedup,
            "bound": bounds[name],
            "fraction": speedup / bounds[name],
            "cores_used": statistics.median(each.cores),
            "client_cores_used": statistics.median(each.client),
        }
    return Report(
        f"{args.workload}: K={num_stages}, batch of {args.batch_size}, "
        f"pipelines {args.schedule}, remat {args.remat}; one core a worker",
        [
            {
                "": name,
                "samples/s": row["samples_per_second"],
                "speed-up": row["speedup"],
                "bound": row["bound"],
                "fraction": row["fraction"],
                "cores used": row["cores_used"],
            }
            for name, row in found.items()
        ],
        {"rows": found},
        "samples/s",
    )


def _check(args):
    if args.num_stages < 2:
        raise argparse.ArgumentError(None, "--num_stages must be at least 2")
    for parts in (args.num_stages, *args.num_micro_batches):
        # The bounds assume equal parts.
        if args.batch_size % parts:
            raise argparse.ArgumentError(
                None,
                f"--batch_size={args.batch_size} cannot be cut into {parts} "
                "equal parts, for --num_stages and --num_micro_batches",
            )


class _DataParallel:
    """The data-parallel processes, called and timed like a `timed_runs.Run`."""

    def __init__(self, processes, num_steps):
        self.processes = processes
        self.num_steps = num_steps
        self.cores, self.client = [], []

    def __call__(self):
        start = time.process_time()
        for process in self.processes:
            print(self.num_steps, file=process.stdin, flush=True)
        answers = []
        waiting = [process.stdout for process in self.processes]
        # Reads whichever answers first: if one process fails, the others may
        # wait for it forever.
        while waiting:
            for output in multiprocessing.connection.wait(waiting):
                line = output.readline()
                if not line:
                    raise RuntimeError("A data-parallel process has failed.")
                answers.append(json.loads(line))
                waiting.remove(output)
        # The slowest process counts: all wait for one another in every step.
        total = max(answer["seconds"] for answer in answers)
        self.cores.append(sum(answer["cpu"] for answer in answers) / total)
        self.client.append((time.process_time() - start) / total)
        return total / self.num_steps


@contextlib.contextmanager
def _data_parallel(args):
    """Starts the data-parallel processes, one a core, and ends them."""
    with contextlib.ExitStack() as stack:
        # All sockets are open at once, so that their ports differ.
        sockets = [
            stack.enter_context(socket.socket()) for _ in range(args.num_stages)
        ]
        for each in sockets:
            each.bind((_HOST, 0))
        addresses = [f"{_HOST}:{each.getsockname()[1]}" for each in sockets]
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    try:
        for index in range(args.num_stages):
            config = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tools.benchmark.baselines",
                        args.workload,
                        str(args.batch_size),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={
                        **os.environ,
                        "TF_CONFIG": json.dumps(config),
                        # As in the workers with one core.
                        "TF_NUM_INTEROP_THREADS": "2",
                    },
                    preexec_fn=functools.partial(_confine, cores[index]),
                )
            )
        yield _DataParallel(processes, args.num_steps)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _confine(core):
    child_process.end_with_parent()
    os.sched_setaffinity(0, {core})


def _replica(workload, batch_size):
    """Trains one replica: as many steps as each line of standard input says.

    Prints a line of JSON after each, with the wall and CPU seconds it took.
    """
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    index = resolver.task_id
    address = resolver.cluster_spec().task_address("worker", index)
    # TensorFlow's server would listen on all addresses of the host.
    listening.accept_only(_HOST, int(address.rpartition(":")[2]))
    make = _WORKLOADS[workload]
    x, y = workloads.data(make(), batch_size)
    with strategy.scope():
        model = workloads.compiled(keras.Sequential(make()))
        model.optimizer.build(model.trainable_variables)
    share = slice(index, None, strategy.num_replicas_in_sync)
    batches = iter(tf.data.Dataset.from_tensors((x[share], y[share])).repeat())

    # Not `fit`, which fails under this strategy: Keras's issue 20585.
    @tf.function
    def step(batch):
        strategy.run(model.train_step, (batch,))

    for line in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step(next(batches))
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    _replica(sys.argv[1], int(sys.argv[2]))
