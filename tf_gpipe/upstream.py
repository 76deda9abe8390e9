"""Functions that use private APIs of TensorFlow and Keras.

Any release may change them; then a function here has to be adapted.
`tests/tf_gpipe/upstream_test.py` tests each function, and says which promise of
the library depends on it. That test also lists the methods of `keras.Model`
that pipelines override or call.
"""

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common import stateless_scope
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.callbacks import monitor_callback
from keras.src.legacy.saving import saving_utils
from keras.src.losses import loss as keras_loss
from keras.src.models import functional
from keras.src.random import seed_generator
from keras.src.saving import object_registration
from keras.src.saving import serialization_lib
from keras.src.trainers import data_adapters
from keras.src.utils import backend_utils
from keras.src.utils import python_utils
from keras.src.utils import tracking
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.client import device_lib
from tensorflow.python.data.ops import interleave_op
from tensorflow.python.eager import context
from tensorflow.python.eager import record
from tensorflow.python.eager import tape
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import config
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import handle_data_util

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tf_gpipe runs Keras on TensorFlow, and Keras has been imported with "
        "another backend. Set the environment variable "
        'KERAS_BACKEND=tensorflow before Keras is imported, or "backend" in '
        "~/.keras/keras.json. Received: "
        f"keras.backend.backend()={keras.backend.backend()!r}"
    )

# === Layers ===


def layers_within(layer: keras.Operation) -> list[keras.Layer]:
    """Returns a layer, followed by all layers within it.

    An empty list for an operation that is no layer.
    """
    is_layer = isinstance(layer, keras.Layer)
    return list(layer._flatten_layers()) if is_layer else []


def is_to_be_built(layer: keras.Layer) -> bool:
    """Returns whether a layer has a `build` that has not been called."""
    return not layer.built and not python_utils.is_default(layer.build)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables of a layer, without those of layers within it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns those of `own_variables` that were created as trainable.

    Even if the layer is frozen.
    """
    return list(layer._trainable_variables)


# Holds the name of the backend by which a preprocessing layer computes.
DynamicBackend = backend_utils.DynamicBackend
# Attributes that Keras and TensorFlow set for bookkeeping.
_NOTES = {
    "_auto_config",
    "_call_signature",
    "_called",
    "_inbound_nodes",
    "_lock",
    "_loss_ids",
    "_losses",
    "_losses_override",
    "_name",
    "_outbound_nodes",
    "_parent_path",
    "_path",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
    "_self_name_based_restores",
    "_self_saveable_object_factories",
    "_self_setattr_tracking",
    "_self_unconditional_checkpoint_dependencies",
    "_self_unconditional_deferred_dependencies",
    "_self_unconditional_dependency_names",
    "_self_update_uid",
    "_tracked",
    "_tracker",
    "name",
}


def attributes_used_by_call(x: Any) -> dict[str, Any]:
    """Returns the attributes of a layer that its call may depend on.

    Without its name, and without bookkeeping about its creation and calls; of
    Keras's own layers, without seeds and initializers.
    """

    def is_used(name: str, value: Any) -> bool:
        if name in ("build", "quantize"):
            # Else it is the method of the class, which Keras has wrapped.
            method = getattr(value, "__wrapped__", None)
            own = getattr(type(x), name, None)
            return own is None or getattr(method, "__func__", None) is not own
        # Layers of Keras use these when they are built.
        builds = name == "seed" or name.endswith("_initializer")
        return name not in _NOTES and not (
            builds and type(x).__module__.startswith("keras.")
        )

    found = {k: v for k, v in vars(x).items() if is_used(k, v)}
    policy = found.get("_dtype_policy")
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and x.path:
        # The layer's path, which is left out, says which policy it is.
        found["_dtype_policy"] = policy, policy[x.path]
    if "_remat_mode" in found:
        found["_remat_mode"] = _remat_of(x)
    return found


def _remat_of(layer: keras.Layer) -> tuple:
    """Returns the layer's remat mode, and whether that names the layer."""
    mode = layer._remat_mode
    names = getattr(mode, "layer_names", None) or ()
    return mode, layer.name in names


def set_trainable_alone(layer: keras.Layer, trainable: bool) -> None:
    """Sets `trainable` of a layer, but not of layers within it."""
    layer._trainable = trainable


def carry_dtype_policy(layer: keras.Layer, to: keras.Layer) -> None:
    """Gives a layer the dtype policy of another, but not layers within it."""
    to._dtype_policy = layer._dtype_policy


def count_as_called(layer: keras.Layer) -> None:
    """Marks a layer as called: Keras exports no other layer as ONNX."""
    layer._called = True


def own_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """Returns the losses that a layer has added in its last call."""
    return list(layer._get_own_losses())


def name_scope_of(layer: keras.Layer) -> contextlib.AbstractContextManager:
    """Returns the scope in which Keras builds a layer.

    The paths of weights made in it begin with the layer's name.
    """
    return layer._open_name_scope()


def convert_argument(layer: keras.Layer, x: Any) -> Any:
    """Returns a tensor as a layer's `__call__` passes it to `call`.

    Cast to the dtype that the layer computes in, with its mask.
    """
    if not layer._convert_input_args:
        return x
    made = layer.dtype_policy.convert_input(
        x, layer.autocast, layer.input_dtype
    )
    if made is not x and mask(x) is not None:
        set_mask(made, mask(x))
    return made


def add_losses(losses: Iterable[tuple[keras.Layer, tf.Tensor]]) -> None:
    """Adds losses to layers, as if each had added its own when it was called.

    Args:
        losses: Pairs of a layer and a loss.
    """
    for layer, loss in losses:
        # Not the layer's own method, which a functional model refuses.
        keras.Layer.add_loss(layer, loss)


def clear_losses(model: keras.Model) -> None:
    """Makes a model forget the losses that its layers have added."""
    model._clear_losses()


def take_loss(layer: keras.Layer, loss: tf.Tensor) -> bool:
    """Returns whether a layer has added a loss, and makes the layer forget it.

    Keras identifies losses by `id`, which later tensors may get.
    """
    added = id(loss) in layer._loss_ids
    layer._loss_ids.discard(id(loss))
    return added


@contextlib.contextmanager
def losses_kept(layers: Iterable[keras.Operation]) -> Iterator[None]:
    """A scope in which layers may run; at its end their losses are restored."""
    kept = [
        (x, list(x._losses), set(x._loss_ids))
        for layer in layers
        for x in layers_within(layer)
    ]
    try:
        yield
    finally:
        for layer, losses, ids in kept:
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


# === Tensors ===


def mask(x: Any) -> Any:
    """Returns the mask that Keras has attached to a tensor, or `None`."""
    return getattr(x, "_keras_mask", None)


def set_mask(x: Any, value: tf.Tensor) -> None:
    """Attaches a mask to a tensor."""
    x._keras_mask = value


def logits(x: Any) -> Any:
    """Returns the logits that Keras has attached to a tensor, or `None`.

    Cross-entropies use them in place of the tensor.
    """
    return getattr(x, "_keras_logits", None)


def set_logits(x: Any, value: tf.Tensor) -> None:
    """Attaches logits to a tensor."""
    x._keras_logits = value


def is_optional(x: keras.KerasTensor) -> bool:
    """Returns whether a model's input is of `keras.Input(optional=True)`."""
    return getattr(x._keras_history.operation, "optional", False)


# === Variables ===


def has_value(variable: keras.Variable) -> bool:
    """Returns whether a variable has been initialised."""
    return variable._value is not None


def casts(variable: keras.Variable) -> bool:
    """Returns whether a layer casts a variable to its compute dtype."""
    return variable._autocast


def give_value(variable: keras.Variable) -> None:
    """Initialises a variable that was made without a value."""
    variable._deferred_initialize()


def forget_waiting(variables: Iterable[keras.Variable]) -> None:
    """Removes variables from Keras's list of uninitialised variables."""
    ids = {id(v) for v in variables}
    key = "uninitialized_variables"
    waiting = global_state.get_global_attribute(key, [])
    global_state.set_global_attribute(
        key, [v for v in waiting if id(v) not in ids]
    )


def tensorflow_variable(variable: keras.Variable) -> tf.Variable:
    """Returns the TensorFlow variable in a Keras variable.

    Without the value that a scope gives it, and without autocasting.
    """
    return variable._value


def handle_of(variable: keras.Variable) -> tf.Tensor:
    """Returns the handle of the TensorFlow variable in a Keras variable."""
    return tensorflow_variable(variable).handle


def set_tensorflow_variable(
    variable: keras.Variable, value: tf.Variable
) -> None:
    """Puts another TensorFlow variable into a Keras variable."""
    variable._value = value


def variable_id(variable: Any) -> str:
    """Returns the id of a TensorFlow variable, unique in the process."""
    of_keras = isinstance(variable, keras.Variable)
    return (variable.value if of_keras else variable)._unique_id


def is_seed(variable: Any) -> bool:
    """Returns whether a variable is the state of a `SeedGenerator`."""
    return variable.name == "seed_generator_state"


def set_path(variable: keras.Variable, path: str) -> None:
    """Sets the path of a variable."""
    variable._path = path


# === State of Keras ===


def seed_generator_of_keras() -> keras.random.SeedGenerator | None:
    """Returns the global seed generator, which layers without a seed use.

    `None` if Keras has not made it yet.
    """
    return global_state.get_global_attribute(
        seed_generator.GLOBAL_SEED_GENERATOR
    )


def set_seed_generator_of_keras(
    generator: keras.random.SeedGenerator | None,
) -> None:
    """Sets the global seed generator, which layers without a seed use.

    With `None`, Keras makes one when it is next needed.
    """
    global_state.set_global_attribute(
        seed_generator.GLOBAL_SEED_GENERATOR, generator
    )


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A scope without the surrounding autocast scope of Keras.

    The autocast scope of a model would cast the variables of layers with
    another dtype policy; each layer enters a scope of its own. Keras's autocast
    scope of dtype `None` is no substitute: in it all variables claim to be
    float32.
    """
    key = "autocast_scope"
    scope = global_state.get_global_attribute(key)
    global_state.set_global_attribute(key, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(key, scope)


def writes_hdf5() -> bool:
    """Returns whether Keras is writing a model into an HDF5 file."""
    return global_state.get_global_attribute("use_legacy_config", False)


# === Models ===

Functional = functional.Functional
# Base of what is mixed into a `keras.Model`, whose attributes have no types.
Mixin: Any = object
# Tracks the attributes of a layer, to find weights and layers in them.
Tracker = tracking.Tracker


def functional_arguments(config: dict, custom_objects: Any) -> dict[str, Any]:
    """Returns the constructor arguments of a functional model from a config."""
    return functional.functional_from_config(dict, config, custom_objects)


def layer_from_hdf5(config: dict, custom_objects: Any) -> keras.Layer:
    """Returns the layer made from a config in an HDF5 file."""
    return saving_utils.model_from_config(config, custom_objects=custom_objects)


def with_copied_operations(
    model: keras.Model, copied: Callable[[keras.Operation], keras.Operation]
) -> keras.Model:
    """Returns a functional model like one, uncompiled, of copied operations.

    Its class is Keras's own. `keras.models.clone_model` also compiles, which
    needs a loss that can be serialised, and values for variables.
    """
    inputs = keras.tree.map_structure(
        lambda x: keras.Input(
            batch_shape=x.shape,
            dtype=x.dtype,
            sparse=x.sparse,
            ragged=getattr(x, "ragged", False),
            name=x.name,
            optional=is_optional(x),
        ),
        inputs_of(model),
    )
    outputs = model._run_through_graph(inputs, operation_fn=copied)
    return Functional(inputs, outputs, name=model.name)


def renamed(layer: Any, name: str) -> Any:
    """Returns a twin of a layer with another name and the same variables."""
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    vars(twin)["name"] = name
    return twin


def uncalled(operation: keras.Operation) -> keras.Operation:
    """Returns a twin of an operation without weights that is not called."""
    twin = renamed(operation, operation.name)
    vars(twin).update(_inbound_nodes=[], _outbound_nodes=[])
    return twin


def unsafe_deserialization() -> contextlib.AbstractContextManager:
    """Returns a scope in which Keras makes lambdas from their code."""
    return serialization_lib.SafeModeScope(False)


def made_from_code(function: Any) -> bool:
    """Returns whether a lambda was made from its code, without its globals."""
    return getattr(function, "__globals__", None) is vars(python_utils)


def registered_name(cls: type) -> str:
    """Returns the name of a class in Keras's files."""
    return object_registration.get_registered_name(cls)


def register_as(cls: type, name: str) -> None:
    """Sets the name by which Keras writes a class into files."""
    object_registration.GLOBAL_CUSTOM_NAMES[cls] = name


def nodes_of(model: keras.Model) -> list[Any]:
    """Returns the nodes of a functional model, each after those it needs."""
    return [
        node
        for depth in sorted(model._nodes_by_depth, reverse=True)
        for node in model._nodes_by_depth[depth]
        if not node.is_input and node.operation
    ]


def inputs_of(model: keras.Model) -> Any:
    """Returns the inputs of a functional model, structured as given."""
    return model._inputs_struct


def outputs_of(model: keras.Model) -> Any:
    """Returns the outputs of a functional model, structured as given."""
    return model._outputs_struct


def unpack_singleton(x: Any) -> Any:
    """Returns the only item of a list of one, and anything else unchanged."""
    return functional.unpack_singleton(x)


def graph_of(model: keras.Model) -> Any:
    """Returns the functional model that a model runs.

    A functional model itself; the one within a `Sequential`, or `None` if that
    is not built or has inputs in a nested structure.
    """
    return model._functional if isinstance(model, keras.Sequential) else model


def forwards_to_keras(owner: type, name: str) -> bool:
    """Returns whether a class's method only checks, then calls Keras's own.

    KerasHub's tasks look for strings in their inputs.
    """
    return (owner.__module__.split(".")[0], name) == ("keras_hub", "__call__")


def runs_its_graph(layer: Any) -> bool:
    """Returns whether a layer is a model whose call only runs its graph.

    That is, a functional model or a `Sequential`, built or not; but not, for
    example, one whose class has its own `call`, or which adds a loss or changes
    a mask.
    """
    # Methods that run in a call. One that is overridden may do more.
    methods = (
        "__call__",
        "_adjust_input_rank",
        "_convert_inputs_to_tensors",
        "_run_through_graph",
        "_standardize_inputs",
        "call",
        "compute_mask",
        "compute_output_spec",
        "quantized_call",
        "rematerialized_call",
    )

    def method(cls: type, name: str) -> Any:
        owners = (x for x in cls.__mro__ if not forwards_to_keras(x, name))
        return next((vars(x)[name] for x in owners if name in vars(x)), None)

    base: Any = keras.Sequential
    if not isinstance(layer, keras.Sequential):
        base = Functional
        if not isinstance(layer, Functional):
            return False
        if any(x.sparse or getattr(x, "ragged", False) for x in layer.inputs):
            return False
    return (
        layer.activity_regularizer is None
        and not layer.supports_masking
        and layer.quantization_mode is None
        and not any(
            name in vars(layer)
            or method(type(layer), name) != method(base, name)
            for name in methods
        )
    )


def with_training(layer: Any, kwargs: dict, training: bool | None) -> dict:
    """Returns keyword arguments of a layer call, with `training` if not `None`.

    Only for a Keras layer that can be called in a mode.
    """
    if training is None or not hasattr(layer, "_call_context_args"):
        return kwargs
    return {**kwargs, "training": training}


def spec_function(layer: keras.Operation) -> Callable:
    """Returns `compute_output_spec`, which may be given any call's arguments.

    `training` is left out where `call` or `compute_output_spec` does not take
    it: the call of a model within a model hands its own to all layers. Tensors
    are cast as `__call__` casts them.
    """

    def spec(*args, **kwargs):
        compute = layer.compute_output_spec
        taken = inspect.signature(compute).parameters
        any_name = any(x.kind is x.VAR_KEYWORD for x in taken.values())
        if not (
            getattr(layer, "_call_has_training_arg", True)
            and (any_name or "training" in taken)
        ):
            kwargs.pop("training", None)
        if isinstance(layer, keras.Layer):
            args, kwargs = keras.tree.map_structure(
                lambda x: (
                    convert_argument(layer, x)
                    if isinstance(x, keras.KerasTensor)
                    else x
                ),
                (args, kwargs),
            )
        return compute(*args, **kwargs)

    return spec


def run_on_specs(layer: keras.Layer) -> Callable:
    """Returns a function that runs a layer on `KerasTensor`s.

    `compute_output_spec` does not run one with a `compute_output_shape`.
    """
    return functools.partial(backend.compute_output_spec, layer)


def without_masks(kwargs: dict) -> dict:
    """Returns the keyword arguments of a call without Keras masks."""
    return {
        name: x
        for name, x in kwargs.items()
        if name != "mask" and not name.endswith("_mask")
    }


def arguments_of_call(
    model: keras.Model, args: Sequence, kwargs: dict
) -> tuple[list, list, bool | None] | None:
    """Assigns the arguments of a call to the inputs of a model.

    Args:
        model: A model that `runs_its_graph`.
        args: List of arguments. Any objects may stand for tensors.
        kwargs: Dictionary of keyword arguments, likewise.

    Returns:
        Tuple of the list of inputs, the list of masks of the first of these,
        and `training`, which is passed on to all layers. `None` if there are
        other arguments, or inputs of another structure.
    """
    names = ("inputs", "training", "mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs, training, mask = (given.pop(name, None) for name in names)
    if given or not (training is None or isinstance(training, bool)):
        return None
    expected = graph_of(model)._inputs_struct
    if isinstance(inputs, dict) and not isinstance(expected, dict):
        # Inputs by name.
        one = isinstance(expected, keras.KerasTensor)
        each = [expected] if one else expected
        if not all(
            isinstance(x, keras.KerasTensor) and x.name in inputs for x in each
        ):
            return None
        inputs = [inputs[x.name] for x in each]
        expected = list(each)
    if isinstance(expected, (list, tuple)) and len(expected) == 1:
        expected = expected[0]
    inputs = unpack_singleton(inputs)
    structures = [
        keras.tree.map_structure(lambda x: 0, keras.tree.lists_to_tuples(x))
        for x in (inputs, expected)
    ]
    if structures[0] != structures[1]:
        return None
    masks = [] if mask is None else keras.tree.flatten(mask)
    return keras.tree.flatten(inputs), masks, training


def convert_nested_input(
    model: keras.Model, place: int, x: Any, mask: Any
) -> Any:
    """Returns an input of a model as the model's call passes it to its layers.

    Cast to the input's dtype, with an axis of size 1 added or removed, and with
    the mask attached.

    Args:
        model: The model.
        place: Index of the input.
        x: Tensor or `KerasTensor`; or a nested structure of these, for all
            inputs.
        mask: Mask that the call is given for the input, or `None`.
    """
    if keras.tree.is_nested(x):
        call = arguments_of_call(model, (x,), {})
        assert call is not None
        x = call[0][place]
    expected = graph_of(model).inputs[place]
    if isinstance(x, keras.KerasTensor):
        shape = list(x.shape)
        if len(shape) == expected.ndim + 1 and shape[-1] == 1:
            shape.pop()
        elif len(shape) == expected.ndim - 1 and expected.shape[-1] == 1:
            shape.append(1)
        return keras.KerasTensor(shape, expected.dtype)
    made = convert_argument(model, x)
    made = keras.ops.convert_to_tensor(made, dtype=expected.dtype)
    if len(made.shape) == expected.ndim + 1 and made.shape[-1] == 1:
        made = keras.ops.squeeze(made, axis=-1)
    elif len(made.shape) == expected.ndim - 1 and expected.shape[-1] == 1:
        made = keras.ops.expand_dims(made, axis=-1)
    if mask is None:
        mask = getattr(x, "_keras_mask", None)
    elif made is x:
        # A copy, since other layers take the tensor without this mask.
        made = tf.identity(made)
    if mask is not None and made is not x:
        made._keras_mask = mask
    return made


def conversion_of_inputs(model: keras.Model) -> tuple:
    """Returns what decides how a model's call converts its inputs.

    To be compared with that of other models.
    """

    def described(x: keras.KerasTensor) -> tuple:
        # A name that Keras has made up is in no dict of inputs.
        name = "" if x.name.startswith("keras_tensor") else x.name
        return name, x.dtype, x.ndim, x.shape[-1:] == (1,)

    return (
        keras.tree.map_structure(described, graph_of(model)._inputs_struct),
        model._convert_input_args,
        model.autocast,
        model.input_dtype,
        model.dtype_policy,
        _remat_of(model),
    )


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the distribution strategy in whose scope a model was made."""
    return model._distribute_strategy


def compiled_parts(model: keras.Model) -> list[Any]:
    """Returns the objects in which Keras holds losses and metrics."""
    return [model._compile_loss, model._compile_metrics]


def tracked(model: keras.Model) -> dict[str, list]:
    """Returns the objects that a model tracks (layers, metrics), by kind."""
    return {kind: held for kind, (_, held) in model._tracker.config.items()}


def track(model: keras.Model, kind: str, x: Any) -> None:
    """Makes a model track an object, unless it does already."""
    if not model._tracker.is_in_store(kind, x):
        model._tracker.add_to_store(kind, x)


def unwrapped(x: Any) -> Any:
    """Returns the list or dictionary in TensorFlow's wrapper of one.

    `None` for anything else.
    """
    if not isinstance(x, tf.__internal__.tracking.Trackable):
        return None
    return getattr(x, "_storage", getattr(x, "__wrapped__", None))


def untracked() -> contextlib.AbstractContextManager:
    """Returns a scope in which attributes that are set are not tracked."""
    return tracking.DotNotTrackScope()


# === Data ===

# Kinds of data for `fit` in which an interrupted run can find its place again.
ARRAYS, TF_DATA, PY_DATASET = "arrays", "tf.data", "PyDataset"
_ADAPTERS = {
    data_adapters.ArrayDataAdapter: ARRAYS,
    data_adapters.TFDatasetAdapter: TF_DATA,
    data_adapters.PyDatasetAdapter: PY_DATASET,
}


def kind_of_data(epochs: Any) -> str | None:
    """Returns the kind of data that `fit` was given, one of three, or `None`.

    Args:
        epochs: Keras's iterator over epochs, which it passes to
            `_maybe_symbolic_build`.
    """
    return _ADAPTERS.get(type(epochs.data_adapter))


def shuffles_arrays(epochs: Any) -> bool:
    """Returns whether arrays are shuffled, by TensorFlow's global seed."""
    return bool(epochs.data_adapter._shuffle)


def changes_between_epochs(dataset: keras.utils.PyDataset) -> bool:
    """Returns whether a `PyDataset` has code for the ends of epochs."""
    plain, kind = keras.utils.PyDataset, type(dataset)
    return (
        kind.on_epoch_begin is not plain.on_epoch_begin
        or kind.on_epoch_end is not plain.on_epoch_end
    )


def rows_of(dataset: tf.data.Dataset) -> list[int]:
    """Returns how many rows a dataset has that is made from no other.

    One number, negative if it is unknown; or none, for other datasets.
    """
    return [] if dataset._inputs() else [int(dataset.cardinality())]


def rows_of_arrays(epochs: Any) -> tuple[int, int]:
    """Returns how many rows arrays have, and batches of them."""
    adapter = epochs.data_adapter
    return int(adapter._num_samples), int(adapter.batch_size)


def dataset_of(epochs: Any) -> Any:
    """Returns the `tf.data.Dataset` that `fit` was given."""
    return epochs.data_adapter._dataset


def global_seed() -> int | None:
    """Returns the seed set by `tf.random.set_seed`, or `None`."""
    return context.global_seed()


def datasets_within(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns a dataset, followed by all datasets that it is made from."""
    within = (y for x in dataset._inputs() for y in datasets_within(x))
    return [dataset, *within]


def seeds_of(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Returns the seeds of a dataset's random operations, `(0, 0)` for none.

    Without those of the datasets that it is made from.
    """
    found = []
    if hasattr(dataset, "_seed") and hasattr(dataset, "_seed2"):
        found.append((int(dataset._seed), int(dataset._seed2)))
    for nodes in _graphs_within(dataset):
        constants = {
            x.name: x.attr["value"].tensor for x in nodes if x.op == "Const"
        }
        found += [
            seeds
            for x in nodes
            if (seeds := _seeds_of_node(x, constants)) is not None
        ]
    return found


def _graphs_within(dataset: tf.data.Dataset) -> Iterator[Sequence[Any]]:
    """Yields the nodes of each graph of a dataset's own functions."""
    for function in dataset._functions():
        yield from _graphs_of(function.function.graph.as_graph_def())


def _graphs_of(definition: Any) -> Iterator[Sequence[Any]]:
    yield definition.node
    for function in definition.library.function:
        yield function.node_def


def has_open_order(dataset: tf.data.Dataset) -> bool:
    """Returns whether one of a dataset's steps has `deterministic=False`.

    Without those of the datasets that it is made from.
    """
    graphs = [*_graphs_within(dataset)]
    if isinstance(dataset, interleave_op._ParallelInterleaveDataset):
        # It does not keep this argument.
        graph = dataset._as_serialized_graph(
            external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE
        )
        graphs += _graphs_of(tf.compat.v1.GraphDef.FromString(graph.numpy()))
    return getattr(dataset, "_deterministic", None) == "false" or any(
        x.attr["deterministic"].s == b"false"
        for nodes in graphs
        for x in nodes
        if "deterministic" in x.attr
    )


def draws_in_parallel(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset draws numbers in parallel calls of a function.

    Which call gets which number is left to chance then, seeded or not. If
    operations are deterministic, TensorFlow makes the calls one by one.
    """
    return (
        int(getattr(dataset, "_num_parallel_calls", 1)) != 1
        and not config.is_op_determinism_enabled()
        and any(
            "seed2" in x.attr or _advances(x)
            for nodes in _graphs_within(dataset)
            for x in nodes
        )
    )


def lasting_states(dataset: tf.data.Dataset) -> dict[int, str]:
    """Returns the random states that a dataset's iterators pass on.

    One iterator goes on from where the last one left them, also that of another
    dataset which is made from the same one or has the same variable.

    Returns:
        Dictionary from ids of datasets and resources to names of datasets.
    """
    found = {}
    for x in datasets_within(dataset):
        name = type(x).__name__.strip("_")
        if getattr(x, "_reshuffle_each_iteration", False) or getattr(
            x, "_rerandomize", False
        ):
            found[id(x)] = name
        for function in x._functions():
            graph = function.function.graph.as_graph_def()
            if any(
                _advances(op) for nodes in _graphs_of(graph) for op in nodes
            ):
                found |= {
                    id(handle): name
                    for handle in function.function.captured_inputs
                    if handle.dtype == tf.resource
                }
    return found


def _advances(node: Any) -> bool:
    """Returns whether an operation is one that moves a random state on.

    Keras's seed generators assign their states.
    """
    return node.op.startswith(("Assign", "Rng"))


def batch_sizes_of(dataset: tf.data.Dataset) -> list[int]:
    """Returns the sizes of the batches that a dataset makes, one or none."""
    size = getattr(dataset, "_batch_size", None)
    return [] if size is None else [int(size)]


def _seeds_of_node(node: Any, constants: dict) -> tuple[int, int] | None:
    if "seed" in node.attr and "seed2" in node.attr:
        return node.attr["seed"].i, node.attr["seed2"].i
    if node.op not in _SEEDS_AS_INPUTS:
        return None
    first = _SEEDS_AS_INPUTS[node.op]
    names = [x.partition(":")[0] for x in node.input[first : first + 2]]
    if not all(name in constants for name in names):
        return None
    one, two = (int(tf.make_ndarray(constants[name])) for name in names)
    return one, two


# Dataset operations with two seeds as inputs, and the index of the first.
_SEEDS_AS_INPUTS = {
    "ShuffleDataset": 2,
    "ShuffleDatasetV3": 2,
    "ShuffleAndRepeatDataset": 2,
    "ShuffleAndRepeatDatasetV2": 2,
    "RandomDataset": 0,
    "RandomDatasetV2": 0,
}


def replace_next_epoch(epochs: Any, first: Callable[[Any], Iterator]) -> None:
    """Replaces the batches of an iterator's next epoch.

    Args:
        epochs: As in `kind_of_data`.
        first: Function from Keras's iterator over the epoch to the one that
            replaces it. Each item is a tuple of the first and the last step of
            an execution, and an iterator of batches.
    """
    original = epochs._enumerate_iterator

    def enumerate_once() -> Iterator:
        del epochs._enumerate_iterator
        return first(original())

    epochs._enumerate_iterator = enumerate_once


def call_after_epochs(epochs: Any, function: Callable[[], None]) -> None:
    """Has `fit` call a function after the last step of each epoch.

    It is called before the validation, and also if a callback has stopped
    training in that step.

    Args:
        epochs: As in `kind_of_data`.
        function: Function without arguments.
    """
    original = epochs.catch_stop_iteration

    @contextlib.contextmanager
    def catching() -> Iterator[None]:
        with original():
            yield
        function()

    epochs.catch_stop_iteration = catching


def monitors(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns the callbacks given to `fit` that monitor a metric."""
    return callbacks_of(monitor_callback.MonitorCallback, callbacks)


def callbacks_of(kinds: type | tuple[type, ...], callbacks: Any) -> list:
    """Returns those of the callbacks given to `fit` that are of some class."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return [x for x in keras.tree.flatten(callbacks) if isinstance(x, kinds)]


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the epoch at which `fit` starts, if called as training begins."""
    model._initial_epoch = epoch


# === Losses ===


def loss_as_given(compile_loss: Any) -> Any:
    """Returns the `loss` argument of `compile`."""
    return compile_loss._user_loss


def call_with_each(
    compile_loss: Any, function: Callable, call: Callable
) -> tf.Tensor:
    """Calls a `CompileLoss` with a function in place of each of its losses.

    Args:
        compile_loss: Keras's `CompileLoss`, which has been built.
        function: Function that is called in place of each loss, with the index
            of the loss, the loss, and the arguments of the loss.
        call: Function that calls the `CompileLoss`.
    """
    # On a copy, since other threads may use the model at the same time.
    stand_in = object.__new__(type(compile_loss))
    vars(stand_in).update(vars(compile_loss))

    stand_in._flat_losses = [
        entry._replace(loss=functools.partial(function, i, entry.loss))
        for i, entry in enumerate(compile_loss._flat_losses)
    ]
    return call(stand_in)


def value_weights(weight: Any, mask: Any, dtype: str) -> Any:
    """Returns the weight of each value in a loss, given weights and a mask."""
    # For reduction "sum": for a mean Keras would rescale them by the mask.
    return keras_loss.apply_mask(weight, mask, dtype, "sum")


def scaled_for_replicas(loss: tf.Tensor) -> tf.Tensor:
    """Divides a loss by the number of replicas, whose gradients are summed."""
    return keras_loss.scale_loss_for_distribution(loss)


def unscaled_for_replicas(loss: tf.Tensor) -> tf.Tensor:
    """Undoes `scaled_for_replicas`."""
    return keras_loss.unscale_loss_for_distribution(loss)


# === Optimizers ===

# Methods of an optimizer that run once per weight, or read its scalars.
UPDATES = (
    "_apply_weight_decay",
    "_backend_update_step",
    "_update_model_variables_moving_average",
)


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the weights for which an optimizer was built."""
    return getattr(optimizer, "_trainable_variables", [])


def slot_lists(optimizer: keras.optimizers.Optimizer) -> list[list]:
    """Returns the lists among an optimizer's attributes: slots, for example."""
    return [
        x
        for name, x in vars(optimizer).items()
        if isinstance(x, list)
        and name not in ("_variables", "_trainable_variables")
    ]


def scalars_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of an optimizer that all weights share."""
    scalars = (optimizer._iterations, optimizer._learning_rate)
    return [x for x in scalars if isinstance(x, keras.Variable)]


def sum_gradients_by(
    optimizer: keras.optimizers.Optimizer, function: Callable
) -> None:
    """Sets the function by which an optimizer sums gradients over replicas."""
    optimizer._all_reduce_sum_gradients = function


# What building an optimizer sets, and what belongs to one optimizer alone.
_OF_BUILT = {
    "_all_reduce_sum_gradients",
    "_distribution_strategy",
    "_iterations",
    "_learning_rate",
    "_lock",
    "_tracker",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_variables",
    "built",
}


def unbuilt(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Returns a copy of an optimizer that is not built, with own variables.

    Nothing is serialised or read, as users' schedules and classes need not
    allow it, and variables have no values in a trace: those of the copy are 0,
    the learning rate, too.
    """
    # With the originals, whose ids no other object can get meanwhile.
    made: dict[int, tuple[Any, Any]] = {}

    def of_optimizer(x: Any) -> Any:
        if id(x) not in made:
            new = object.__new__(type(x))
            made[id(x)] = x, new
            rate = x._learning_rate
            keras.optimizers.Optimizer.__init__(
                new,
                0.0 if isinstance(rate, keras.Variable) else rate,
                name=x.name,
            )
            for name, value in vars(x).items():
                if name not in _OF_BUILT and not name.startswith("_self_"):
                    vars(new)[name] = of(value, new)
            chosen_by = getattr(x, "_optimizer_map", None)
            if callable(chosen_by) and not isinstance(
                chosen_by, keras.optimizers.OptimizerMap
            ):
                new._optimizer_map = lambda v: of_optimizer(chosen_by(v))
        return made[id(x)][1]

    def of(x: Any, owner: Any) -> Any:
        if isinstance(x, keras.optimizers.Optimizer):
            return of_optimizer(x)
        if isinstance(x, keras.Variable):
            return owner.add_variable(x.shape, dtype=x.dtype, name=x.name)
        # Building makes the variables in these anew.
        if isinstance(x, dict):
            return {
                k: of(v, owner)
                for k, v in x.items()
                if not isinstance(v, keras.Variable)
            }
        if isinstance(x, list):
            return [
                of(v, owner) for v in x if not isinstance(v, keras.Variable)
            ]
        if isinstance(x, keras.optimizers.OptimizerMap):
            new = object.__new__(type(x))
            vars(new).update({k: of(v, owner) for k, v in vars(x).items()})
            return new
        return x

    return of_optimizer(optimizer)


def rekey_weights(
    optimizer: keras.optimizers.Optimizer, newest_id: Callable[[Any], Any]
) -> None:
    """Updates an optimizer after TensorFlow variables were replaced.

    An optimizer identifies a weight by the TensorFlow variable in it, to find
    its slots, whether it decays, and its optimizer in a `MultiOptimizer`.

    Args:
        optimizer: The optimizer, which need not be built.
        newest_id: Function from the id of a variable to that of the variable
            in its place; from anything else to the same.
    """
    for name, known in list(vars(optimizer).items()):
        if not isinstance(known, (dict, set)):
            continue
        newest = {key: newest_id(key) for key in known}
        if all(key == new for key, new in newest.items()):
            continue
        if isinstance(known, dict):
            setattr(optimizer, name, {newest[k]: x for k, x in known.items()})
        else:
            setattr(optimizer, name, set(newest.values()))


# === Gradient tapes ===


def tapes_record() -> bool:
    """Returns whether a gradient tape may be recording."""
    return not (pywrap_tfe.TFE_Py_TapeSetIsEmpty() or tapes_are_stopped())


def tapes_are_stopped() -> bool:
    """Returns whether TensorFlow has stopped tapes from recording.

    `tf.recompute_grad` does so while it runs a function forward.
    """
    return pywrap_tfe.TFE_Py_TapeSetIsStopped()


@contextlib.contextmanager
def tapes_restarted() -> Iterator[None]:
    """A scope in which tapes record even if TensorFlow has stopped them."""
    stopped = tapes_are_stopped()
    if stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def watch_as_read(variable: tf.Variable) -> None:
    """Makes tapes treat a variable as if it had been read."""
    tape.variable_accessed(variable)


def record_gradient(
    outputs: list, inputs: list, gradient: Callable[..., Any]
) -> None:
    """Records an operation on tapes, with a function as its gradient."""
    record.record_operation("Pipeline", outputs, inputs, gradient)


def with_gradient(
    operation: str,
    gradient: Callable[..., Any],
    compute: Callable[[], Any],
) -> Any:
    """Returns `compute()`, with another gradient for a type of operations.

    Other threads, and gradients before and after, use TensorFlow's.

    Args:
        operation: Name of the type of operations.
        gradient: Function like those that `tf.RegisterGradient` registers. It
            may return `None`, for TensorFlow's gradient.
        compute: Function without arguments, which computes gradients.
    """
    chosen = _chosen_gradients(operation)
    before = getattr(chosen, "gradient", None)
    chosen.gradient = gradient
    try:
        return compute()
    finally:
        chosen.gradient = before


@functools.cache
def _chosen_gradients(operation: str) -> threading.local:
    """Returns where each thread says which gradient it wants, if not TF's."""
    chosen = threading.local()
    entry = ops.gradient_registry._registry[operation]
    registered = entry["type"]

    def gradient(op, *gradients):
        own = getattr(chosen, "gradient", None)
        found = own and own(op, *gradients)
        return registered(op, *gradients) if found is None else found

    entry["type"] = gradient
    return chosen


# === Graphs and functions ===


def within_xla() -> bool:
    """Returns whether XLA compiles the whole graph that is being traced.

    XLA does so for TPUs, and in a `tf.function` with `jit_compile=True`.
    """
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def graphs_being_built() -> list[tf.Graph]:
    """Returns the graph that is being built, and those around it."""
    graphs = [tf.compat.v1.get_default_graph()]
    while getattr(graphs[-1], "outer_graph", None) is not None:
        graphs.append(graphs[-1].outer_graph)
    return graphs


def copy_functions(source: tf.Graph, target: tf.Graph) -> None:
    """Copies the functions of a graph, such as bodies of loops, to another."""
    for function in source._functions.values():
        target._add_function_recursive(function)


def function_of(graph: tf.Graph, name: str) -> Any:
    """Returns the function of this name in a graph, or `None`."""
    return graph._get_function(name)


def share_rendezvous(function: Any, shares: bool) -> None:
    """Sets whether a `tf.function` shares its caller's rendezvous.

    `experimental_attributes` does not accept this setting.
    """
    function._shared_rendezvous = shares or None


def shares_rendezvous(function: Any) -> bool:
    """Returns whether a `tf.function` shares its caller's rendezvous."""
    return bool(function._shared_rendezvous)


def call_operation(
    graph: tf.Graph,
    concrete: Any,
    inputs: Sequence[tf.Tensor],
    stateful: bool,
    optimized: bool,
    jit_compile: bool,
    gradient: str,
) -> tf.Operation:
    """Adds a call of a concrete function to a graph, and returns it.

    It is faster than to call the function, since TensorFlow does not infer the
    shapes of the function's body again.

    Args:
        graph: The graph.
        concrete: The concrete function, which the graph has already.
        inputs: Its inputs, captured ones included.
        stateful: Whether the call is marked as having side effects.
        optimized: Whether TensorFlow optimises the function's graph, as the
            user has set by `tf.config.optimizer`.
        jit_compile: Whether XLA compiles the function.
        gradient: Name of a registered gradient.
    """
    value = tf.compat.v1.AttrValue

    def dtypes(tensors: Sequence[tf.Tensor]) -> Any:
        kinds = [x.dtype.as_datatype_enum for x in tensors]
        return value(list=value.ListValue(type=kinds))

    options = context.context().function_call_options
    how = _call_config(options.config_proto_serialized, optimized)
    return graph.create_op(
        "StatefulPartitionedCall" if stateful else "PartitionedCall",
        inputs,
        [x.dtype for x in concrete.outputs],
        attrs={
            "Tin": dtypes(inputs),
            "Tout": dtypes(concrete.outputs),
            "f": value(func=tf.compat.v1.NameAttrList(name=concrete.name)),
            "config_proto": value(s=how.SerializeToString(deterministic=True)),
            "_disable_call_shape_inference": value(b=True),
            "_XlaMustCompile": value(b=jit_compile),
            "_gradient_op_type": value(s=gradient.encode()),
        },
    )


@functools.cache
def _call_config(config: bytes, optimized: bool) -> tf.compat.v1.ConfigProto:
    """Returns the `ConfigProto` of a call: how its graph is optimised.

    Args:
        config: The serialised `ConfigProto`, as the user has set it.
        optimized: Whether TensorFlow optimises the graph. It does so in one
            pass: the second of its two takes as long and improves little.
    """
    found = tf.compat.v1.ConfigProto.FromString(config)
    rewriter = found.graph_options.rewrite_options
    if not optimized:
        rewriter.disable_meta_optimizer = True
    elif not rewriter.meta_optimizer_iterations:
        rewriter.meta_optimizer_iterations = rewriter.ONE
    return found


def optimized_once(run: Callable) -> Callable:
    """Wraps a Python function: graphs it runs have one pass of optimisers.

    These are the graphs of `tf.function`s that it calls eagerly.
    """

    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        settings = context.context()
        before = settings.function_call_options
        once = context.FunctionCallOptions(
            before.executor_type,
            _call_config(before.config_proto_serialized, optimized=True),
        )
        settings.function_call_options = once
        try:
            return run(*args, **kwargs)
        finally:
            # Unless `tf.config` has changed them meanwhile.
            if settings.function_call_options is once:
                settings.function_call_options = before

    return wrapper


def skip_reference_search(operation: tf.Operation) -> None:
    """Keeps TensorFlow from searching functions called after an operation.

    Before it runs a graph, TensorFlow searches the function body of each call,
    twice per call, for reference variables of TensorFlow 1; see
    `GetNodesRelatedToRefVariables` in tensorflow/compiler/jit/
    xla_cluster_util.cc. It does not search calls that depend on an operation
    which may use such a variable. So this operation gets an attribute with the
    name of a function that has one, and that is never run.
    """
    function = _with_reference_variable()
    function.add_to_graph(operation.graph)
    name = tf.compat.v1.NameAttrList(name=function.name)
    operation._set_attr("_may_refer", tf.compat.v1.AttrValue(func=name))


@functools.cache
def _with_reference_variable() -> Any:
    @tf.function(autograph=False)
    def with_reference_variable() -> None:
        tf.raw_ops.TemporaryVariable(shape=(), dtype=tf.int32)

    with tf.init_scope():
        return with_reference_variable.get_concrete_function()


def _inline_functions_of_layers() -> None:
    """Has a `tf.function` that a layer calls run as a part of its caller.

    Wherever a `keras.StatelessScope` gives variables other values, or none: the
    function keeps its trace, in which such a value would stay. AutoGraph
    converts its Python code as ever.
    """
    call = polymorphic_function.Function.__call__

    @functools.wraps(call)
    def inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not stateless_scope.in_stateless_scope():
            return call(function, *args, **kwargs)
        run = function.python_function
        module = getattr(run, "__module__", None) or type(run).__module__
        # Keras's backend makes its functions anew for each call, to have XLA
        # compile what TensorFlow cannot compute, such as grouped convolutions.
        if module.startswith(("tf_gpipe.", "keras.src.backend.tensorflow.nn")):
            return call(function, *args, **kwargs)
        if not function._autograph:
            return run(*args, **kwargs)
        # The caller may be converted or not: what it calls is.
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):
            return autograph_util.py_func_from_autograph(run)(*args, **kwargs)

    polymorphic_function.Function.__call__ = inlined


def _read_kernels_before_convolutions() -> None:
    """Has Keras hand values of kernels to the functions that XLA compiles.

    XLA takes no variables of other devices, such as the weights of stages are
    for the plain model of the same layers.
    """
    convolve = tensorflow_nn.conv

    @functools.wraps(convolve)
    def conv(inputs: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return convolve(inputs, tf.convert_to_tensor(kernel), *args, **kwargs)

    tensorflow_nn.conv = conv


# When this module is imported, once: before any layer is called.
_inline_functions_of_layers()
_read_kernels_before_convolutions()


def run_in_no_order(operation: tf.Operation) -> None:
    """Exempts an operation from automatic control dependencies."""
    order = operation.graph.experimental_acd_manager
    if order:
        order.run_independently(operation)


def read_only_places(operation: tf.Operation) -> list[int] | None:
    """Returns the indices of a call's or loop's inputs that it only reads.

    These are resources. `None` for other operations.
    """
    try:
        return list(operation.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return None


def is_variable(handle: tf.Tensor) -> bool:
    """Returns whether a resource is a variable, not a table or the like."""
    data = handle_data_util.get_resource_handle_data(handle)
    return data is not None and data.is_set


def anonymous_name() -> str:
    """Returns the shared name that makes a new variable in each run."""
    return context.anonymous_name()


def settings_of_traces() -> tuple | None:
    """Returns the global settings that traces depend on.

    `None` while operations are instrumented as they are traced, such as by
    `tf.debugging.enable_check_numerics`.
    """
    settings = context.context()
    if settings.op_callbacks:
        return None
    return (
        config.is_op_determinism_enabled(),
        settings.function_call_options.config_proto_serialized,
    )


# === Devices ===


def connected_to() -> dict[str, list[str]]:
    """Returns the addresses of the cluster's processes, by job."""
    server = context.get_server_def()
    if server is None:
        return {}
    return tf.train.ClusterSpec(server.cluster).as_dict()


def gpu_memory() -> int | None:
    """Returns the memory limit of the first GPU in bytes, if there is one."""
    for device in device_lib.list_local_devices():
        if device.device_type == "GPU":
            return device.memory_limit
    return None


def beside(x: Any) -> contextlib.AbstractContextManager:
    """Returns a scope for operations on a tensor's device, not yet known."""
    # Others, such as labels in a `tf.Variable` or a `RaggedTensor`, know best.
    if not isinstance(x, tf.Tensor):
        return contextlib.nullcontext()
    if tf.executing_eagerly():
        return tf.device(x.device)
    graph = tf.compat.v1.get_default_graph()
    if not tf.is_symbolic_tensor(x) or x.graph is not graph:
        x = graph.capture(x)
    return graph.colocate_with(x, ignore_existing=True)


def colocation_target(devices: Sequence[str]) -> Any:
    """Returns an object to colocate variables with: a device per replica."""
    return types.SimpleNamespace(_devices=devices)


def sums_over_replicas(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.CrossDeviceOps | None:
    """Returns the user's `cross_device_ops` of a strategy, or `None`."""
    extended = strategy.extended
    given = extended._cross_device_ops
    # TensorFlow has put its own in the place of one that was not given.
    return None if given is extended._collective_ops else given


def bytes_per_pack(strategy: tf.distribute.Strategy) -> int:
    """Returns the user's `bytes_per_pack` of a strategy, or 0."""
    options = getattr(strategy.extended, "_communication_options", None)
    return options.bytes_per_pack if options else 0


def read_profile(content: bytes) -> Any:
    """Returns a mutable `XSpace` from the content of a `*.xplane.pb` file."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(content)
    return space
