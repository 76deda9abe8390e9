"""The internals of TensorFlow and Keras that the library uses are there.

If a test fails on a new release, its name says what has changed, and its
docstring which promise of the library depends on it.
"""

import contextlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests.devices import KIND
from tests.tf_gpipe.step.executed_graph import executed_graph
from tf_gpipe import upstream
from tf_gpipe import upstream_server
from tf_gpipe.devices import slots

L = keras.layers
PACKAGE = pathlib.Path(tf_gpipe.__file__).parent


class Block(L.Layer):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(2)

    def build(self, input_shape):
        self.scale = self.add_weight(name="scale")
        self.count = self.add_weight(name="count", trainable=False)
        self.dense.build(input_shape)

    def call(self, x, training=None):
        self.add_loss(keras.ops.sum(self.scale))
        return self.dense(x) * self.scale


class LayersTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.block = Block()
        self.block(np.ones((1, 2)))

    def test_layers_within(self):
        """Nested layers are checked, counted, merged and placed."""
        found = upstream.layers_within(self.block)
        self.assertEqual(found, [self.block, self.block.dense])
        self.assertEmpty(upstream.layers_within(keras.ops.add))
        self.assertEmpty(upstream.layers_within(keras.Operation()))

    def test_name_scope_of(self):
        """A pipeline names the weights that it builds for `fit` as Keras."""
        with upstream.name_scope_of(self.block):
            with upstream.name_scope_of(self.block):
                variable = keras.Variable(0.0, name="v")
        self.assertEqual(variable.path, f"{self.block.name}/v")

    def test_convert_argument(self):
        """It casts the inputs of `fit` as Keras does those of a call."""
        for convert in (True, False):
            layer = L.Dense(2, dtype="mixed_bfloat16")
            layer._convert_input_args = convert
            dtype = "bfloat16" if convert else "float32"
            x, mask = tf.ones((1, 2)), tf.ones((1,), "bool")
            upstream.set_mask(x, mask)
            found = upstream.convert_argument(layer, x)
            self.assertEqual(found.dtype, dtype)
            self.assertIs(upstream.mask(found), mask)
            spec = keras.KerasTensor((None, 2), "float32")
            found = upstream.convert_argument(layer, spec)
            self.assertEqual(found.dtype, dtype)
            for x in (tf.ones((1, 2), "int32"), None):
                self.assertIs(upstream.convert_argument(layer, x), x)

    def test_own_variables(self):
        """Layers merge their state; tapes watch weights that may thaw."""
        self.block.trainable = False
        block = self.block
        self.assertEqual(upstream.own_weights(block), [block.scale])
        self.assertEqual(
            upstream.own_variables(block), [block.scale, block.count]
        )

    def test_set_trainable_alone(self):
        """What is frozen in a layer stays so in a pipeline and in a plan."""
        upstream.set_trainable_alone(self.block, False)
        self.assertFalse(self.block.trainable)
        self.assertTrue(self.block.dense.trainable)

    def test_count_as_called(self):
        """A pipeline is exported as ONNX by its plain model."""
        model = keras.Sequential([keras.Input((2,)), L.Dense(2)])
        upstream.count_as_called(model)
        other = keras.Sequential([keras.Input((2,)), L.Dense(2)])
        other(np.ones((1, 2)))
        self.assertEqual(model._called, other._called)

    def test_losses(self):
        """`add_loss` counts once, by the layer that has called it."""
        (loss,) = upstream.own_losses(self.block)
        with upstream.losses_kept([self.block, keras.Operation()]):
            self.block(np.ones((1, 2)))
        self.assertIs(upstream.own_losses(self.block)[0], loss)
        with keras.StatelessScope(collect_losses=True) as scope:
            self.block(np.ones((1, 2)))
        (loss,) = scope.losses
        self.assertFalse(upstream.take_loss(self.block.dense, loss))
        self.assertTrue(upstream.take_loss(self.block, loss))
        self.assertFalse(upstream.take_loss(self.block, loss))


class TensorsTest(tf.test.TestCase):
    def test_mask(self):
        """Masked steps are left out of losses, in every stage."""
        x = L.Masking()(np.array([[[1.0], [0.0]]]))
        self.assertAllEqual(upstream.mask(x), [[True, False]])
        self.assertIsNone(upstream.mask(tf.ones(2)))
        upstream.set_mask(x, tf.constant([[False, True]]))
        y = L.GlobalAveragePooling1D()(x)
        self.assertAllEqual(y, [[0.0]])

    def test_logits(self):
        """Cross-entropies take the logits behind a last softmax."""
        x = L.Softmax()(tf.constant([[100.0, 0.0]]))
        self.assertAllEqual(upstream.logits(x), [[100.0, 0.0]])
        self.assertIsNone(upstream.logits(tf.ones(2)))
        y = tf.identity(x)
        upstream.set_logits(y, tf.constant([[0.0, 100.0]]))
        loss = keras.losses.CategoricalCrossentropy()(tf.ones((1, 2)), y)
        self.assertAllClose(loss, 100.0)

    def test_is_optional(self):
        """Inputs that may be missing are refused by name."""
        self.assertTrue(upstream.is_optional(keras.Input((2,), optional=True)))
        self.assertFalse(upstream.is_optional(keras.Input((2,))))


class VariablesTest(tf.test.TestCase):
    def test_values_come_later(self):
        """A model too large for one device is never on one."""
        with keras.StatelessScope(initialize_variables=False):
            waiting = [keras.Variable("ones", (2,)) for _ in range(2)]
        self.assertFalse(upstream.has_value(waiting[0]))
        upstream.give_value(waiting[0])
        self.assertTrue(upstream.has_value(waiting[0]))
        self.assertAllEqual(waiting[0], [1, 1])
        # Else Keras would give it a value when it next makes a variable.
        upstream.forget_waiting(waiting)
        keras.Variable("ones", (2,))
        L.Dense(2).build((None, 2))
        self.assertFalse(upstream.has_value(waiting[1]))

    def test_another_variable_within(self):
        """Weights move to their stages, and functions are traced again."""
        variable = keras.Variable([1.0, 2.0])
        before = upstream.variable_id(variable)
        self.assertEqual(upstream.variable_id(variable), before)
        moved = tf.Variable([3.0, 4.0])
        upstream.set_tensorflow_variable(variable, moved)
        self.assertIs(upstream.tensorflow_variable(variable), moved)
        self.assertIs(upstream.handle_of(variable), moved.handle)
        self.assertAllEqual(variable, [3, 4])
        self.assertNotEqual(upstream.variable_id(variable), before)
        self.assertEqual(
            upstream.variable_id(variable), upstream.variable_id(moved)
        )

    def test_is_seed(self):
        """Micro-batches have seeds of their own."""
        layer = L.Dropout(0.5)
        self.assertTrue(upstream.is_seed(layer.seed_generator.state))
        self.assertFalse(upstream.is_seed(keras.Variable([1, 2])))

    def test_set_path(self):
        """A plan gives each weight the slots that a MultiOptimizer would."""
        variable = keras.Variable([1.0])
        upstream.set_path(variable, "a/b")
        self.assertEqual(variable.path, "a/b")

    def test_what_a_call_sees(self):
        """Layers that are alike but for names and weights share a trace."""
        one, other = (L.Dense(3, name=name) for name in ("a", "b"))
        for layer in (one, other):
            layer.build((None, 2))
        found = upstream.attributes_used_by_call(one)
        self.assertIn("units", found)
        self.assertIn("_trainable", found)
        self.assertNotIn("name", found)
        self.assertEqual(
            set(found), set(upstream.attributes_used_by_call(other))
        )
        # Not Keras's wrapper of the method.
        one.quantize = False
        self.assertIn("quantize", upstream.attributes_used_by_call(one))

    def test_what_a_call_of_keras_does_not_see(self):
        """Layers of Keras share a trace if their seeds differ."""
        unused = {"seed", "kernel_initializer", "_kernel_initializer"}
        for kind in (L.Dense, L.Dropout, L.MultiHeadAttention):
            layer = kind(1, 1) if kind is L.MultiHeadAttention else kind(1)
            self.assertFalse(unused.isdisjoint(vars(layer)))
            found = upstream.attributes_used_by_call(layer)
            self.assertTrue(unused.isdisjoint(found))

            class Own(kind):
                pass

            layer = Own(1, 1) if kind is L.MultiHeadAttention else Own(1)
            found = upstream.attributes_used_by_call(layer)
            self.assertFalse(unused.isdisjoint(found))

    def test_dynamic_backend(self):
        """Preprocessing layers of Keras can be compared."""
        backend = L.Rescaling(0.5).backend
        self.assertIsInstance(backend, upstream.DynamicBackend)
        self.assertEqual(vars(backend), {"_backend": "tensorflow"})

    def test_a_policy_by_path(self):
        """Layers with one map of policies share no trace if these differ."""
        half = keras.DTypePolicy("mixed_bfloat16")
        policies = keras.dtype_policies.DTypePolicyMap("float32", {"b": half})
        found = []
        for name in ("a", "b"):
            layer = L.Dense(3, dtype=policies, name=name)
            layer.build((None, 2))
            seen = upstream.attributes_used_by_call(layer)
            found.append(seen["_dtype_policy"][1].compute_dtype)
        self.assertEqual(found, ["float32", "bfloat16"])

    def test_casts(self):
        """Layers whose weights are cast differently share no trace."""
        for value in (True, False):
            variable = keras.Variable([1.0], autocast=value)
            self.assertEqual(upstream.casts(variable), value)


class StateOfKerasTest(tf.test.TestCase):
    def test_seed_generator(self):
        """Masks do not depend on stages, and a run repeats from its seed."""
        self.assertIsNone(upstream.seed_generator_of_keras())
        keras.random.normal((2,))
        self.assertIsNotNone(upstream.seed_generator_of_keras())
        generator = keras.random.SeedGenerator(3)
        upstream.set_seed_generator_of_keras(generator)
        self.assertIs(upstream.seed_generator_of_keras(), generator)
        before = generator.state.numpy()
        keras.random.normal((2,))
        self.assertNotAllEqual(generator.state, before)
        upstream.set_seed_generator_of_keras(None)
        keras.random.normal((2,))
        self.assertIsNot(upstream.seed_generator_of_keras(), generator)
        self.assertIsNotNone(upstream.seed_generator_of_keras())

    def test_without_autocast(self):
        """A layer whose dtype policy is not the model's keeps its dtype."""
        variable, seen = keras.Variable([1.0]), []

        class Layer(L.Layer):
            def call(self, x):
                seen.append(variable.value.dtype)
                with upstream.without_autocast():
                    seen.append(variable.value.dtype)
                seen.append(variable.value.dtype)
                return x

        Layer(dtype="mixed_bfloat16")(np.ones((1, 2)))
        self.assertEqual(seen, [tf.bfloat16, tf.float32, tf.bfloat16])

    def test_writes_hdf5(self):
        """HDF5 files of a user's class of pipeline can be loaded."""
        seen = []

        class Layer(L.Layer):
            def get_config(self):
                seen.append(bool(upstream.writes_hdf5()))
                return super().get_config()

        model = keras.Sequential([keras.Input((2,)), Layer()])
        folder = self.get_temp_dir()
        model.save(f"{folder}/a.keras")
        self.assertEqual(set(seen), {False})
        seen.clear()
        model.save(f"{folder}/a.h5")
        self.assertEqual(set(seen), {True})


class ModelsTest(tf.test.TestCase, parameterized.TestCase):
    def make(self):
        x = keras.Input((2,))
        hidden = L.Dense(2)(x)
        return keras.Model({"x": x}, [L.Add()([hidden, x])])

    def test_graph(self):
        """Functional models are cut in the order of their layers."""
        model = self.make()
        self.assertIsInstance(model, upstream.Functional)
        names = [node.operation.name for node in upstream.nodes_of(model)]
        self.assertEqual(names, [x.name for x in model.layers[1:]])
        self.assertEqual(set(upstream.inputs_of(model)), {"x"})
        self.assertIsInstance(upstream.outputs_of(model), list)
        self.assertEqual(upstream.unpack_singleton([3]), 3)
        self.assertEqual(upstream.unpack_singleton([3, 4]), [3, 4])

    def test_conversion_of_inputs(self):
        """Models within others are compared by what they do, not by name."""

        def made(**kwargs):
            x = keras.Input((2,), **kwargs)
            return keras.Model([x], L.Dense(2)(x))

        def described(model):
            names, *rest, _, _ = upstream.conversion_of_inputs(model)
            return names, *rest

        self.assertEqual(described(made()), described(made()))
        self.assertNotEqual(described(made()), described(made(dtype="float16")))
        self.assertNotEqual(described(made()), described(made(name="x")))

    def test_graph_of_a_sequential(self):
        """`from_model` takes a built `Sequential`."""
        model = keras.Sequential([L.Dense(2)])
        self.assertIsNone(upstream.graph_of(model))
        model.build((None, 2))
        self.assertIsInstance(upstream.graph_of(model), upstream.Functional)

    def test_runs_its_graph(self):
        """Models within a model are opened if that changes nothing."""

        class Own(keras.Model):
            def call(self, x):
                return super().call(x)

        class Masking(keras.Sequential):
            def compute_mask(self, inputs, previous_mask):
                return previous_mask

        x = keras.Input((2,))
        for cls, runs in ((keras.Model, True), (Own, False)):
            self.assertEqual(upstream.runs_its_graph(cls(x, -x)), runs)
        for model, runs in (
            (keras.Sequential(), True),
            (keras.Sequential([x, L.Dense(2)]), True),
            (Masking([x, L.Dense(2)]), False),
            (L.Dense(2), False),
            (L.TimeDistributed(L.Dense(2)), False),
        ):
            self.assertEqual(upstream.runs_its_graph(model), runs)
        model = keras.Sequential([x, L.Dense(2)])
        model.activity_regularizer = keras.regularizers.L2()
        self.assertFalse(upstream.runs_its_graph(model))
        model = keras.Model(x, -x)
        model.call = lambda x: x
        self.assertFalse(upstream.runs_its_graph(model))

    def test_copied_operations(self):
        """`tune` trains a copy of a model, and leaves the model alone."""
        model = self.make()
        model.compile("adam", lambda y, x: keras.ops.mean(x - y))
        add = model.layers[-1]
        called = list(add._inbound_nodes)
        twins = {}

        def copied(x):
            if x is add:
                return twins.setdefault("add", upstream.uncalled(x))
            return type(x).from_config(x.get_config())

        copy = upstream.with_copied_operations(model, copied)
        self.assertFalse(copy.compiled)
        self.assertEqual(set(copy.input), {"x"})
        self.assertIsInstance(copy.output, list)
        self.assertIn(twins["add"], copy.layers)
        self.assertEqual(add._inbound_nodes, called)
        self.assertIsNot(copy.weights[0], model.weights[0])
        inputs = keras.Input((2,), optional=True, name="maybe")
        copy = upstream.with_copied_operations(
            keras.Model(inputs, L.Identity()(inputs)), upstream.uncalled
        )
        self.assertTrue(upstream.is_optional(copy.inputs[0]))
        self.assertEqual(copy.inputs[0].name, "maybe")

    def test_renamed(self):
        """A plan's cost function is asked with the names of all layers."""
        layer = L.Dense(2, name="a")
        layer.build((1, 2))
        twin = upstream.renamed(layer, "b")
        self.assertEqual((layer.name, twin.name), ("a", "b"))
        self.assertIs(twin.kernel, layer.kernel)
        self.assertEqual(twin.count_params(), 6)

    def test_lambdas(self):
        """A copied `Lambda` gets the function whose code was copied."""
        layer = L.Lambda(lambda x: L)
        with self.assertRaisesRegex(ValueError, "unsafe|safe_mode"):
            type(layer).from_config(layer.get_config())
        with upstream.unsafe_deserialization():
            copy = type(layer).from_config(layer.get_config())
        self.assertTrue(upstream.made_from_code(copy.function))
        self.assertFalse(upstream.made_from_code(layer.function))
        self.assertFalse(upstream.made_from_code(3))

    def test_only_checks(self):
        """Tasks of KerasHub can become pipelines."""
        task = type("Task", (keras.Model,), {"__call__": lambda self: None})
        self.assertFalse(upstream.forwards_to_keras(task, "__call__"))
        task.__module__ = "keras_hub.src.models.task"
        self.assertTrue(upstream.forwards_to_keras(task, "__call__"))
        self.assertFalse(upstream.forwards_to_keras(task, "call"))

    def test_training_of_a_call_within(self):
        """Layers of a model within a model run in the mode of its call."""
        x = keras.Input((2,))
        inner = keras.Model(x, L.Dropout(0.5)(x, training=True))
        (node,) = upstream.nodes_of(keras.Model(x, inner(x, training=False)))
        _, _, training = upstream.arguments_of_call(
            inner, node.arguments.args, node.arguments.kwargs
        )
        self.assertIs(training, False)
        (node,) = upstream.nodes_of(inner)
        kwargs = node.arguments.kwargs
        self.assertIs(kwargs["training"], True)
        for mode, expected in ((None, True), (False, False)):
            found = upstream.with_training(node.operation, kwargs, mode)
            self.assertIs(found["training"], expected)
        self.assertEqual(upstream.with_training(keras.ops, {}, True), {})
        operation = keras.ops.relu(x)._keras_history.operation
        for layer in (L.Dropout(0.5), L.Identity(), operation):
            spec = upstream.spec_function(layer)(x, training=True)
            self.assertEqual(spec.shape, x.shape)
        spec = upstream.spec_function(L.Identity(dtype="bfloat16"))(x)
        self.assertEqual(spec.dtype, "bfloat16")
        # As in Keras.
        self.assertAllEqual(
            inner(np.ones((2, 2)), training=False), np.ones((2, 2))
        )

    def test_layers_within_that_are_not_built(self):
        """Keras builds them as the layer around them runs."""
        layer = L.Dense(2, activation=L.PReLU())
        x = layer(keras.Input((2,)))
        self.assertEqual(x.shape, (None, 2))
        self.assertFalse(upstream.is_to_be_built(layer))
        self.assertTrue(upstream.is_to_be_built(layer.activation))
        self.assertFalse(upstream.is_to_be_built(L.Dropout(0.5)))
        with keras.StatelessScope(initialize_variables=False):
            spec = upstream.run_on_specs(layer)(keras.KerasTensor((None, 2)))
        self.assertEqual(spec.shape, (None, 2))
        self.assertTrue(layer.activation.built)
        self.assertFalse(upstream.has_value(layer.activation.alpha))

    def test_arguments_of_a_call(self):
        """Models within a model may have inputs of any structure."""
        a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
        by_list = keras.Model([b, a], a - b)
        by_name = keras.Model({"b": b, "a": a}, a - b)
        call = upstream.arguments_of_call
        for model, given, expected in (
            (by_list, ([1, 2],), [1, 2]),
            (by_list, ((1, 2),), [1, 2]),
            (by_list, ({"a": 1, "b": 2, "c": 3},), [2, 1]),
            (by_name, ({"b": 2, "a": 1},), [1, 2]),
            (keras.Model(a, -a), (1,), [1]),
            (keras.Model([a], -a), (1,), [1]),
            (keras.Model(a, -a), ([1],), [1]),
            (keras.Model(a, -a), ({"a": 1},), [1]),
        ):
            self.assertEqual(call(model, given, {})[0], expected)
        self.assertEqual(
            call(by_list, ([1, 2], True), {"mask": [3, None]}),
            ([1, 2], [3, None], True),
        )
        for given, kwargs in (
            (([1, 2, 3],), {}),
            (({"a": 1},), {}),
            (([1, 2],), {"scale": 3}),
            (([1, 2],), {"training": tf.constant(True)}),
        ):
            self.assertIsNone(call(by_list, given, kwargs))
        self.assertEqual(
            upstream.without_masks({"mask": 1, "key_mask": 2, "scale": 3}),
            {"scale": 3},
        )

    @parameterized.product(
        given=((4,), (4, 1), (4, 1, 1)), sequential=(True, False)
    )
    def test_taken(self, given, sequential):
        """A model's inputs have the dtypes and the rank that it asks for."""
        x = keras.Input((4, 1), dtype="bfloat16", name="x")
        model = keras.Model(x, L.Identity()(x))
        if sequential:
            model = keras.Sequential([x, L.Rescaling(1.0)])
        value = tf.reshape(tf.range(4.0) + 257.0, (1, *given))
        mask = tf.ones((1, 4), "bool")
        upstream.set_mask(value, mask)
        (expected,) = upstream.graph_of(model)._standardize_inputs(value)
        for like in (value, {"x": value}):
            found = upstream.convert_nested_input(model, 0, like, None)
            self.assertAllEqual(found, expected)
            self.assertEqual(found.dtype, expected.dtype)
            self.assertIs(upstream.mask(found), mask)
        other = tf.zeros((1, 4), "bool")
        found = upstream.convert_nested_input(model, 0, value, other)
        self.assertIs(upstream.mask(found), other)
        self.assertIs(upstream.mask(value), mask)
        spec = keras.KerasTensor((None, *given), "float32")
        found = upstream.convert_nested_input(model, 0, spec, None)
        self.assertEqual(found.shape, (None, *expected.shape[1:]))
        self.assertEqual(found.dtype, "bfloat16")

    def test_configs(self):
        """Saved pipelines are loaded without a copy on one device."""
        model = self.make()
        found = upstream.functional_arguments(model.get_config(), None)
        self.assertContainsSubset(["inputs", "outputs", "name"], found)
        dense = {"class_name": "Dense", "config": L.Dense(3).get_config()}
        self.assertEqual(upstream.layer_from_hdf5(dense, None).units, 3)

    def test_registered_name(self):
        """A pipeline of a user's class is saved by a name that loads it."""

        @keras.saving.register_keras_serializable(package="upstream_test")
        class First(L.Layer):
            pass

        class Second(L.Layer):
            pass

        name = upstream.registered_name(First)
        self.assertEqual(name, "upstream_test>First")
        upstream.register_as(Second, name)
        self.assertEqual(upstream.registered_name(Second), name)

    def test_strategy_of(self):
        """Pipelines are replicas of the strategy that they were made under."""
        self.assertIsNone(upstream.strategy_of(self.make()))
        strategy = tf.distribute.MirroredStrategy([f"{KIND}:0", f"{KIND}:1"])
        with strategy.scope():
            self.assertIs(upstream.strategy_of(self.make()), strategy)

    def test_carry_dtype_policy(self):
        """`compile` scales losses of a pipeline in float16."""
        model = self.make()
        half = keras.layers.Dense(1, dtype="mixed_float16")
        upstream.carry_dtype_policy(half, model)
        self.assertEqual(model.dtype_policy.name, "mixed_float16")

    def test_compiled_parts(self):
        """`verify` leaves losses and metrics as they were."""
        model = self.make()
        model.compile(loss="mse", metrics=["mae"])
        self.assertEqual(
            [type(x).__name__ for x in upstream.compiled_parts(model)],
            ["CompileLoss", "CompileMetrics"],
        )

    def test_tracked(self):
        """A pipeline keeps what a user's model has besides its layers."""
        model = self.make()
        metric = keras.metrics.Mean()
        with upstream.untracked():
            model.unseen = metric
        model.head = L.Dense(2)
        self.assertEmpty(upstream.tracked(model)["metrics"])
        upstream.track(model, "metrics", metric)
        upstream.track(model, "metrics", metric)
        self.assertLen(upstream.tracked(model)["metrics"], 1)
        self.assertIs(upstream.tracked(model)["layers"][-1], model.head)
        self.assertIsInstance(model._tracker, upstream.Tracker)

    def test_unwrapped(self):
        """`verify` restores what TensorFlow's wrappers of lists hold."""
        module = tf.Module()
        module.items, module.names = [1], {"a": 2}
        self.assertEqual(upstream.unwrapped(module.items), [1])
        self.assertEqual(upstream.unwrapped(module.names), {"a": 2})
        self.assertIsNone(upstream.unwrapped(module))
        self.assertIsNone(upstream.unwrapped([1]))

    @parameterized.parameters(
        (keras.Model, "_compute_loss"),
        (keras.Model, "_get_metrics_result_or_logs"),
        (keras.Model, "_get_regularization_losses"),
        (keras.Model, "_make_function"),
        (keras.Model, "_maybe_symbolic_build"),
        (keras.Model, "_trackable_children"),
        (keras.Sequential, "_maybe_rebuild"),
        (upstream.Functional, "_assert_input_compatibility"),
        (upstream.Functional, "_convert_inputs_to_tensors"),
        (upstream.Functional, "_standardize_inputs"),
    )
    def test_methods(self, cls, name):
        """Pipelines override these private methods, or call them."""
        self.assertTrue(callable(getattr(cls, name)))

    def test_overridden_methods_are_called(self):
        """Hosts agree on shapes, and layers are added before stages are cut."""
        called = []

        def noting(name):
            def method(self, *args, **kwargs):
                called.append(name)
                return getattr(super(Model, self), name)(*args, **kwargs)

            return method

        class Model(keras.Sequential):
            _maybe_rebuild = noting("_maybe_rebuild")
            _maybe_symbolic_build = noting("_maybe_symbolic_build")
            _make_function = noting("_make_function")
            _get_metrics_result_or_logs = noting("_get_metrics_result_or_logs")
            _get_regularization_losses = noting("_get_regularization_losses")

        model = Model([L.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(np.ones((2, 2)), np.ones((2, 2)), verbose=0)
        self.assertEqual(
            set(called), {name for name in vars(Model) if name in called}
        )
        self.assertLen(set(called), 5)

    def test_losses_of_a_step(self):
        """The loss of the whole mini-batch includes the losses of layers."""
        model = self.make()
        model.compile("sgd", "mse")
        upstream.add_losses([(model, tf.constant(3.0))])
        upstream.add_losses([(model.layers[0], tf.constant(4.0))])
        self.assertAllEqual(model.losses, [3.0, 4.0])
        self.assertAllEqual(model.layers[0].losses, [4.0])
        upstream.clear_losses(model)
        self.assertEmpty(model.losses)
        self.assertEmpty(model.layers[0].losses)
        self.assertEqual(model._loss_tracker.name, "loss")


class DataTest(tf.test.TestCase):
    def epochs(self, *args, **kwargs):
        """Returns the iterator over epochs that `fit` makes."""
        found = []

        class Model(keras.Sequential):
            def _maybe_symbolic_build(self, iterator=None, data_batch=None):
                found.append(iterator)

        model = Model([keras.Input((1,)), L.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(*args, epochs=0, verbose=0, **kwargs)
        return found[0]

    def test_kinds(self):
        """A checkpoint refuses data in which it cannot find its place again."""
        x = np.zeros((6, 1))
        dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(2)

        class Rows(keras.utils.PyDataset):
            def __len__(self):
                return 3

            def __getitem__(self, i):
                return x[:2], x[:2]

        arrays = self.epochs(x, x)
        self.assertEqual(upstream.kind_of_data(arrays), upstream.ARRAYS)
        self.assertTrue(upstream.shuffles_arrays(arrays))
        unshuffled = self.epochs(x, x, shuffle=False)
        self.assertFalse(upstream.shuffles_arrays(unshuffled))
        of_tf = self.epochs(dataset, shuffle=False)
        self.assertEqual(upstream.kind_of_data(of_tf), upstream.TF_DATA)
        self.assertIs(upstream.dataset_of(of_tf), dataset)
        self.assertEqual(
            upstream.kind_of_data(self.epochs(Rows())), upstream.PY_DATASET
        )
        generator = self.epochs(((x, x) for _ in "ab"), steps_per_epoch=1)
        self.assertIsNone(upstream.kind_of_data(generator))

    def test_pass_by(self):
        """Training goes on within an epoch, at the right step."""
        epochs = self.epochs(
            tf.data.Dataset.range(3), shuffle=False, steps_per_epoch=None
        )

        def after_one(executions):
            for begin, end, batches in executions:
                number = int(next(batches))
                if begin:
                    yield begin, end, number

        upstream.replace_next_epoch(epochs, after_one)
        self.assertEqual(list(epochs), [(1, 1, 1), (2, 2, 2)])
        # Then it goes through all of them again.
        self.assertEqual(
            [(begin, int(next(batches))) for begin, _, batches in epochs],
            [(0, 0), (1, 1), (2, 2)],
        )
        self.assertEqual(epochs.steps_per_execution, 1)

    def test_call_after_epochs(self):
        """Before the validation, also where the data ends unexpectedly."""
        numbers = np.ones((3, 1), "float32")
        data = tf.data.Dataset.from_tensor_slices((numbers, numbers)).batch(1)
        called = []

        class Model(keras.Sequential):
            def _maybe_symbolic_build(self, iterator=None, data_batch=None):
                if data_batch is None and not called:
                    called.append("made")
                    upstream.call_after_epochs(
                        iterator, lambda: called.append("end")
                    )

        def fit(steps, error=None):
            def step(batch, logs=None):
                called.append("step")
                if error is not None:
                    raise error

            called.clear()
            model = Model([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            callback = keras.callbacks.LambdaCallback(on_train_batch_end=step)
            callback.on_test_begin = lambda logs: called.append("test")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # The data ends early.
                model.fit(
                    data.filter(lambda x, y: True),
                    epochs=1,
                    verbose=0,
                    steps_per_epoch=steps,
                    validation_data=(numbers, numbers),
                    callbacks=[callback],
                )

        for steps in (None, 2, 9):
            fit(steps)
            count = min(3, steps or 3)
            self.assertEqual(called, ["made", *count * ["step"], "end", "test"])
        with self.assertRaises(ZeroDivisionError):
            fit(2, ZeroDivisionError())
        self.assertEqual(called, ["made", "step"])

    def test_seeds(self):
        """Data whose order cannot be repeated is refused."""
        tf.random.set_seed(3)
        self.assertEqual(upstream.global_seed(), 3)
        tf.compat.v1.set_random_seed(None)
        self.addCleanup(tf.random.set_seed, 0)
        numbers = tf.data.Dataset.range(4)
        self.assertEqual(upstream.seeds_of(numbers), [])
        (seeds,) = upstream.seeds_of(numbers.shuffle(2, seed=5))
        self.assertIn(5, seeds)
        self.assertEqual(upstream.seeds_of(numbers.shuffle(2)), [(0, 0)])
        self.assertEqual(
            upstream.seeds_of(
                numbers.map(lambda x: x + tf.random.uniform((), 0, 9, x.dtype))
            ),
            [(0, 0)],
        )
        within = numbers.flat_map(lambda _: numbers.shuffle(2)).batch(2)
        self.assertIn(
            (0, 0),
            [
                seeds
                for x in upstream.datasets_within(within)
                for seeds in upstream.seeds_of(x)
            ],
        )

    def test_order(self):
        """Data whose order is left to chance is refused."""
        numbers = tf.data.Dataset.range(4)
        for deterministic in (None, True, False):
            how = {"num_parallel_calls": 2, "deterministic": deterministic}
            for name, x in (
                ("map", numbers.map(lambda x: x, **how)),
                ("batch", numbers.batch(2, **how)),
                ("interleave", numbers.interleave(lambda x: numbers, **how)),
                (
                    "within a function",
                    numbers.flat_map(
                        lambda x, how=how: numbers.map(lambda x: x, **how)
                    ),
                ),
            ):
                self.assertEqual(
                    upstream.has_open_order(x), deterministic is False, name
                )

    def test_draws_in_parallel(self):
        """Data that draws other numbers each time is refused."""
        numbers = tf.data.Dataset.range(4)
        table = tf.constant([1, 2, 3, 4])
        flip = L.RandomFlip(seed=1)
        for draws, function in (
            (True, lambda x: tf.random.uniform((), seed=1)),
            (True, lambda x: flip(tf.zeros((1, 2, 2, 1)), training=True)),
            (False, lambda x: tf.random.stateless_uniform((), [1, x])),
            (False, lambda x: tf.gather(table, x)),
        ):
            parallel = numbers.map(function, num_parallel_calls=2)
            self.assertEqual(upstream.draws_in_parallel(parallel), draws)
            one_by_one = numbers.map(function)
            self.assertFalse(upstream.draws_in_parallel(one_by_one))
            one_call = numbers.map(function, num_parallel_calls=1)
            self.assertFalse(upstream.draws_in_parallel(one_call))
        # Each iterator of a data set draws by itself.
        shuffled = numbers.interleave(
            lambda x: numbers.shuffle(4, seed=1), num_parallel_calls=2
        )
        self.assertFalse(upstream.draws_in_parallel(shuffled))

    def test_lasting_states(self):
        """A validation must not change the order of the next epoch."""
        numbers = tf.data.Dataset.range(8)
        noise = L.GaussianNoise(0.5, seed=1)
        for lasts, data in (
            (True, numbers.shuffle(8, seed=1)),
            (False, numbers.shuffle(8, 1, reshuffle_each_iteration=False)),
            (
                True,
                tf.data.Dataset.random(1, rerandomize_each_iteration=True),
            ),
            (False, tf.data.Dataset.random(1).take(9)),
            (
                True,
                numbers.map(lambda x: noise(tf.zeros((1, 2)), training=True)),
            ),
            (
                False,
                numbers.map(lambda x: tf.random.uniform((1,), seed=1)),
            ),
        ):
            self.assertEqual(len(upstream.lasting_states(data)), lasts)
            first = data.take(4)
            before = [x.numpy().tolist() for x in first]
            # Drawn by another iterator, between two of `first`.
            self.assertEqual(
                [x.numpy().tolist() for x in data.take(8)][:4] != before, lasts
            )
            self.assertEqual(
                upstream.lasting_states(first).keys(),
                upstream.lasting_states(data).keys(),
            )

    def test_changes_between_epochs(self):
        """Only such data may come in another order after a restart."""

        class Rows(keras.utils.PyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, i):
                return np.zeros((2, 1)), np.zeros((2, 1))

        class Shuffled(Rows):
            def on_epoch_end(self):
                pass

        for kind, changes in ((Rows, False), (Shuffled, True)):
            found = upstream.changes_between_epochs(kind())
            self.assertEqual(found, changes)

    def test_sizes(self):
        """A run does not go on with other data."""
        numbers = tf.data.Dataset.range(7)
        self.assertEqual(upstream.rows_of(numbers), [7])
        self.assertEqual(upstream.batch_sizes_of(numbers), [])
        for x in (
            numbers.batch(2),
            numbers.padded_batch(2),
            numbers.batch(2, num_parallel_calls=2),
        ):
            self.assertEqual(upstream.batch_sizes_of(x), [2])
            self.assertEqual(upstream.rows_of(x), [])
        x = np.zeros((7, 1))
        arrays = self.epochs(x, x, batch_size=2)
        self.assertEqual(upstream.rows_of_arrays(arrays), (7, 2))

    def test_start_at_epoch(self):
        """`fit` goes on in the epoch of a checkpoint, once."""
        epochs = []

        class Starting(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                upstream.start_at_epoch(self.model, 2)

            def on_epoch_begin(self, epoch, logs=None):
                epochs.append(epoch)
                upstream.start_at_epoch(self.model, None)

        model = keras.Sequential([keras.Input((1,)), L.Dense(1)])
        model.compile("sgd", "mse")
        x = np.zeros((2, 1))
        model.fit(x, x, epochs=4, verbose=0, callbacks=[Starting()])
        model.fit(x, x, epochs=1, verbose=0, callbacks=[])
        self.assertEqual(epochs, [2, 3])
        self.assertEqual(model.history.epoch, [0])

    def test_monitors(self):
        """Checkpoints hold the state of callbacks that monitor a metric."""
        stop = keras.callbacks.EarlyStopping()
        callbacks = [keras.callbacks.TerminateOnNaN(), stop]
        self.assertEqual(upstream.monitors(callbacks), [stop])
        self.assertEqual(upstream.monitors(stop), [stop])
        self.assertEqual(upstream.monitors(None), [])
        listed = keras.callbacks.CallbackList(callbacks)
        self.assertEqual(upstream.monitors(listed), [stop])

    def test_callbacks_of(self):
        """A run has at most one callback that restores a checkpoint."""
        stop = keras.callbacks.EarlyStopping()
        end = keras.callbacks.TerminateOnNaN()
        listed = keras.callbacks.CallbackList([stop, end])
        kinds = keras.callbacks.EarlyStopping, keras.callbacks.TerminateOnNaN
        for callbacks in ([stop, end], (stop, [end]), listed):
            self.assertEqual(
                upstream.callbacks_of(kinds, callbacks), [stop, end]
            )
            self.assertEqual(upstream.callbacks_of(kinds[1], callbacks), [end])
        self.assertEqual(upstream.callbacks_of(kinds, None), [])

    def test_swaps(self):
        """Checkpoints tell whether weights are averages."""
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
        model.compile(keras.optimizers.SGD(use_ema=True), "mse")
        self.assertFalse(swap._ema_weights_in_model)
        model.fit(np.ones((2, 2)), np.ones(2), verbose=0, callbacks=[swap])
        self.assertTrue(swap._ema_weights_in_model)


class LossesTest(tf.test.TestCase):
    def test_call_with_each(self):
        """Each loss is divided by its divisor for the mini-batch."""
        x = keras.Input((2,))
        model = keras.Model(x, [L.Dense(1)(x), L.Dense(1)(x)])
        model.compile(loss=["mse", "mae"])
        compile_loss, _ = upstream.compiled_parts(model)
        self.assertEqual(upstream.loss_as_given(compile_loss), ["mse", "mae"])
        y = [tf.ones((2, 1)), tf.ones((2, 1))]
        compile_loss(y, y)
        names = []

        def instead(i, loss, y_true, y_pred, sample_weight=None):
            names.append((i, loss.name))
            return tf.constant(2.0)

        total = upstream.call_with_each(
            compile_loss, instead, lambda losses: losses(y, y)
        )
        self.assertAllEqual(total, 4.0)
        self.assertEqual(names, [(0, "mse"), (1, "mae")])
        self.assertAllEqual(compile_loss(y, y), 0.0)

    def test_counted(self):
        """Masked and weighted losses are those of the mini-batch."""
        found = upstream.value_weights(
            tf.constant([1.0, 2.0]), tf.constant([True, False]), "float64"
        )
        self.assertAllEqual(found, [1.0, 0.0])

    def test_scaled_for_replicas(self):
        """Replicas of pipelines train as one device does."""
        strategy = tf.distribute.MirroredStrategy([f"{KIND}:0", f"{KIND}:1"])
        with strategy.scope():
            scaled = upstream.scaled_for_replicas(tf.constant(4.0))
            self.assertAllEqual(scaled, 2.0)
            self.assertAllEqual(upstream.unscaled_for_replicas(scaled), 4.0)


class OptimizersTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.weights = [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
        self.optimizer = keras.optimizers.AdamW(0.1, use_ema=True)
        self.optimizer.exclude_from_weight_decay([self.weights[1]])
        self.assertEqual(upstream.weights_of(self.optimizer), [])
        self.optimizer.build(self.weights)

    def test_slots(self):
        """A weight's slots are on its device, and in the plan."""
        self.assertEqual(upstream.weights_of(self.optimizer), self.weights)
        slots = [
            x
            for x in upstream.slot_lists(self.optimizer)
            if len(x) == 2 and isinstance(x[0], keras.Variable)
        ]
        self.assertEqual([x[1].shape for x in slots], [(2,)] * len(slots))
        self.assertGreaterEqual(len(slots), 2)

    def test_updates(self):
        """Steps run where weights are, and read scalars once."""
        names = [x.name for x in upstream.scalars_of(self.optimizer)]
        self.assertEqual(names, ["iteration", "learning_rate"])
        called = []
        for name in upstream.UPDATES:
            method = getattr(self.optimizer, name)

            def note(*args, name=name, method=method):
                called.append(name)
                return method(*args)

            setattr(self.optimizer, name, note)
        self.optimizer.apply([tf.ones(1), tf.ones(2)])
        self.assertEqual(set(called), {*upstream.UPDATES})

    def test_sum_gradients_by(self):
        """Replicas sum the gradients of each stage on its devices."""
        called = []

        def sums(pairs):
            called.append(len(pairs))
            return pairs

        strategy = tf.distribute.MirroredStrategy([f"{KIND}:0", f"{KIND}:1"])
        with strategy.scope():
            weight = keras.Variable([1.0])
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weight])
        upstream.sum_gradients_by(optimizer, sums)

        def step():
            optimizer.apply([tf.ones(1)])

        strategy.run(tf.function(step, autograph=False))
        self.assertEqual(set(called), {1})

    def move(self, weight):
        """Moves a weight; returns the function from the old to the new id."""
        before = upstream.variable_id(weight)
        upstream.set_tensorflow_variable(weight, tf.Variable([1.0]))
        new = upstream.variable_id(weight)
        return lambda key: new if key == before else key

    def test_weights_that_move_before_the_build(self):
        """They still do not decay."""
        self.optimizer.exclude_from_weight_decay([self.weights[0]])
        newest_id = self.move(self.weights[0])
        upstream.rekey_weights(self.optimizer, newest_id)
        self.assertFalse(
            self.optimizer._use_weight_decay(self.weights[0].value)
        )

    def test_find_weights_again(self):
        """Training goes on after `rebalance`, with the same slots."""
        inner = [self.optimizer]
        inner.append(keras.optimizers.SGD(0.1, momentum=0.5))
        inner[1].build(self.weights[:1])
        newest_id = self.move(self.weights[0])
        for x in inner:
            upstream.rekey_weights(x, newest_id)
            x.apply([tf.ones(1)] + [tf.zeros(2)] * (x is inner[0]))
        self.assertNotAllClose(self.weights[0], [1.0])
        # Neither by a gradient, nor by decay.
        self.assertAllEqual(self.weights[1], [2.0, 3.0])


class UnbuiltTest(tf.test.TestCase, parameterized.TestCase):
    """Optimizers are planned and tried that Keras cannot write into a file."""

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

    class Own(keras.optimizers.Optimizer):
        def __init__(self, factor):
            super().__init__(0.1)
            self.factor = factor
            self.slots = []
            self.count = keras.Variable(3.0)

        def build(self, variables):
            super().build(variables)
            for x in variables:
                self.slots.append(self.add_variable_from_reference(x, "slot"))

        def update_step(self, gradient, variable, learning_rate):
            slot = self.slots[self._get_variable_index(variable)]
            self.assign(slot, gradient * self.factor)

    @staticmethod
    def chosen():
        adam = keras.optimizers.Adam()
        return keras.optimizers.MultiOptimizer(lambda variable: adam)

    @parameterized.named_parameters(
        ("schedule", lambda: keras.optimizers.Adam(UnbuiltTest.Schedule())),
        ("function", lambda: keras.optimizers.Nadam(lambda: 0.1)),
        ("class", lambda: UnbuiltTest.Own(3)),
        ("averages", lambda: keras.optimizers.SGD(use_ema=True)),
        (
            "accumulating",
            lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        ),
        (
            "loss scale",
            lambda: keras.optimizers.LossScaleOptimizer(UnbuiltTest.Own(3)),
        ),
        (
            "several",
            lambda: keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(
                    keras.optimizers.Adam(), {"a": keras.optimizers.SGD()}
                )
            ),
        ),
        ("chosen", lambda: UnbuiltTest.chosen()),
    )
    def test_unbuilt(self, make):
        weights = [keras.Variable(tf.ones(n), name="a") for n in (1, 2)]
        optimizer = make()
        for built in (False, True):
            if built:
                optimizer.build(weights)
                optimizer.apply([tf.ones(1), tf.ones(2)])
            before = [x.numpy() for x in optimizer.variables]
            copy = upstream.unbuilt(optimizer)
            self.assertIs(type(copy), type(optimizer))
            self.assertEqual(copy.name, optimizer.name)
            self.assertEqual((copy.built, optimizer.built), (False, built))
            copy.build(weights)
            copy.apply([tf.ones(1), tf.ones(2)])
            self.assertAllClose(
                [x.numpy() for x in optimizer.variables], before
            )
            own = {id(x) for x in optimizer.variables}
            self.assertTrue(own.isdisjoint(map(id, copy.variables)))
            if built:
                found, expected = (
                    sorted(
                        tuple(y.shape)
                        for inner in slots.with_inner(x)
                        for each in upstream.slot_lists(inner)
                        for y in each
                        if isinstance(y, keras.Variable)
                    )
                    for x in (copy, optimizer)
                )
                self.assertEqual(found, expected)

    def test_in_a_trace(self):
        optimizer = keras.optimizers.Adam()

        @tf.function
        def traced():
            with tf.Graph().as_default():
                upstream.unbuilt(optimizer)
            return 1

        self.assertEqual(traced(), 1)


class TapesTest(tf.test.TestCase):
    def test_tapes_record(self):
        """A pipeline is recorded by whatever tape is around its call."""
        self.assertFalse(upstream.tapes_record())
        with tf.GradientTape() as tape:
            self.assertTrue(upstream.tapes_record())
            with tape.stop_recording():
                self.assertFalse(upstream.tapes_record())

    def test_stopped(self):
        """Layers may recompute themselves within a stage."""
        seen = []

        @tf.recompute_grad
        def square(x):
            before = upstream.tapes_are_stopped()
            with upstream.tapes_restarted():
                seen.append((before, upstream.tapes_are_stopped()))
            self.assertEqual(upstream.tapes_are_stopped(), before)
            return x * x

        x = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = square(x)
        self.assertEqual(seen, [(True, False)])
        self.assertAllEqual(tape.gradient(y, x), 6.0)

    def test_watch_as_read(self):
        """A layer's own remat may read weights only in its gradient."""
        x = tf.Variable(3.0)
        with tf.GradientTape() as tape:
            upstream.watch_as_read(x)
        self.assertLen(tape.watched_variables(), 1)

    def test_record_gradient(self):
        """Second derivatives in training mode are refused, not zero."""
        x, y = tf.constant(3.0), tf.constant(4.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            upstream.record_gradient([y], [x], lambda arrived: [5 * arrived])
        self.assertAllEqual(tape.gradient(y, x), 5.0)

    def test_with_gradient(self):
        """The gradient of a projection's weights is one product."""
        x = tf.constant(3.0)

        def slope():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.math.softplus(x)
            return tape.gradient(y, x)

        def other(operation, gradient):
            return operation.inputs[0] * gradient

        own = slope()
        found = upstream.with_gradient("Softplus", other, slope)
        self.assertAllEqual(found, 3.0)
        found = upstream.with_gradient("Softplus", lambda *_: None, slope)
        self.assertAllEqual(found, own)
        self.assertAllEqual(slope(), own)


def _rewriter(config):
    """Returns the options of TensorFlow's optimisers in a `ConfigProto`."""
    config = tf.compat.v1.ConfigProto.FromString(config)
    return config.graph_options.rewrite_options


@contextlib.contextmanager
def _optimizer_options_kept():
    """A scope after which `remapping` is on, and other options as before."""
    before = tf.config.optimizer.get_experimental_options()
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"remapping": True, **before}
        )


class GraphsTest(tf.test.TestCase):
    def test_settings_of_traces(self):
        """Traces with checks of numerics are not used without them."""
        self.addCleanup(tf.debugging.disable_check_numerics)
        before = upstream.settings_of_traces()
        self.assertEqual(upstream.settings_of_traces(), before)
        tf.debugging.enable_check_numerics()
        self.assertIsNone(upstream.settings_of_traces())
        tf.debugging.disable_check_numerics()
        self.addCleanup(tf.config.optimizer.set_experimental_options, {})
        tf.config.optimizer.set_experimental_options({"remapping": False})
        self.assertNotEqual(upstream.settings_of_traces(), before)

    def test_within_xla(self):
        """A step that XLA compiles whole, as on TPUs, runs no functions."""
        seen = []

        def note():
            seen.append(upstream.within_xla())

        tf.function(note, autograph=False).get_concrete_function()
        tf.function(
            note, autograph=False, jit_compile=True
        ).get_concrete_function()
        self.assertEqual(seen, [False, True])

    def test_graphs_being_built(self):
        """A stage finds tensors of another trace among those it captures."""
        found = []

        def inner():
            found.append((outer, upstream.graphs_being_built()))

        def run():
            nonlocal outer
            outer = tf.compat.v1.get_default_graph()
            tf.function(inner, autograph=False).get_concrete_function()

        outer = None
        tf.function(run, autograph=False).get_concrete_function()
        ((outer, graphs),) = found
        self.assertGreaterEqual(len(graphs), 2)
        self.assertIs(graphs[1], outer)
        self.assertNotIn(graphs[0], graphs[1:])
        self.assertNotIn(outer, upstream.graphs_being_built())

    def test_functions_of_a_graph(self):
        """Recurrent layers are cut into phases, and counted."""

        def loop(x):
            return tf.while_loop(lambda x: x < 9.0, lambda x: [x * 2], [x])[0]

        concrete = tf.function(loop).get_concrete_function(tf.constant(1.0))
        (call,) = (
            x for x in concrete.graph.get_operations() if "While" in x.type
        )
        name = call.get_attr("body").name
        body = upstream.function_of(concrete.graph, name)
        self.assertNotEmpty(body.graph.get_operations())
        other = tf.Graph()
        self.assertIsNone(upstream.function_of(other, name))
        upstream.copy_functions(concrete.graph, other)
        self.assertIsNotNone(upstream.function_of(other, name))

    def test_functions_of_layers(self):
        """Weights that a layer reads in a `tf.function` are trained."""
        variable = keras.Variable(1.0)
        for autograph in (False, True):
            function = tf.function(lambda: variable.value, autograph=autograph)
            for value in (2.0, 3.0):
                scope = keras.StatelessScope([(variable, tf.constant(value))])
                with scope:
                    self.assertAllEqual(function(), value)
            self.assertAllEqual(function(), 1.0)

    def test_rendezvous(self):
        """Errors of stages reach users as they are, not as cancellations."""
        function = tf.function(lambda: tf.constant(1.0), autograph=False)
        self.assertFalse(upstream.shares_rendezvous(function))
        upstream.share_rendezvous(function, True)
        self.assertTrue(upstream.shares_rendezvous(function))
        graph = function.get_concrete_function().function_def
        self.assertTrue(graph.attr["shared_rendezvous"].b)

    def test_call_operation(self):
        """Stages overlap, and their calls are cheap to trace."""
        weight = tf.Variable(2.0)
        inner = tf.function(
            lambda x: [x * weight, tf.print(x)][:1], autograph=False
        ).get_concrete_function(tf.constant(1.0))

        @tf.function(autograph=False)
        def outer(x):
            graph = tf.compat.v1.get_default_graph()
            inner.add_to_graph(graph)
            calls = [
                upstream.call_operation(
                    graph,
                    inner,
                    [x, *inner.captured_inputs],
                    stateful=True,
                    optimized=optimized,
                    jit_compile=False,
                    gradient="Identity",
                )
                for optimized in (True, False)
            ]
            for call in calls:
                upstream.run_in_no_order(call)
                self.assertEqual(upstream.read_only_places(call), None)
            return [call.outputs[0] for call in calls]

        self.assertAllEqual(outer(tf.constant(3.0)), [6.0, 6.0])
        graph = outer.get_concrete_function(tf.constant(3.0)).graph
        calls = [x for x in graph.get_operations() if "Call" in x.type]
        self.assertLen(calls, 2)
        for call in calls:
            self.assertEmpty(call.control_inputs)

    def test_options_of_calls(self):
        """The graphs of tasks are optimised by the user's options."""
        inner = tf.function(
            lambda x: x + 1.0, autograph=False
        ).get_concrete_function(tf.constant(1.0))

        def options(optimized):
            with tf.Graph().as_default() as graph:
                inner.add_to_graph(graph)
                call = upstream.call_operation(
                    graph,
                    inner,
                    [tf.constant(1.0)],
                    stateful=False,
                    optimized=optimized,
                    jit_compile=False,
                    gradient="Identity",
                )
            return _rewriter(call.get_attr("config_proto"))

        with _optimizer_options_kept():
            tf.config.optimizer.set_experimental_options({"remapping": False})
            off = options(True)
        self.assertEqual(off.remapping, off.OFF)
        self.assertEqual(off.meta_optimizer_iterations, off.ONE)
        self.assertFalse(off.disable_meta_optimizer)
        self.assertTrue(options(False).disable_meta_optimizer)
        self.assertNotEqual(options(True).remapping, off.OFF)

    def test_optimized_once(self):
        """The first step is quick: its graph has one pass of optimisers."""

        def options():
            return _rewriter(upstream.settings_of_traces()[1])

        before = options().SerializeToString()
        run = upstream.optimized_once(options)
        self.assertEqual(run().meta_optimizer_iterations, options().ONE)
        self.assertEqual(run.__name__, "options")
        with self.assertRaises(ZeroDivisionError):
            upstream.optimized_once(lambda: 1 / 0)()
        self.assertEqual(options().SerializeToString(), before)

    def test_options_set_within_optimized_once(self):
        """What `tf.config` sets while a step runs stays set."""
        change = upstream.optimized_once(
            tf.config.optimizer.set_experimental_options
        )
        with _optimizer_options_kept():
            change({"remapping": False})
            found = tf.config.optimizer.get_experimental_options()
            rewriter = _rewriter(upstream.settings_of_traces()[1])
        self.assertFalse(found["remapping"])
        self.assertEqual(rewriter.remapping, rewriter.OFF)

    def test_search_no_callees(self):
        """The first step is quick however many micro-batches there are."""
        called = tf.function(
            lambda x: x + 1.0,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )

        @tf.function(autograph=False)
        def step(x):
            first = tf.sin(x)
            upstream.skip_reference_search(first.op)
            with tf.name_scope("after"):
                after = called(first)
            with tf.name_scope("beside"):
                return after, called(x)

        marked = {
            node.name.split("/")[0]: node.attr["_XlaHasReferenceVars"].b
            for node in executed_graph(step, tf.constant(1.0))
            if "PartitionedCall" in node.op
        }
        self.assertEqual(marked, {"after": True, "beside": False})

    def test_variables_among_resources(self):
        """Layers that assign `tf.Variable`s are followed, tables are not."""
        variable = tf.Variable(1.0)
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0
        )

        @tf.function
        def called():
            variable.assign_add(1.0)
            return table.lookup(tf.constant("a"))

        graph = tf.function(called).get_concrete_function().graph
        (call,) = (x for x in graph.get_operations() if "Call" in x.type)
        reads = upstream.read_only_places(call)
        found = {
            upstream.is_variable(x): i in reads
            for i, x in enumerate(call.inputs)
            if x.dtype == tf.resource
        }
        self.assertFalse(found[True])
        self.assertIn(False, found)
        (other, *_) = (x for x in graph.get_operations() if x is not call)
        self.assertIsNone(upstream.read_only_places(other))

    def test_anonymous_name(self):
        """Steps that run at the same time have their own sums of gradients."""

        @tf.function(autograph=False)
        def made():
            return tf.raw_ops.VarHandleOp(
                dtype=tf.float32,
                shape=(),
                shared_name=upstream.anonymous_name(),
            )

        one, other = made(), made()
        for handle, value in ((one, 1.0), (other, 2.0)):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        self.assertAllEqual(
            [
                tf.raw_ops.ReadVariableOp(resource=x, dtype=tf.float32)
                for x in (one, other)
            ],
            [1.0, 2.0],
        )


class DevicesTest(parameterized.TestCase, tf.test.TestCase):
    def test_connected_to(self):
        """Workers are found, and told apart, by their addresses."""
        self.assertEqual(upstream.connected_to(), {})

    def test_gpu_memory(self):
        """`verify` says beforehand that a model is too large."""
        self.assertEqual(upstream.gpu_memory() is None, KIND != "GPU")

    @parameterized.parameters("argument", "eager", "captured", "called")
    def test_beside(self, how):
        """Micro-batches are cut where their mini-batch is."""
        there, here = (f"{KIND}:{i}" for i in (3, 1))
        with tf.device(there):
            x = tf.ones((4, 2))
        inner = tf.function(lambda x: x + 1.0, autograph=False)

        def cut(x):
            with tf.device(here), upstream.beside(x):
                return x[2:]

        def run(x):
            if how == "called":
                with tf.device(there):
                    x = inner(x)
            y = cut(x)
            if how == "captured":
                y = tf.function(lambda: cut(x), autograph=False)()
            with tf.device(here):
                return tf.identity(y, "sent"), y

        if how == "eager":
            self.assertEndsWith(cut(x).device, there)
            return
        step = tf.function(run, autograph=False)
        nodes = executed_graph(step, x)
        cuts = [n for n in nodes if n.op == "StridedSlice"]
        self.assertNotEmpty(cuts)
        for node in cuts:
            self.assertEndsWith(node.device, there)
        self.assertAllEqual(step(x)[0], np.ones((2, 2)) + (how == "called"))

    def test_placed_on(self):
        """Each replica has a variable's component on its stage's device."""
        devices = [f"{KIND}:{i}" for i in range(4)]
        strategy = tf.distribute.MirroredStrategy(devices[::2])
        names = [x.name for x in tf.config.list_logical_devices(KIND)]

        def create(next_creator, **kwargs):
            kwargs["colocate_with"] = upstream.colocation_target(
                [names[1], names[3]]
            )
            return next_creator(**kwargs)

        with strategy.scope(), tf.variable_creator_scope(create):
            variable = tf.Variable(1.0)
        parts = strategy.experimental_local_results(variable)
        self.assertEqual(
            [x.device[-1] for x in parts], ["1", "3"], [x.device for x in parts]
        )

    def test_sums_over_replicas(self):
        """Gradients are summed over replicas in the user's way."""
        devices = [f"{KIND}:0", f"{KIND}:1"]
        for way in (
            tf.distribute.ReductionToOneDevice(),
            tf.distribute.HierarchicalCopyAllReduce(),
            None,
        ):
            strategy = tf.distribute.MirroredStrategy(devices, way)
            self.assertIs(upstream.sums_over_replicas(strategy), way)

    def test_bytes_per_pack(self):
        """Hosts sum gradients in packs of the size that the user has set."""
        for size in (0, 2**20):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(
                communication_options=(
                    tf.distribute.experimental.CommunicationOptions(
                        bytes_per_pack=size
                    )
                )
            )
            self.assertEqual(upstream.bytes_per_pack(strategy), size)
        strategy = tf.distribute.OneDeviceStrategy(f"{KIND}:0")
        self.assertEqual(upstream.bytes_per_pack(strategy), 0)


class ProfileTest(tf.test.TestCase):
    def test_read_profile(self):
        """`Timeline.name_tasks` adds lines to what the profiler wrote."""
        space = upstream.read_profile(b"")
        space.planes.add(name="host").lines.add(name="pipeline CPU:0")
        again = upstream.read_profile(space.SerializeToString())
        self.assertEqual(again.planes[0].lines[0].name, "pipeline CPU:0")


# Runs `upstream_server.server`, without the package, which imports TensorFlow.
SERVER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("s", {upstream_server.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
# Which TensorFlow need not import here.
sys.modules["keras"] = sys.modules["jax"] = None
%s
server = module.server()
print("tensorflow" in sys.modules)
import tensorflow as tf
print(server is tf.distribute.Server)
tf.constant(1) + 1
"""


class ServerTest(tf.test.TestCase):
    def check(self, prepared, whole):
        """Checks whether `server` imports TensorFlow as a whole."""
        done = subprocess.run(
            [sys.executable, "-c", SERVER % prepared],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.stdout.split(), [str(whole), "True"], done.stderr)

    @pytest.mark.slow
    def test_server(self):
        """A worker starts, and restarts, in half a second."""
        self.assertIs(upstream_server.server(), tf.distribute.Server)
        self.check("", whole=False)

    @pytest.mark.slow
    def test_another_release(self):
        """Without that private module, TensorFlow is imported as a whole."""
        self.check(
            """
class Finder:
    def find_spec(name, *args):
        if name == "tensorflow.python.training.server_lib":
            sys.meta_path.remove(Finder)
            raise ImportError(name)
sys.meta_path.insert(0, Finder)
""",
            whole=True,
        )

    @pytest.mark.slow
    def test_libraries_of_devices(self):
        """A worker has the devices for which TensorFlow loads a library."""
        folder = pathlib.Path(self.get_temp_dir())
        (folder / "tensorflow-plugins").mkdir()
        self.check(f"sys.path.append({str(folder)!r})", whole=True)


class PackageTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("numpy", "jax")
    @pytest.mark.slow
    def test_other_backends_are_refused(self, backend):
        """All else here is of Keras on TensorFlow."""
        pytest.importorskip(backend)
        done = subprocess.run(
            [sys.executable, "-c", "import tf_gpipe"],
            env={**os.environ, "KERAS_BACKEND": backend},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 1)
        self.assertEndsWith(
            done.stderr.strip(),
            "Set the environment variable KERAS_BACKEND=tensorflow before "
            'Keras is imported, or "backend" in ~/.keras/keras.json. '
            f"Received: keras.backend.backend()='{backend}'",
        )

    def test_nobody_else_looks_inside(self):
        for path in PACKAGE.rglob("*.py"):
            if path.name in ("upstream.py", "upstream_server.py"):
                continue
            found = re.findall(
                r"(?:keras\.src|tensorflow\.python)\S*", path.read_text()
            )
            self.assertEmpty(found, path.name)

    def test_each_is_tried(self):
        tests = pathlib.Path(__file__).read_text()
        for name, value in vars(upstream).items():
            own = inspect.getmodule(value) in (upstream, None)
            if own and callable(value) or name.isupper():
                if not name.startswith("_"):
                    self.assertIn(f"upstream.{name}", tests)


if __name__ == "__main__":
    tf.test.main()
