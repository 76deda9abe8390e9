"""The device of each stage, and moving variables to it."""

import contextlib
import threading
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import checks
from tf_gpipe import upstream
from tf_gpipe.devices import replicas

_eager = threading.RLock()
# From the id of each TensorFlow variable that has been moved to the next one's.
_moved: dict[str, str] = {}


@contextlib.contextmanager
def eagerly_alone() -> Iterator[None]:
    """A scope that one thread at a time can be in, for eager operations.

    On all devices but the first, TensorFlow confuses the arguments of threads
    that run eager operations at the same time: `tf.zeros` may return the shape
    that another thread asked for. Traced functions are safe, and so is the
    first device, where plain models are.

    Replicas do not take the lock: they are threads that wait for one another,
    and TensorFlow runs one at a time.
    """
    if not tf.executing_eagerly() or replicas.within_one():
        yield
        return
    with _eager:
        yield


def accelerators(host: str = "") -> list[str]:
    """Returns the names of the visible accelerators, or else of the CPUs.

    Args:
        host: String that the names must contain, such as `"/task:1/"`.
    """
    for kind in ("GPU", "TPU", "CPU"):
        devices = tf.config.list_logical_devices(kind)
        names = [device.name for device in devices if host in device.name]
        if names:
            return names
    return []


def assign(
    devices: Sequence | None, num_devices: int, num_replicas: int = 1
) -> list[list[str]]:
    """Returns the full names of existing devices, a row for each replica.

    Args:
        devices: List of at least `num_devices` TensorFlow device strings,
            where a device may be named more than once; a list of such a list
            for each replica; or `None` for `accelerators()`, row by row.
        num_devices: Integer, devices of a row.
        num_replicas: Integer, rows.

    Raises:
        ValueError: If there are too few devices or one does not exist.
    """
    if devices is None:
        names = accelerators()
        missing = num_replicas * num_devices - len(names)
        padded = names + ["missing"] * missing
        grid = [
            padded[r * num_devices : (r + 1) * num_devices]
            for r in range(num_replicas)
        ]
        if missing > 0:
            raise ValueError(_too_few(names, grid))
        return grid
    rows = devices if is_grid(devices) else [devices]
    if len(rows) != num_replicas:
        raise ValueError(
            "`devices` must have a list of device strings for each of the "
            f"{num_replicas} replicas of the strategy, such as "
            f"{[['GPU:0', 'GPU:1'], ['GPU:2', 'GPU:3']]}. Received: "
            f"devices={devices}"
        )
    for row in rows:
        if len(row) < num_devices:
            raise ValueError(
                f"`devices` must name a device for each of the {num_devices} "
                f"stages. Received {len(row)}: devices={list(row)}"
            )
    return [[find(device) for device in row[:num_devices]] for row in rows]


def listed(devices: Any) -> list | None:
    """Checks the argument `devices` of a pipeline.

    Returns:
        List of strings; list of such lists, one a replica; or `None`.

    Raises:
        ValueError: If it is a string, or its elements are no strings.
        TypeError: If it is no list.
    """
    if devices is None:
        return None
    expected = (
        "`devices` must be a list of device strings, one a stage, such as "
        f"{['GPU:0', 'GPU:1']}, or such a list for each replica. Received: "
        f"devices={devices!r}"
    )
    if isinstance(devices, str):
        raise ValueError(expected)
    found = checks.items(devices, expected)
    if any(isinstance(x, str) for x in found):
        names = found
    else:
        found = [checks.items(x, expected) for x in found]
        names = [x for row in found for x in row]
    if not all(isinstance(x, str) for x in names):
        raise ValueError(expected)
    return found


def is_grid(devices: Sequence | None) -> bool:
    """Returns whether devices are given as a row for each replica."""
    return bool(devices) and not any(isinstance(x, str) for x in devices or ())


def _too_few(names: list[str], grid: list[list[str]]) -> str:
    num_devices = len(grid[0])
    visible = f"Visible: {len(names)} ({', '.join(names)})."
    if len(grid) == 1:
        return (
            f"{num_devices} stages need {num_devices} devices. {visible} Use "
            "fewer stages; or let stages share a device, with "
            f"devices=['{names[0]}'] * {num_devices}; or split a device into "
            "logical ones before TensorFlow starts: a CPU with "
            f"tf_gpipe.split_cpu({num_devices}), a GPU with "
            "tf.config.set_logical_device_configuration."
        )
    text = "\n".join(
        f"    replica {r}: {', '.join(row)}" for r, row in enumerate(grid)
    )
    return (
        f"{len(grid)} replicas of {num_devices} stages need "
        f"{len(grid) * num_devices} devices. {visible}\n{text}\nUse fewer "
        "stages, or a strategy with fewer replicas (one for each row, such as "
        f"tf.distribute.MirroredStrategy(['{names[0]}']))."
    )


def find(device: str) -> str:
    """Returns the full name of a device string such as `"GPU:0"`.

    If several devices match, it is the first one.

    Raises:
        ValueError: If no such device is visible.
    """
    existing = [x.name for x in tf.config.list_logical_devices()]
    try:
        wanted = tf.DeviceSpec.from_string(device)
    except (AttributeError, TypeError, ValueError):
        wanted = tf.DeviceSpec()
    for name in existing:
        full = _full(name)
        if wanted.device_type and full.make_merged_spec(wanted) == full:
            return name
    raise ValueError(
        f"Unknown device {device!r}. Visible devices: {', '.join(existing)}."
    )


def place(
    variable: keras.Variable, devices: Sequence[str], trainable: bool = False
) -> None:
    """Moves a variable to its devices, with its value.

    A variable that has no value yet is initialised there, so that a model too
    large for one device is never on one.

    Args:
        variable: A `keras.Variable`.
        devices: List of device names, one a replica.
        trainable: Boolean, whether gradient tapes shall watch the variable, if
            it has no value yet. True also for frozen weights, which the user
            may unfreeze later.
    """
    with tf.init_scope(), eagerly_alone(), replicas.variables_on(devices):
        if not upstream.has_value(variable):
            before = variable.trainable
            variable.trainable = before or trainable
            # As where a layer makes it: optimizers look for patterns in the
            # names of TensorFlow's variables.
            with _scope_of(variable.path):
                upstream.give_value(variable)
            variable.trainable = before
        elif replicas.devices_of(variable.value) != [
            _full(device).to_string() for device in devices
        ]:
            old = upstream.tensorflow_variable(variable)
            name = old.name.partition(":")[0]
            with _scope_of(name):
                moved = tf.Variable(
                    old,
                    trainable=old.trainable,
                    name=name.rpartition("/")[2],
                    dtype=old.dtype,
                    aggregation=old.aggregation,
                    synchronization=old.synchronization,
                )
            before = upstream.variable_id(variable)
            upstream.set_tensorflow_variable(variable, moved)
            _moved[before] = upstream.variable_id(variable)


def newest_id(of: Any) -> Any:
    """Returns the id of the TensorFlow variable to which one has moved.

    Args:
        of: The id of a variable, as `upstream.variable_id` returns it. What is
            no such id is returned as it is.
    """
    while of in _moved:
        of = _moved[of]
    return of


def _scope_of(path: str) -> contextlib.AbstractContextManager:
    """Returns the name scope of a path, whatever the scope is now."""
    parent = path.rpartition("/")[0]
    return tf.name_scope(parent + "/" if parent else "")


def _full(name: str) -> tf.DeviceSpec:
    """Returns the full name of a local device: TensorFlow omits parts of it."""
    local = tf.DeviceSpec(job="localhost", replica=0, task=0)
    return local.make_merged_spec(tf.DeviceSpec.from_string(name))
