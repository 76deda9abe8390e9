"""Adds the tasks of recorded steps to a profile of TensorFlow's profiler."""

import pathlib
from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

from tf_gpipe import checks
from tf_gpipe import upstream
from tf_gpipe.schedule import timeline
from tf_gpipe.schedule.simulate import Span
from tf_gpipe.whole_files import replacing

# The plane of the host: trace viewers show each of its lines.
_HOST = "/host:CPU"
# The plane that has the start and the end of the profile.
_ABOUT = "Task Environment"
# How the names of the lines begin that are added.
_OURS = "pipeline "


class Recorded(NamedTuple):
    """The times of the tasks of one step.

    Attributes:
        start: Float, when the step started, in seconds since 1970.
        spans: List of the `Span`s of its tasks, in seconds after `start`.
        devices: List of the names of its devices.
    """

    start: float
    spans: list[Span]
    devices: list[str]


def name_tasks(log_dir: str, steps: Iterable[Recorded]) -> int:
    """Adds the tasks of steps to the newest profile in a directory.

    Returns the number of tasks added. See `Timeline.name_tasks`.
    """
    found = sorted(
        checks.directory("log_dir", log_dir).rglob("*.xplane.pb"),
        key=lambda x: x.stat().st_mtime_ns,
    )
    if not found:
        raise ValueError(
            "There is no profile: no file *.xplane.pb. Profile some steps with "
            "keras.callbacks.TensorBoard(profile_batch=...), and wait until it "
            f"has ended. Received: log_dir={str(log_dir)!r}"
        )
    space = upstream.read_profile(found[-1].read_bytes())
    host, about = (_plane(space, name, found[-1]) for name in (_HOST, _ABOUT))
    # In nanoseconds since 1970. Times of lines are relative to the start.
    limits = {
        about.stat_metadata[x.metadata_id].name: x.uint64_value
        for x in about.stats
    }
    first, last = limits["profile_start_time"], limits["profile_stop_time"]
    inside = [x for x in steps if first <= x.start * 1e9 <= last]
    if not inside:
        raise ValueError(
            "None of the last recorded steps was profiled. Let the Timeline "
            "callback record the steps of `profile_batch`: without `steps` it "
            "records all but the first one."
        )
    # Those that an earlier call has added.
    for i in reversed(range(len(host.lines))):
        if host.lines[i].name.startswith(_OURS):
            del host.lines[i]
    kinds: dict[str, int] = {}
    unused = 1 + max(host.event_metadata, default=0)
    for device, name in enumerate(timeline.short_names(inside[-1].devices)):
        line = host.lines.add(
            id=1 + max((x.id for x in host.lines), default=0),
            name=f"{_OURS}{name}",
            timestamp_ns=0,
        )
        for step in inside:
            begin = step.start * 1e9 - first
            for span in (x for x in step.spans if x.device == device):
                kind = kinds.setdefault(str(span.task), unused + len(kinds))
                line.events.add(
                    metadata_id=kind,
                    offset_ps=int((begin + span.start * 1e9) * 1000),
                    duration_ps=int((span.end - span.start) * 1e12),
                )
    for name, kind in kinds.items():
        host.event_metadata[kind].id = kind
        host.event_metadata[kind].name = name
    with replacing(found[-1]) as new:
        new.write_bytes(space.SerializeToString())
    # What XProf has made of the profile when it was looked at before.
    for cached in found[-1].parent.glob("*.SSTABLE"):
        cached.unlink(missing_ok=True)
    return sum(len(x.spans) for x in inside)


def _plane(space: Any, name: str, path: pathlib.Path) -> Any:
    """Returns the plane of this name in a profile."""
    planes = [x for x in space.planes if x.name == name]
    if len(planes) != 1:
        raise ValueError(
            f"The newest profile has {len(planes)} planes '{name}' in place of "
            f"one, as the profiler of TensorFlow writes. Received: {path}"
        )
    return planes[0]
