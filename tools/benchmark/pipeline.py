"""`pipeline`: how much faster K workers are than one."""

import argparse
import functools
import statistics
import time

import keras

import tf_gpipe
from tf_gpipe import abstract
from tf_gpipe.graph import chain
from tf_gpipe.partition import costs
from tf_gpipe.simulate import simulate
from tools import workers
from tools.benchmark import timing
from tools.benchmark import workloads


def add_arguments(parser):
    parser.add_argument("--num_stages", type=int, default=2)
    parser.add_argument("--num_micro_batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--remat", default="never")
    parser.add_argument(
        "--workload",
        choices=workloads.WORKLOADS,
        help="what stages compute; transformer if not given",
    )
    parser.add_argument(
        "--workers",
        action="store_true",
        help="stages run in worker processes, as they do without this flag",
    )
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="stages wait instead of computing",
    )
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--num_steps", type=int, default=3)
    parser.add_argument("--num_repeats", type=int, default=5)


def main(args):
    """K worker processes of one core each against one such worker.

    With --simulated a worker is a simulated accelerator: its stage, one layer,
    waits instead of computing, 20 ms forward and 40 ms backward for each row,
    so that there may be more workers than cores.
    """
    what = args.workload or "transformer"
    make = workloads.WORKLOADS[what]
    if args.simulated:
        if args.workload:
            raise argparse.ArgumentError(
                None, "--workload is not for --simulated, which computes none"
            )
        what = "waiting"
        make = functools.partial(workloads.waiting, args.num_stages)
    x, y = workloads.data(make(), args.batch_size)
    num_stages, num_micro_batches = args.num_stages, args.num_micro_batches
    with workers.connected(
        num_stages, one_core=not args.simulated
    ) as processes:
        devices = [process.device for process in processes]
        models = {
            "one": tf_gpipe.PipelinedSequential(
                make(),
                num_stages=1,
                num_micro_batches=1,
                remat="never",
                devices=devices,
            ),
            "all": tf_gpipe.PipelinedSequential(
                make(),
                num_stages=num_stages,
                num_micro_batches=num_micro_batches,
                schedule=args.schedule,
                remat=args.remat,
                devices=devices,
            ),
        }
        runs = {
            name: Run(model, x, y, processes, args.num_steps)
            for name, model in models.items()
        }
        seconds = timed(runs, args.num_repeats)
    speedup = timing.median_ratio(seconds["one"], seconds["all"])
    # Of equal stages; a backward pass costs two forward passes.
    ideal = simulated_speedup(models["all"], [1.0] * num_stages)
    predicted = simulated_speedup(
        models["all"], _stage_seconds(models["all"], make()[1:], x)
    )
    rows = [
        {
            "workers": count,
            "samples/s": args.batch_size / statistics.median(seconds[name]),
            "workers' cores": statistics.median(runs[name].cores),
            "client's cores": statistics.median(runs[name].client),
            "speed-up": speed,
        }
        for name, count, speed in (
            ("one", 1, 1.0),
            ("all", num_stages, speedup),
        )
    ]
    rows[0]["ideal"], rows[1]["ideal"] = 1.0, ideal
    rows[0]["fraction"], rows[1]["fraction"] = 1.0, speedup / ideal
    one = "a simulated accelerator" if args.simulated else "one core"
    timing.report(
        f"{what}: K={num_stages}, M={num_micro_batches}, "
        f"{args.schedule}, remat {args.remat}, {one} a worker, "
        f"against K=1, M=1; predicted speed-up {predicted:.2f}",
        rows,
        {
            "speedup": speedup,
            "ideal": ideal,
            "fraction": speedup / ideal,
            "predicted": predicted,
            "samples_per_second": [row["samples/s"] for row in rows],
            "cores_used": [row["workers' cores"] for row in rows],
        },
        args.json,
    )


class Run:
    """A pipeline over worker processes, which is timed.

    Args:
        model: A `PipelinedSequential`, not yet compiled.
        x: Inputs of a batch.
        y: Labels of a batch.
        processes: List of the workers.
        num_steps: Integer, steps in each measurement.

    Attributes:
        cores: List of the cores that the workers used, one number a
            measurement.
        client: List of those that this process used.
    """

    def __init__(self, model, x, y, processes, num_steps):
        self.model = workloads.compiled(model)
        self.x, self.y = x, y
        self.processes = processes
        self.num_steps = num_steps
        self.cores, self.client = [], []

    def __call__(self):
        """Returns the seconds of a step."""
        cpu = self._cpu_seconds(), time.process_time()
        seconds = timing.step_seconds(
            self.model, self.x, self.y, self.num_steps
        )
        total = seconds * self.num_steps
        self.cores.append((self._cpu_seconds() - cpu[0]) / total)
        self.client.append((time.process_time() - cpu[1]) / total)
        return seconds

    def _cpu_seconds(self):
        return sum(process.cpu_seconds() for process in self.processes)


def timed(runs, num_repeats):
    """Times `Run`s by turns, after a first turn in which they trace.

    Args:
        runs: Dict of `Run`s.
        num_repeats: Integer.

    Returns:
        Dict of lists of `num_repeats` numbers, seconds of a step.
    """
    for run in runs.values():
        run()
        run.cores.clear()
        run.client.clear()
    return timing.interleaved(runs, num_repeats)


def _stage_seconds(model, layers, x):
    """Returns what the layers of each stage take on their own."""
    rows = len(x) // model._pipeline.schedule.num_micro_batches
    inputs = keras.KerasTensor((rows, *x.shape[1:]), "float32")
    with abstract.no_values():
        abstract.call(layers, inputs)
    abstract.forget(v for layer in layers for v in layer.variables)
    graph = chain(layers, inputs)
    seconds = iter(costs.of_nodes("time", graph, "CPU:0", "never"))
    return [sum(next(seconds) for _ in stage.nodes) for stage in model.stages]


def simulated_speedup(model, stages):
    """Returns the speed-up by the simulator, from the stages' costs."""
    schedule = model._pipeline.schedule
    # A third of it is the forward pass.
    found = simulate(
        schedule,
        forward=[t / 3 for t in stages],
        backward=[2 * t / 3 for t in stages],
        recompute=[t / 3 for t in stages],
        remat=model._pipeline.remat,
    )
    return schedule.num_micro_batches * sum(stages) / found.makespan
