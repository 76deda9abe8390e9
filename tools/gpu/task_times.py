"""The Timeline callback against TensorFlow's profiler.

The profiler sees kernels (of a CPU: operations). On a CPU their names tell the
stage, but for stages that are alike, which share their operations. On a GPU
each device has streams of its own, and the names of tasks are among those of
what a stream does.
"""

import pathlib
import re
import tempfile

import keras
import tensorflow as tf

import tf_gpipe
from tools.benchmark import timing
from tools.benchmark import workloads
from tools.gpu import devices
from tools.gpu.checking import Failed

_NUM_STAGES = 2
_NUM_STEPS = 4
# Of the time of a stage's kernels within its tasks.
_COVERED = 0.9
# What tells a stage in the names of a CPU's operations, and of a GPU's tasks.
_STAGE = re.compile(r"\bstage_(\d+)/")
_TASK = re.compile(r"/[FBRW](\d+)\.\d+/")


def task_times(cpu):
    """How much of the kernels' time the tasks cover; copies beside kernels."""
    names = devices.start(cpu, count=_NUM_STAGES)
    layers = workloads.transformer(*((2, 64, 16) if cpu else (8, 1024, 256)))
    x, y = workloads.data(layers, 16 if cpu else 64)
    model = tf_gpipe.PipelinedSequential(
        layers, num_stages=_NUM_STAGES, num_micro_batches=4, devices=names
    )
    workloads.compiled(model)
    recorder = tf_gpipe.callbacks.Timeline()
    with tempfile.TemporaryDirectory() as folder:
        timing.fit(model, x, y, _NUM_STEPS, [recorder, _Profiler(folder)])
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        kernels, copies = _read(path, cpu)
    if not set(kernels) == set(range(_NUM_STAGES)):
        raise Failed(f"kernels name the stages {sorted(kernels)}")
    # The last step, whose spans begin at 0, by the clock of the profiler.
    zero, spans, _ = recorder._recorded[-1]
    value = {"stages": []}
    for stage in range(_NUM_STAGES):
        tasks = [
            (start + zero, end + zero)
            for _, task, start, end in spans
            if task.stage == stage
        ]
        busy = _length(kernels[stage])
        value["stages"].append(
            {
                "tasks": _length(tasks),
                "kernels": busy,
                "covered": _overlap(kernels[stage], tasks) / busy,
                "last_kernel_after_last_task": max(
                    end for _, end in kernels[stage]
                )
                - max(end for _, end in tasks),
            }
        )
    everything = [span for spans in kernels.values() for span in spans]
    value["copies"] = {
        "seconds": _length(copies),
        "beside_kernels": _overlap(copies, everything),
    }
    if min(x["covered"] for x in value["stages"]) < _COVERED:
        raise Failed("tasks are not when their kernels are", **value)
    return value


class _Profiler(keras.callbacks.Callback):
    """Profiles the last step. It comes after what waits for the step's end."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def on_train_batch_begin(self, batch, logs=None):
        if batch == _NUM_STEPS - 1:
            tf.profiler.experimental.start(self._folder)

    def on_train_batch_end(self, batch, logs=None):
        if batch == _NUM_STEPS - 1:
            tf.test.experimental.sync_devices()
            tf.profiler.experimental.stop()


def _read(path, cpu):
    """Returns when kernels ran, by stage, and when copies did, in seconds.

    Args:
        path: Path of the profile.
        cpu: Boolean, whether operations are read in place of a GPU's kernels.
    """
    # Protocol buffers without a public name; no one else needs them.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    (start,) = (
        stat.uint64_value
        for plane in space.planes
        for stat in plane.stats
        if plane.stat_metadata[stat.metadata_id].name == "profile_start_time"
    )
    kernels, copies = {}, []
    for plane in space.planes:
        if ("/host:CPU" if cpu else "/device:GPU") not in plane.name:
            continue
        for line in plane.lines:
            texts = [_text(plane, event) for event in line.events]
            found = [(_STAGE if cpu else _TASK).search(x) for x in texts]
            stages = [int(x[1]) if x else None for x in found]
            named = {stage for stage in stages if stage is not None}
            for event, text, stage in zip(
                line.events, texts, stages, strict=True
            ):
                begin = (start + line.timestamp_ns) / 1e9
                begin += event.offset_ps / 1e12
                times = begin, begin + event.duration_ps / 1e12
                if not cpu and len(named) == 1:
                    # All of a stream is of one device.
                    (stage,) = named
                if "memcpy" in text.lower():
                    copies.append(times)
                elif stage is not None:
                    kernels.setdefault(stage, []).append(times)
    return kernels, copies


def _text(plane, event):
    """Returns all strings of an event of a profile."""
    metadata = plane.event_metadata[event.metadata_id]
    return " ".join(
        [
            metadata.name,
            *(
                stat.str_value or plane.stat_metadata[stat.ref_value].name
                for stat in (*metadata.stats, *event.stats)
                if stat.WhichOneof("value") in ("str_value", "ref_value")
            ),
        ]
    )


def _length(spans):
    """Returns how long at least one of the spans lasts."""
    return sum(end - start for start, end in _union(spans))


def _overlap(ones, others):
    """Returns how long both one of these and one of those last."""
    return _length(
        (max(a, c), min(b, d))
        for a, b in _union(ones)
        for c, d in _union(others)
        if max(a, c) < min(b, d)
    )


def _union(spans):
    """Returns spans without overlaps, in order, of the same times."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined
