"""Pipelines whose steps are timed, their devices, and their ideal speed-up."""

import math
import time

import keras

import tf_gpipe
from tf_gpipe.commands import workers
from tf_gpipe.schedule.simulate import simulate
from tools import command_line
from tools import local_devices
from tools import worker_usage
from tools.benchmark import timing


def devices(where, count, for_replicas=False):
    """Finds devices for pipelines.

    Args:
        where: `"workers"`, `"local"` or `"simulated"`.
        count: Integer, number of devices.
        for_replicas: Boolean, whether a `MirroredStrategy` shall have them,
            which takes devices of this process alone.

    Returns:
        List of device names, list of `workers.Worker`s (empty for `"local"`),
        and a string that describes the devices.
    """
    if where == "local":
        with command_line.checking():
            names, note = local_devices.find(count)
        return names, [], note
    if for_replicas:
        names = tf_gpipe.split_cpu(count)
        return names, [], "simulated accelerators in one process"
    with command_line.checking():
        processes = workers.connected(count, one_core=where == "workers")
    note = "worker processes of one core"
    if where == "simulated":
        note = "simulated accelerators"
    return [process.device for process in processes], processes, note


class Run:
    """A pipeline whose steps are timed.

    Args:
        model: A compiled `PipelinedSequential`.
        x: Inputs of a batch.
        y: Labels of a batch.
        processes: List of the workers.
        num_steps: Integer, steps in each measurement; more, if needed for
            whole executions of `steps_per_execution`.

    Attributes:
        cores: List of floats, the cores that the workers used on average in
            each measurement.
        client: List of floats, the cores that this process used.
    """

    def __init__(self, model, x, y, processes, num_steps):
        self.model = model
        self.x, self.y = x, y
        self.processes = processes
        each = model.steps_per_execution
        self.num_steps = each * math.ceil(num_steps / each)
        self.cores, self.client = [], []

    def __call__(self):
        """Returns the mean seconds of a step."""
        total, workers_cpu, client_cpu = timing.used(
            self.model, self.x, self.y, self.num_steps, self._read
        )
        self.cores.append(workers_cpu / total)
        self.client.append(client_cpu / total)
        return total / self.num_steps

    def _read(self):
        cpu = sum(map(worker_usage.cpu_seconds, self.processes))
        return time.perf_counter(), cpu, time.process_time()


def simulated_run(layers, batch_size, processes, **options):
    """Returns a `Run` of simulated layers, each a stage of its own.

    Args:
        layers: List of `workloads.Wait` layers.
        batch_size: Integer.
        processes: List of workers, at least one a layer.
        **options: Arguments of `tf_gpipe.PipelinedSequential`.
    """
    model = tf_gpipe.PipelinedSequential(
        [keras.Input((1,)), *layers],
        balance=[1] * len(layers),
        devices=[process.device for process in processes],
        **options,
    )
    model.compile("sgd", "mse")
    x = keras.ops.ones((batch_size, 1))
    return Run(model, x, x, processes, num_steps=1)


def timed(runs, num_repeats):
    """Times `Run`s in turn, after a first round in which they trace.

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


def ideal_speedup(num_devices, num_micro_batches, remat):
    """Returns the GPipe paper's bound, relative to K=1, M=1 without remat."""
    bubble = num_micro_batches + num_devices - 1
    ideal = num_devices * num_micro_batches / bubble
    # A backward pass costs two forward passes, and recomputation one.
    return ideal * 3 / 4 if remat == "always" else ideal


def simulated_speedup(model, equal_layers=False):
    """Returns the simulated speed-up of a pipeline.

    Args:
        model: A compiled pipeline.
        equal_layers: Whether all layers take the same time. Otherwise all
            stages do.
    """
    pipeline = model._pipeline
    schedule = pipeline.schedule
    forward, before, within = [], [], []
    for stage in pipeline.stages:
        size = len(stage.nodes)
        parts = pipeline.recomputed(stage.index)
        forward.append(size if equal_layers else 1.0)
        again = sum(map(len, parts)) * forward[-1] / size
        before.append(again if len(parts) == 1 else 0.0)
        within.append(again if len(parts) > 1 else 0.0)
    found = simulate(
        schedule,
        forward=forward,
        backward=[2 * a + b for a, b in zip(forward, within, strict=True)],
        recompute=before,
        remat=pipeline.remat,
    )
    return 3 * sum(forward) * schedule.num_micro_batches / found.makespan
