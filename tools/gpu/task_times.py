"""The Timeline callback against TensorFlow's profiler.

The profiler records kernels (on a CPU: operations). On a CPU the name of an
operation contains its stage, unless equal stages share operations. On a GPU
each device has its own streams, in which some names contain a task.
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
# The least share of a stage's kernel time that must be within its tasks.
_COVERED = 0.9
# The stage in the names of a CPU's operations, and in those of tasks on a GPU.
_STAGE = re.compile(r"\bstage_(\d+)/")
_TASK = re.compile(r"/[FBRW](\d+)\.\d+/")


def task_times(cpu):
    """Measures how much of the time of kernels is within their tasks."""
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
    # The last step starts at `zero` by the profiler's clock; spans start at 0.
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
    """Profiles the last step. Comes after a callback that waits for its end."""

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
    """Returns the times of kernels, by stage, and of copies, in seconds.

    Args:
        path: Path of the profile.
        cpu: Boolean, whether to read operations instead of a GPU's kernels.
    """
    # These protocol buffers have no public name.
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
                    # A stream belongs to one device, which has one stage.
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
    """Returns the time that at least one of the spans covers."""
    return sum(end - start for start, end in _union(spans))


def _overlap(ones, others):
    """Returns the time that spans of both lists cover."""
    return _length(
        (max(a, c), min(b, d))
        for a, b in _union(ones)
        for c, d in _union(others)
        if max(a, c) < min(b, d)
    )


def _union(spans):
    """Returns sorted spans without overlaps that cover the same times."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined
