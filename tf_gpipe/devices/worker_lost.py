"""Which worker is gone: told by every call of a model that needs it."""

import collections
import functools
import os
import re
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import errors
from tf_gpipe.devices import heartbeat
from tf_gpipe.devices import watcher

JOB = "worker"
# Time for a worker to answer at all, once it has been there.
PROBE_SECONDS = 2.0
# Time for the sockets of a process that ends to close, and for the watcher to
# hear of a loss.
CLOSING_SECONDS = 2.0
_TARGET = re.compile(rf"remote target /job:{JOB}/replica:0/task:(\d+)")
# What a worker that was started again says to a client of the old one.
_STRANGER = "Unable to find a context_id"
_BROKEN = re.compile("GRPC error|failed to connect|Socket closed")
# Methods whose first argument is a file with all weights.
_WITH_CHECKPOINTS = ("save", "save_weights", "load_weights")


class WorkerLostError(tf.errors.UnavailableError):
    """A worker of a pipeline is gone, and the message says which."""


def addresses() -> list[str]:
    """Returns the addresses of the workers that we are connected to."""
    return upstream.connected_to().get(JOB, [])


def places_of(addresses: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Returns the host and the port of each of some addresses."""
    parts = {x: x.rpartition(":") for x in addresses}
    return {x: (host, int(port)) for x, (host, _, port) in parts.items()}


def states(
    places: Mapping[str, tuple[str, int]], broken: bool = False
) -> dict[str, str]:
    """Returns the states of the workers that do not answer, by their names.

    If a connection has `broken`, they are asked for some time: the sockets of
    a process that is killed close one after another, so that for a moment it
    may still answer.

    Args:
        places: Dict from the names of workers to their hosts and ports.
        broken: Boolean.
    """
    end = time.monotonic() + (CLOSING_SECONDS if broken else 0.0)
    while True:
        found = {
            name: state
            for name, place in places.items()
            if (state := heartbeat.ask(*place, PROBE_SECONDS)) is not None
        }
        if found or time.monotonic() >= end:
            return found
        time.sleep(0.1)


def naming_failures(method: Callable) -> Callable:
    """Returns a method of a pipelined model that names what fails.

    TensorFlow tells of a worker that has been killed or started again by one
    of several errors, which name a connection or an operation. They become
    `tf.errors.UnavailableError`s, if the worker of a stage no longer answers
    or has forgotten the model. Once a worker is lost, nothing is asked of it.
    """
    name = method.__name__

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        _refuse(self)
        path = ""
        if name in _WITH_CHECKPOINTS:
            path = str(args[0] if args else kwargs.get("filepath"))
            newest = getattr(self, "_newest_checkpoint", None)
            if path == newest and name != "load_weights":
                # What is written over it may be cut short.
                vars(self)["_newest_checkpoint"] = None
        try:
            with watcher.needing(addresses() if _stages(self) else ()):
                result = method(self, *args, **kwargs)
            if path:
                vars(self)["_newest_checkpoint"] = path
            return result
        except WorkerLostError:
            raise
        except Exception as error:
            message = _diagnosis(self, error)
            if message is not None:
                raise WorkerLostError(None, None, message) from error
            pipeline = getattr(self, "_pipeline", None)
            if pipeline is not None and isinstance(error, tf.errors.OpError):
                errors.add_place(error, pipeline)
            raise

    return wrapper


def naming_failures_of(*names: str) -> Callable[[type], type]:
    """Returns a decorator of a class: `naming_failures` of some methods.

    Those that the class does not have are those of the next one.
    """

    def decorate(cls: type) -> type:
        for name in names:
            method = vars(cls).get(name) or _inherited(cls, name)
            setattr(cls, name, naming_failures(method))
        return cls

    return decorate


def _inherited(cls: Any, name: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


def note_devices(model: Any, devices: list[list[str]]) -> None:
    """Notes the devices of each stage, before there are stages."""
    vars(model)["_stage_devices"] = devices


def note_checkpoint(model: Any, path: str | os.PathLike) -> None:
    """Notes the newest checkpoint of a model, which errors name."""
    vars(model)["_newest_checkpoint"] = os.fspath(path)


def _refuse(model: Any) -> None:
    """Raises an error if a worker is known to be lost.

    Also if it is another model's: TensorFlow goes on with none of them.
    """
    watch = watcher.current
    if watch is not None and watch.lost and _stages(model):
        raise WorkerLostError(None, None, _message(model, watch.lost))


def _stages(model: Any) -> dict[str, list[str]]:
    """Returns the numbers of a model's stages, by their workers' addresses."""
    if watcher.current is None:
        return {}
    connected = addresses()
    found: dict[str, list[str]] = collections.defaultdict(list)
    for index, names in enumerate(getattr(model, "_stage_devices", ())):
        for device in map(tf.DeviceSpec.from_string, names):
            if device.job == JOB:
                found[connected[device.task]].append(str(index))
    return dict(found)


def _diagnosis(model: Any, error: Exception) -> str | None:
    """Returns which worker an error comes from, or `None` if from none."""
    stages = _stages(model)
    watch = watcher.current
    if not stages or watch is None:
        return None
    text = str(error)
    again = _STRANGER in text
    # Keras makes errors of its own of those that a file's weights meet. What an
    # operation on a worker raises says "GRPC error", too.
    broken = not again and (
        isinstance(error, tf.errors.UnavailableError)
        if isinstance(error, tf.errors.OpError)
        else _BROKEN.search(text) is not None
    )
    if broken:
        watch.wait(CLOSING_SECONDS)
    gone = dict(watch.lost)
    if not gone:
        # One that is silent may be slow: the watcher knows better.
        asked = states(places_of(addresses()), broken)
        gone = {
            address: heartbeat.DEAD
            for address, state in asked.items()
            if state != heartbeat.SILENT
        }
    if not gone and (again or broken):
        targets = {addresses()[int(task)] for task in _TARGET.findall(text)}
        gone = dict.fromkeys(targets, heartbeat.OTHER)
    return _message(model, gone) if gone or again else None


def _message(model: Any, gone: Mapping[str, str]) -> str:
    stages = _stages(model)
    watch = watcher.current
    seconds = watch.seconds if watch is not None else None
    what = {
        heartbeat.DEAD: "no longer answers",
        heartbeat.SILENT: "has not answered for "
        + (f"{seconds:.3g} seconds" if seconds else "some time"),
        heartbeat.OTHER: "has been started again, or its connection has "
        "broken, and it no longer has the stage",
    }
    lines = [
        (
            f"Stage {', '.join(stages[address])} has failed: its"
            if address in stages
            else "The"
        )
        + f" worker at {address} {what[why]}."
        for address, why in gone.items()
    ] or ["A worker has been started again and no longer has its stage."]
    newest = getattr(model, "_newest_checkpoint", None)
    where = f", {newest}" if newest and os.path.exists(newest) else ""
    return "\n".join(
        [
            *lines,
            "The weights of its stages are lost. Start it again, with `python "
            "-m tf_gpipe worker --port=PORT`, then this program, and resume "
            f"from the newest checkpoint{where}.",
        ]
    )
