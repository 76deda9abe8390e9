"""Errors that name the lost worker, raised by every call that needs it."""

import collections
import contextlib
import functools
import os
import re
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.devices import errors
from tf_gpipe.devices import heartbeat
from tf_gpipe.devices import watcher

JOB = "worker"
# Time limit for a worker to answer one question.
PROBE_SECONDS = 2.0
# Time in which the sockets of an ending process close, and in which the
# watcher hears of a loss.
CLOSING_SECONDS = 2.0
_TARGET = re.compile(rf"remote target /job:{JOB}/replica:0/task:(\d+)")
# The error of a restarted worker, which no longer knows this client.
_STRANGER = "Unable to find a context_id"
_BROKEN = re.compile("GRPC error|failed to connect|Socket closed")
# Methods whose first argument is a file with all weights.
_WITH_CHECKPOINTS = ("save", "save_weights", "load_weights")


class WorkerLostError(tf.errors.UnavailableError):
    """A worker of a pipeline is gone, and the message says which."""


def addresses() -> list[str]:
    """Returns the addresses of the workers this process is connected to."""
    return upstream.connected_to().get(JOB, [])


def places_of(addresses: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Returns a dict from addresses `"host:port"` to `(host, port)`."""
    parts = {x: x.rpartition(":") for x in addresses}
    return {x: (host, int(port)) for x, (host, _, port) in parts.items()}


def states(
    places: Mapping[str, tuple[str, int]], broken: bool = False
) -> dict[str, str]:
    """Returns the states of workers that do not answer, by their names.

    Args:
        places: Dict from the names of workers to `(host, port)`.
        broken: Boolean, whether a connection has broken. If so, workers are
            asked for `CLOSING_SECONDS`: the sockets of a killed process close
            one after another, so that at first it may still answer.

    Returns:
        Dict from the names of workers to a state of `heartbeat.ask`.
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
    """Wraps a method of a pipelined model: its errors name the lost worker.

    When a worker has been killed or restarted, TensorFlow raises one of several
    errors, which name a connection or an operation. They become
    `WorkerLostError`s, if the worker of a stage no longer answers or has lost
    the model. Once a worker is known to be lost, the method is not called.
    """
    name = method.__name__

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        if _stages(self):
            _refuse(self)
        path = ""
        if name in _WITH_CHECKPOINTS:
            path = str(args[0] if args else kwargs.get("filepath"))
            newest = getattr(self, "_newest_checkpoint", None)
            if path == newest and name != "load_weights":
                # It is being overwritten: if that fails, it is not complete.
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
            if _stages(self):
                _raise_if_lost(self, error)
            pipeline = getattr(self, "_pipeline", None)
            if pipeline is not None and isinstance(error, tf.errors.OpError):
                errors.add_place(error, pipeline)
            raise

    return wrapper


@contextlib.contextmanager
def using(devices: Iterable[str]) -> Iterator[None]:
    """A scope that uses devices, but no model: errors name a lost worker."""
    jobs = {tf.DeviceSpec.from_string(x).job for x in devices}
    if JOB not in jobs:
        yield
        return
    _refuse(None)
    try:
        with watcher.needing(addresses()):
            yield
    except WorkerLostError:
        raise
    except Exception as error:
        _raise_if_lost(None, error)
        raise


def naming_failures_of(*names: str) -> Callable[[type], type]:
    """Returns a class decorator that wraps methods by `naming_failures`.

    For a name that the class does not define, a method is added that calls the
    inherited one.
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
    of_keras = getattr(keras.Model, name, None)
    if of_keras is None:
        return method
    # With its docstring and signature.
    return functools.update_wrapper(method, of_keras)


def note_devices(model: Any, devices: list[list[str]]) -> None:
    """Records the devices of each stage, for errors while stages are formed."""
    vars(model)["_stage_devices"] = devices


def note_checkpoint(model: Any, path: str | os.PathLike) -> None:
    """Records a model's newest checkpoint, for the messages of errors."""
    vars(model)["_newest_checkpoint"] = os.fspath(path)


def _refuse(model: Any) -> None:
    """Raises an error if any worker is known to be lost.

    Even if only another model uses it: TensorFlow cannot go on without it.
    """
    watch = watcher.current
    if watch is not None and watch.lost:
        raise WorkerLostError(None, None, _message(model, watch.lost))


def _stages(model: Any) -> dict[str, list[str]]:
    """Returns a dict from workers' addresses to the numbers of their stages."""
    if watcher.current is None:
        return {}
    connected = addresses()
    found: dict[str, list[str]] = collections.defaultdict(list)
    for index, names in enumerate(getattr(model, "_stage_devices", ())):
        for device in map(tf.DeviceSpec.from_string, names):
            if device.job == JOB:
                found[connected[device.task]].append(str(index))
    return dict(found)


def _raise_if_lost(model: Any, error: Exception) -> None:
    """Raises a `WorkerLostError` for an error that a lost worker is behind."""
    watch = watcher.current
    if watch is None:
        return
    text = str(error)
    again = _STRANGER in text
    # An `OpError` counts by its type, since errors of an operation on a worker
    # say "GRPC error", too. Keras turns errors while it loads weights from a
    # file into its own, which count by their text.
    broken = not again and (
        isinstance(error, tf.errors.UnavailableError)
        if isinstance(error, tf.errors.OpError)
        else _BROKEN.search(text) is not None
    )
    if broken:
        watch.wait(CLOSING_SECONDS)
    gone = dict(watch.lost)
    silent = set()
    if not gone:
        # Not silent ones, which may only be slow: that is the watcher's task.
        asked = states(places_of(addresses()), broken)
        gone = {
            address: heartbeat.DEAD
            for address, state in asked.items()
            if state != heartbeat.SILENT
        }
        silent = asked.keys() - gone.keys()
    if not gone and (again or broken):
        targets = {addresses()[int(task)] for task in _TARGET.findall(text)}
        gone = {
            address: heartbeat.SILENT if address in silent else heartbeat.OTHER
            for address in targets or (silent if broken else ())
        }
    if gone or again:
        message = _message(model, gone)
        raise WorkerLostError(None, None, message) from error


def _message(model: Any, gone: Mapping[str, str]) -> str:
    """Returns the message about workers for a model, or without one."""
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
    repair = (
        "Start it again, with `python -m tf_gpipe worker --port=PORT`, then "
        "this program"
    )
    if model is not None:
        repair = (
            f"The weights of its stages are lost. {repair}, and resume from "
            f"the newest checkpoint{where}"
        )
    return "\n".join([*lines, f"{repair}."])
