"""The variables that a training step changes: copied on hosts, and restored."""

import collections
import itertools
import re
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.checkpoints import store
from tf_gpipe.checkpoints.model_variables import METRICS
from tf_gpipe.checkpoints.model_variables import OPTIMIZER
from tf_gpipe.checkpoints.model_variables import WEIGHTS
from tf_gpipe.checkpoints.model_variables import inner_of
from tf_gpipe.checkpoints.model_variables import may_be_trained
from tf_gpipe.checkpoints.model_variables import names_of_optimizers
from tf_gpipe.checkpoints.model_variables import variables_of
from tf_gpipe.checkpoints.model_variables import weights_of_optimizers
from tf_gpipe.checkpoints.store import Array
from tf_gpipe.checkpoints.store import CheckpointError
from tf_gpipe.checkpoints.store import NotFiniteError
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.devices import placement

# The most names of weights in an error.
_MOST_NAMES = 6


class Copier:
    """Takes copies of a model's variables between two steps.

    A copy stays in the memory of the host whose device has the variable, so
    that no host holds the variables of several. On a CPU it takes no time:
    TensorFlow copies on write, as a variable that is assigned gets new memory
    while its old value is in use.

    Args:
        model: A `keras.Model` that is built and compiled.

    Attributes:
        variables: What `variables_of` returned of the model for the last copy.
        trainable: Set of the numbers of those `Array`s of the last copy that
            are of trainable weights.

    Raises:
        ValueError: If a variable holds strings.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        # For copies in place and others: variables, and functions that copy.
        self._made: dict[bool, tuple[tuple, list[tuple]]] = {}
        self.variables = variables_of(model)
        self.trainable: set[int] = set()
        for v in itertools.chain(*self.variables.values()):
            if inner_of(v).dtype == tf.string:
                raise ValueError(
                    f"Variable '{v.name}' of model '{model.name}' holds "
                    "strings, and a checkpoint holds numbers. Keep numbers in "
                    "it, or use `keras.callbacks.BackupAndRestore`."
                )

    def copy(
        self, in_place: bool = False
    ) -> list[list[tuple[Array, tf.Tensor]]]:
        """Returns, for each host, pairs of an `Array` and its copied value.

        Args:
            in_place: Boolean, whether values stay in the memory of the devices
                that have the variables, rather than of their hosts. That takes
                no time and, until a variable is assigned, no memory.
        """
        by_kind = self.variables = variables_of(self._model)
        self.trainable = {
            i for i, v in enumerate(by_kind[WEIGHTS]) if v.trainable
        }
        found = [
            (kind, v) for kind, variables in by_kind.items() for v in variables
        ]
        key = tuple(upstream.variable_id(inner_of(v)) for _, v in found)
        if in_place not in self._made or self._made[in_place][0] != key:
            self._made[in_place] = key, _functions(found, in_place)
        parts = []
        for host, arrays, function in self._made[in_place][1]:
            # One call copies all, and leaves the copies where they are.
            with tf.device(host):
                values = function()
            parts.append(list(zip(arrays, values, strict=True)))
        return parts


def values(
    part: list[tuple[Array, tf.Tensor]], trainable: Container[int] = ()
) -> Iterator[tuple[Array, Iterator[np.ndarray]]]:
    """Yields the arrays of a part of `Copier.copy`, with iterators of pieces.

    It empties the list, so that each copy is freed once it is written.

    Args:
        part: List of pairs of an `Array` and its value.
        trainable: `Copier.trainable`.

    Raises:
        NotFiniteError: While the pieces of a trainable weight are drawn, if
            some of its elements are not finite.
    """
    part.reverse()
    while part:
        array, value = part.pop()
        pieces = _pieces(value)
        if array.kind == WEIGHTS and array.number in trainable:
            pieces = _finite(array, pieces)
        yield array, pieces
        del value, pieces


def _finite(array: Array, pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    for piece in pieces:
        # The sum of finite numbers may be infinite, but then only each of them
        # has to be looked at.
        with np.errstate(all="ignore"):
            finite = np.isfinite(piece.sum()) or np.isfinite(piece).all()
        if not finite:
            raise NotFiniteError(
                f"Weights '{array.name}' are not finite numbers."
            )
        yield piece
        # Freed before the next piece is fetched.
        del piece


def _pieces(value: tf.Tensor) -> Iterator[np.ndarray]:
    """Yields the elements of a tensor in pieces, as NumPy arrays."""
    count = store.PIECE_BYTES // value.dtype.size
    size = int(np.prod(value.shape, dtype=np.int64))
    if size <= count:
        yield np.asarray(value)
        return
    # Sliced on the tensor's own host, so that only a piece is here at a time.
    with placement.eagerly_alone(), tf.device(value.device):
        flat = tf.reshape(value, [-1])
    for begin in range(0, size, count):
        with placement.eagerly_alone(), tf.device(value.device):
            piece = tf.slice(
                flat,
                tf.constant([begin], tf.int64),
                tf.constant([min(count, size - begin)], tf.int64),
            )
        yield np.asarray(piece)


def restore(model: keras.Model, saved: Saved, kinds: tuple[str, ...]) -> None:
    """Assigns a checkpoint's values to a model's variables.

    Args:
        model: A `keras.Model` that is built. If it is not compiled, the
            optimizer's variables are left out.
        saved: `Saved`.
        kinds: Tuple of the kinds of variables to restore.

    Raises:
        CheckpointError: If the checkpoint is one of another model or optimizer.
            No variable has been changed then.
    """
    optimizer = names_of_optimizers(model)
    of_model = variables_of(model)
    if optimizer is None:
        kinds = tuple(x for x in kinds if x != OPTIMIZER)
    elif OPTIMIZER in kinds and optimizer != saved.content["optimizer"]:
        raise _other(
            saved,
            f"it was written with {saved.content['optimizer']}, and the model "
            f"is compiled with {optimizer}",
        )
    pairs = [x for kind in kinds for x in matched(saved, kind, of_model[kind])]
    if OPTIMIZER in kinds:
        _check_trained(model, saved, of_model)
    for i, v in pairs:
        _assign(v, saved, i)


def _check_trained(
    model: keras.Model, saved: Saved, of_model: dict[str, list]
) -> None:
    """Refuses slots of other weights, which may have the same shapes.

    As where one layer was frozen, and now another one is.
    """
    before = saved.content.get("weights of optimizers", [])
    now = weights_of_optimizers(model, of_model)
    weights = may_be_trained(of_model)
    for theirs, mine in zip(before, now, strict=False):
        # An optimizer that only a step builds is not yet.
        if not theirs or not mine or theirs == mine:
            continue
        others = sorted(set(theirs) ^ set(mine))
        names = [_describe(WEIGHTS, 0, weights[i]).name for i in others]
        raise _other(
            saved,
            "the optimizer trained other weights. Some that it trains only "
            f"here or there: {', '.join(names[:_MOST_NAMES])}"
            if others
            else "the optimizer had the weights in another order",
        )


def matched(
    saved: Saved,
    kind: str,
    variables: list,
    skip: Callable[[Any], bool] = lambda v: False,
) -> list[tuple[int, Any]]:
    """Pairs the variables of a kind with their arrays in a checkpoint.

    Args:
        saved: `Saved`.
        kind: String, a kind of variables.
        variables: List of all variables of that kind, as of `variables_of`.
        skip: Function that returns whether a variable is left out, and its
            array not checked.

    Returns:
        List of pairs of an index into `Saved.arrays` and a variable.

    Raises:
        CheckpointError: If the checkpoint has another number of variables, or
            other shapes or dtypes.
    """
    # Arrays are written host by host; numbers give the order of variables.
    ordered = sorted(
        ((i, x) for i, x in enumerate(saved.arrays) if x.kind == kind),
        key=lambda x: x[1].number,
    )
    if kind == METRICS and len(ordered) != len(variables):
        ordered, variables = _in_both(ordered, variables)
    if len(ordered) != len(variables):
        raise _other(
            saved,
            f"it has {len(ordered)} variables of {kind}, the model has "
            f"{len(variables)}",
        )
    pairs = []
    for (i, array), v in zip(ordered, variables, strict=True):
        if skip(v):
            continue
        mine = _describe(kind, array.number, v)
        if (array.shape, array.dtype) != (mine.shape, mine.dtype):
            raise _other(
                saved,
                f"{kind} '{array.name}' has shape {array.shape} and dtype "
                f"{array.dtype} there; in the model '{mine.name}' has "
                f"{mine.shape} and {mine.dtype}",
            )
        pairs.append((i, v))
    return pairs


def _in_both(saved: list, variables: list) -> tuple[list, list]:
    """Returns those metrics of a checkpoint and a model that both have.

    Either may have built metrics that only validation updates. They begin anew
    at the next validation. Keras may number the same names differently.
    """

    def key(x: Array) -> tuple:
        return re.sub(r"_\d+(?=/|$)", "", x.name), x.shape, x.dtype

    theirs = [key(x) for _, x in saved]
    mine = [key(_describe(METRICS, 0, v)) for v in variables]
    if len(theirs) < len(mine):
        return saved, [variables[i] for i in _places(theirs, mine)]
    return [saved[i] for i in _places(mine, theirs)], variables


def _places(few: list, many: list) -> Iterator[int]:
    """Yields the places of `few` among `many`, in the same order."""
    rest = enumerate(many)
    for x in few:
        yield from itertools.islice((i for i, y in rest if y == x), 1)


def _assign(v: Any, saved: Saved, i: int) -> None:
    """Assigns an array to a variable, a piece in our memory at a time."""
    inner = inner_of(v)
    size = int(np.prod(inner.shape, dtype=np.int64)) * inner.dtype.size
    if size <= store.PIECE_BYTES or isinstance(
        inner, tf.distribute.DistributedValues
    ):
        v.assign(saved.value(i))
        return
    pieces = []
    with tf.device(_host(v)):
        for piece in saved.pieces(i):
            pieces.append(tf.identity(piece))
            # Waits until the piece has arrived there: TensorFlow would go on
            # meanwhile, and fill our memory with pieces.
            np.asarray(tf.raw_ops.Size(input=pieces[-1]))
        value = tf.reshape(tf.concat(pieces, 0), inner.shape)
    inner.assign(value)


def _functions(variables: list[tuple[str, Any]], in_place: bool) -> list[tuple]:
    """Returns each host, its `Array`s and a function that copies these."""
    numbers: dict[str, int] = collections.Counter()
    by_host: dict[str, list] = collections.defaultdict(list)
    for kind, v in variables:
        by_host[_host(v)].append((_describe(kind, numbers[kind], v), v))
        numbers[kind] += 1

    def copying(host: str, parts: list) -> Any:
        def copy() -> list[tf.Tensor]:
            read = [inner_of(v).read_value() for _, v in parts]
            if in_place:
                return read
            with tf.device(host):
                return [tf.identity(x) for x in read]

        # A concrete function, as TensorFlow warns of `tf.function`s that are
        # made and traced again and again.
        return tf.function(copy, autograph=False).get_concrete_function()

    return [
        (host, [array for array, _ in parts], copying(host, parts))
        for host, parts in by_host.items()
    ]


def _describe(kind: str, number: int, v: Any) -> Array:
    value = inner_of(v)
    name = str(getattr(v, "path", v.name))
    return Array(kind, number, name, tuple(value.shape), value.dtype.name)


def _host(v: Any) -> str:
    """Returns the CPU device of the host that has a variable."""
    device = tf.DeviceSpec.from_string(inner_of(v).device)
    if device.device_type == "CPU":
        return device.to_string()
    return device.replace(device_type="CPU", device_index=0).to_string()


def _other(saved: Saved, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {saved.path} is not one of this model and its "
        f"optimizer: {why}. Use the model that it was written with, or another "
        "directory."
    )
