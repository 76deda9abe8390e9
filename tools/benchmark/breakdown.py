"""`breakdown`: how a step's time splits into compute, bubble and so on."""

import statistics
import time

import tf_gpipe
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Execution
from tf_gpipe.schedule.tasks import REMAT_MODES
from tools import command_line
from tools.benchmark import timed_runs
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.benchmark.report import Report


def add_arguments(parser):
    parser.add_argument(
        "--on",
        choices=("workers", "local"),
        default="workers",
        help="worker processes of one core each; or GPUs of this host, or "
        "parts of its CPU",
    )
    parser.add_argument("--num_stages", type=command_line.positive, default=2)
    parser.add_argument(
        "--num_micro_batches", type=command_line.positive, default=8
    )
    parser.add_argument("--schedule", choices=schedules.NAMES, default="1f1b")
    parser.add_argument("--remat", choices=REMAT_MODES, default="always")
    parser.add_argument(
        "--workload", choices=workloads.WORKLOADS, default="transformer"
    )
    parser.add_argument("--batch_size", type=command_line.positive, default=64)
    parser.add_argument("--num_steps", type=command_line.positive, default=10)


def main(args):
    """Parts of a step's time, as in the GPipe paper's section on overhead.

    Medians over the steps, from the times that the Timeline callback records.
    Forward, recompute, backward and weights (their gradients, where a schedule
    computes these separately) are means over the devices. Imbalance is the
    work of the busiest device beyond the mean. Bubble is the time that this
    device waits in a simulation of the schedule with the mean task times of
    each stage. Transfer is the rest of its waiting time: for transfers, and
    for TensorFlow to start tasks. Update is the time before the first and
    after the last task, mostly the update of the weights.
    """
    make = workloads.WORKLOADS[args.workload]
    with command_line.checking():
        num_devices = schedules.num_devices_of(args.schedule, args.num_stages)
    devices, _, note = timed_runs.devices(args.on, num_devices)
    x, y = workloads.data(make(), args.batch_size)
    with command_line.checking():
        model = tf_gpipe.PipelinedSequential(
            make(),
            num_stages=args.num_stages,
            num_micro_batches=args.num_micro_batches,
            balance="flops",
            schedule=args.schedule,
            remat=args.remat,
            devices=devices[:num_devices],
        )
    workloads.compiled(model)
    recorder = _Recorder()
    timing.fit(model, x, y, args.num_steps + 1, [recorder])
    parts = {
        name: statistics.median(step[name] for step in recorder.parts)
        for name in recorder.parts[0]
    }
    total = statistics.median(sum(x.values()) for x in recorder.parts)
    return Report(
        f"{args.workload}: K={args.num_stages}, M={args.num_micro_batches}, "
        f"{args.schedule}, remat {args.remat}, batch of {args.batch_size}, on "
        f"{note}; a step of {total:.3f} s",
        [
            {"": name, "seconds": seconds, "share": seconds / total}
            for name, seconds in parts.items()
        ],
        {"seconds": parts, "step": total},
        "seconds",
    )


class _Recorder(tf_gpipe.callbacks.Timeline):
    """Records the parts of each step's time.

    Attributes:
        parts: List of dicts, one a step, from the name of a part to seconds.
            The parts of a step sum to its time.
    """

    def __init__(self):
        super().__init__()
        self.parts = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        # Reading the tasks' times has waited for the end of the step.
        seconds = time.perf_counter() - self._start
        if self.spans:
            self.parts.append(self._parts(seconds))

    def _parts(self, seconds):
        makespan = Execution(self.spans).makespan
        num_devices = len(self.model._pipeline.schedule.tasks)
        work = dict.fromkeys(timeline.KINDS.values(), 0.0)
        for _, task, start, end in self.spans:
            work[timeline.KINDS[task.kind]] += (end - start) / num_devices
        simulated = self.simulated()
        longest = max(simulated.busy)
        return {
            **work,
            "imbalance": longest - sum(work.values()),
            "bubble": simulated.makespan - longest,
            "transfer": makespan - simulated.makespan,
            "update": seconds - makespan,
        }
