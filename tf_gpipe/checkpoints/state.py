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
from tf_gpipe.checkpoints.store import Array
from tf_gpipe.checkpoints.store import CheckpointError
from tf_gpipe.checkpoints.store import NotFiniteError
from tf_gpipe.checkpoints.store import Saved
from tf_gpipe.devices import placement
from tf_gpipe.devices import slots
from tf_gpipe.stage import seeds
from tf_gpipe.stage import tensorflow_state

# Kinds of variables, in the order of a checkpoint.
WEIGHTS = "weights"
OTHER_STATE = "other state"
OPTIMIZER = "optimizer"
METRICS = "metrics"
MODEL = (WEIGHTS, OTHER_STATE, OPTIMIZER)


# Parts of a model whose attributes may be variables that Keras does not track.
_PARTS = (
    keras.Loss,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.random.SeedGenerator,
    tf.Module,
)


def variables_of(model: keras.Model) -> dict[str, list]:
    """Returns the variables that a step may change, by kind, each once.

    Their order depends neither on how the model is cut nor on names that Keras
    gives. Seeds are among the weights and the other state. Variables of metrics
    exist once Keras has built them, in the first step.
    """
    layers = upstream.layers_within(model)
    of_optimizers = [v for x in optimizers_of(model) for v in x.variables]
    found: dict[str, list] = {}
    seen: set[int] = set()
    for kind, variables in (
        (WEIGHTS, model.variables),
        (
            OTHER_STATE,
            [
                *seeds.global_seed(),
                *tensorflow_state.find([model], generators=True),
                # A `Sequential` has no weights but those of its stack.
                *(
                    v
                    for x in tensorflow_state.held([vars(model)])
                    if isinstance(x, keras.Layer)
                    for v in x.variables
                ),
            ],
        ),
        # What is left of the model's attributes is part of what it is compiled
        # with: without it, as for an evaluation, it is not restored.
        (OPTIMIZER, [*of_optimizers, *_within_parts(model)]),
        (
            METRICS,
            [
                *(v for x in layers for v in x.metrics_variables),
                *model.metrics_variables,
            ],
        ),
    ):
        found[kind] = []
        for v in variables:
            inner = _inner(v)
            if id(inner) not in seen:
                seen.add(id(inner))
                found[kind] += _parts(v)
    return found


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns a model's optimizer, and those that are other attributes of it.

    A `train_step` of the user's own may use the others.
    """
    first = getattr(model, "optimizer", None)
    found = [] if first is None else [first]
    for x in tensorflow_state.held([vars(model)]):
        if isinstance(x, keras.optimizers.Optimizer) and not any(
            x is y for each in found for y in slots.with_inner(each)
        ):
            found.append(x)
    return found


def _within_parts(model: keras.Model) -> list[Any]:
    """Returns the variables in attributes of a model, and of its `_PARTS`.

    Such as the seeds of an optimizer, or the factor of a loss.
    """
    return [
        x
        for x in tensorflow_state.held([vars(model)], _PARTS)
        if isinstance(x, (keras.Variable, tf.Variable))
    ]


def weights_of_optimizers(model: keras.Model) -> list[list[int]]:
    """Returns the weights for which each of `optimizers_of` was built.

    By their numbers among the model's weights and other state; an empty list if
    it was not built.

    Raises:
        ValueError: If an optimizer was built for variables of something else.
    """
    numbers = {id(_inner(v)): i for i, v in enumerate(_trained(model))}
    found = []
    for x in optimizers_of(model):
        weights = upstream.weights_of(x)
        for v in weights:
            if id(_inner(v)) not in numbers:
                raise ValueError(
                    f"Optimizer '{x.name}' of model '{model.name}' trains "
                    f"variable '{getattr(v, 'path', v.name)}', which is not "
                    "one of the model, so that a checkpoint would not hold it. "
                    "Make it, or the layer that it is of, an attribute of the "
                    "model."
                )
        found.append([numbers[id(_inner(v))] for v in weights])
    return found


def build_optimizers(model: keras.Model, saved: Saved) -> None:
    """Builds a model's optimizers, so that their slots can be restored.

    The one that it is compiled with for its trainable weights; the others,
    which only a step would build, for those that they had in a checkpoint.
    """
    if not model.compiled:
        return
    if model.optimizer is not None:
        slots.build(model)
    trained = _trained(model)
    numbers = saved.content.get("weights of optimizers", [])
    for x, own in zip(optimizers_of(model), numbers, strict=False):
        if not x.built and own and max(own) < len(trained):
            slots.build_for(model, x, [trained[i] for i in own])


def _trained(model: keras.Model) -> list[Any]:
    """Returns the variables of a model that its optimizers may train."""
    found = variables_of(model)
    return found[WEIGHTS] + found[OTHER_STATE]


class Copier:
    """Takes copies of a model's variables between two steps.

    A copy stays in the memory of the host whose device has the variable, so
    that no host holds the variables of several. On a CPU it takes no time:
    TensorFlow copies on write, as a variable that is assigned gets new memory
    while its old value is in use.

    Args:
        model: A `keras.Model` that is built and compiled.

    Attributes:
        trainable: Set of the numbers of those `Array`s of the last copy that
            are of trainable weights.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._key: tuple = ()
        self._functions: list[tuple] = []
        self.trainable: set[int] = set()

    def copy(self) -> list[list[tuple[Array, tf.Tensor]]]:
        """Returns, for each host, pairs of an `Array` and its copied value."""
        by_kind = variables_of(self._model)
        self.trainable = {
            i for i, v in enumerate(by_kind[WEIGHTS]) if v.trainable
        }
        found = [
            (kind, v) for kind, variables in by_kind.items() for v in variables
        ]
        key = tuple(upstream.variable_id(_inner(v)) for _, v in found)
        if key != self._key:
            self._functions = _functions(found)
            self._key = key
        parts = []
        for host, arrays, function in self._functions:
            # One call copies all, and leaves the copies on the host.
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
    for i, v in pairs:
        _assign(v, saved, i)


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
    inner = _inner(v)
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


def names_of_optimizers(model: keras.Model) -> list[str] | None:
    """Returns the class names of the model's optimizers and those within them.

    `None` if the model is not compiled.
    """
    if not model.compiled:
        return None
    return [
        type(x).__name__
        for each in optimizers_of(model)
        for x in slots.with_inner(each)
    ]


def _functions(variables: list[tuple[str, Any]]) -> list[tuple]:
    """Returns each host, its `Array`s and a function that copies these."""
    numbers: dict[str, int] = collections.Counter()
    by_host: dict[str, list] = collections.defaultdict(list)
    for kind, v in variables:
        by_host[_host(v)].append((_describe(kind, numbers[kind], v), v))
        numbers[kind] += 1

    def copying(host: str, parts: list) -> Any:
        def copy() -> list[tf.Tensor]:
            read = [_inner(v).read_value() for _, v in parts]
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
    value = _inner(v)
    name = str(getattr(v, "path", v.name))
    return Array(kind, number, name, tuple(value.shape), value.dtype.name)


def _parts(v: Any) -> list:
    """Returns a variable; or each replica's own, where their values differ."""
    value = _inner(v)
    if not isinstance(value, tf.distribute.DistributedValues):
        return [v]
    strategy = value.distribute_strategy
    if (
        value.synchronization != tf.VariableSynchronization.ON_READ
        or not isinstance(strategy, tf.distribute.MirroredStrategy)
    ):
        return [v]
    return list(strategy.experimental_local_results(value))


def _inner(v: Any) -> tf.Variable:
    """Returns the `tf.Variable`, which an autocast scope does not cast."""
    if isinstance(v, keras.Variable):
        return upstream.tensorflow_variable(v)
    return v


def _host(v: Any) -> str:
    """Returns the CPU device of the host that has a variable."""
    device = tf.DeviceSpec.from_string(_inner(v).device)
    if device.device_type == "CPU":
        return device.to_string()
    return device.replace(device_type="CPU", device_index=0).to_string()


def _other(saved: Saved, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {saved.path} is not one of this model and its "
        f"optimizer: {why}. Use the model that it was written with, or another "
        "directory."
    )
