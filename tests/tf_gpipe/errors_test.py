"""Errors that a pipeline raises when it is used wrongly."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_gpipe
from tests import pairwise
from tests.devices import KIND


def make_layers(count=3):
    return [
        keras.Input((4,)),
        *(keras.layers.Dense(4, name=f"dense_{i}") for i in range(count)),
    ]


def pipelined(layers=None, num_stages=2, cls=None, **kwargs):
    cls = cls or tf_gpipe.PipelinedSequential
    kwargs.setdefault("num_micro_batches", 2)
    kwargs.setdefault("devices", ["CPU:0", "CPU:1", "CPU:2"])
    layers = make_layers() if layers is None else layers
    return cls(layers, num_stages=num_stages, **kwargs)


def make_data(rows=6):
    return np.ones((rows, 4), "float32"), np.ones((rows, 4), "float32")


class Refusal(Exception):
    """An error of a type that neither Keras nor TensorFlow knows."""


class Refuses(keras.layers.Layer):
    """Raises when `armed`."""

    armed = False
    error = Refusal

    def call(self, x):
        if self.armed:
            raise self.error("no such luck")
        return x


class Untold(keras.layers.Layer):
    """Cannot tell the shape of its output."""

    def call(self, x):
        return x + 1.0

    def compute_output_spec(self, x):
        raise NotImplementedError


class Joined(keras.layers.Layer):
    def call(self, inputs):
        return inputs["a"] + keras.ops.sum(inputs["b"])


class OneNumber(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))


def one_number(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


class ErrorTest(tf.test.TestCase, parameterized.TestCase):
    def assert_raises(self, error, *words):
        """Expects an error of that type whose text has all `words`."""
        pattern = "".join(f"(?=.*{re.escape(str(word))})" for word in words)
        return self.assertRaisesRegex(error, f"(?s)^{pattern}")

    def assert_notes(self, error, *words):
        """Expects the notes of a caught error to have all `words`."""
        text = "\n".join(getattr(error, "__notes__", []))
        for word in words:
            self.assertIn(str(word), text)


class ArgumentTest(ErrorTest):
    @parameterized.product(
        name=("num_micro_batches", "num_stages"),
        value=(0, -1, 2.5, "4", True),
    )
    def test_count(self, name, value):
        with self.assert_raises(
            ValueError, f"`{name}`", "positive integer", f"{name}={value!r}"
        ):
            pipelined(**{name: value})

    def test_more_stages_than_layers(self):
        with self.assert_raises(
            ValueError, "`num_stages`", "num_stages=4", "3 layers"
        ):
            pipelined(num_stages=4, devices=["CPU:0"] * 4)

    def test_more_stages_than_layers_added_later(self):
        model = pipelined(make_layers(2))
        model.pop()
        with self.assert_raises(
            ValueError, "`num_stages`", "num_stages=2", "1 layers"
        ):
            model(make_data()[0])

    @parameterized.parameters(
        ([2, 2], "3, the number of layers", "[2, 2]", "sums to 4"),
        ([1, 1], "3, the number of layers", "[1, 1]", "sums to 2"),
        ([0, 3], "positive integers", "[0, 3]"),
        ([4, -1], "positive integers", "[4, -1]"),
        ([1.5, 1.5], "positive integers", "[1.5, 1.5]"),
        (["1", "2"], "positive integers", "['1', '2']"),
        ([1, 1, 1], "2 stages", "[1, 1, 1]"),
        ([3], "2 stages", "[3]"),
        ([], "2 stages", "[]"),
        ("speed", "'parameters'", "'speed'"),
    )
    def test_balance(self, balance, *words):
        with self.assert_raises(ValueError, "`balance`", *words):
            pipelined(balance=balance)

    def test_balance_of_a_wrong_type(self):
        with self.assert_raises(
            (TypeError, ValueError), "`balance`", "balance=3"
        ):
            pipelined(balance=3)

    def test_too_few_devices_given(self):
        with self.assert_raises(
            ValueError, "`devices`", "2", "Received 1", "['CPU:0']"
        ):
            pipelined(devices=["CPU:0"])

    def test_as_many_stages_as_devices_given(self):
        model = pipelined(num_stages=None, devices=["CPU:0", "CPU:1"])
        self.assertLen(model.stages, 2)

    def test_too_few_visible_devices(self):
        for kind in ("GPU", "TPU", "CPU"):
            visible = tf.config.list_logical_devices(kind)
            if visible:
                break
        wanted = len(visible) + 1
        with self.assert_raises(
            ValueError,
            f"{wanted} devices",
            f"Visible: {len(visible)}",
            visible[0].name,
            f"devices=['{visible[0].name}'] * {wanted}",
        ):
            pipelined(make_layers(wanted), num_stages=wanted, devices=None)

    @parameterized.parameters(
        "CPU:99", "GPU:99", "TOASTER:0", "toaster", "", "/job:moon/device:CPU:0"
    )
    def test_unknown_device(self, device):
        with self.assert_raises(
            ValueError,
            "Unknown device",
            repr(device),
            tf.config.list_logical_devices("CPU")[0].name,
        ):
            pipelined(devices=["CPU:0", device])

    def test_devices_as_one_string(self):
        with self.assert_raises(
            (TypeError, ValueError), "`devices`", "list", "'CPU:0'"
        ):
            pipelined(devices="CPU:0")

    @parameterized.parameters(
        (5,), (2.5,), ([0, 1],), ([None],), ([["CPU:0"], 5],), ([b"CPU:0"],)
    )
    def test_devices_that_are_no_strings(self, devices):
        with self.assert_raises(
            (TypeError, ValueError), "`devices`", "list", f"devices={devices}"
        ):
            pipelined(devices=devices)

    @parameterized.product(
        cls=(tf_gpipe.PipelinedSequential, tf_gpipe.PipelinedModel),
        config=({}, None, {"layers": []}, {"name": "x"}, 5),
    )
    def test_config_of_something_else(self, cls, config):
        with self.assert_raises(
            ValueError, "`config`", "`get_config`", f"config={config}"
        ):
            cls.from_config(config)

    @parameterized.parameters("zigzag", None, 3)
    def test_unknown_schedule(self, schedule):
        with self.assert_raises(
            ValueError, "`schedule`", "1f1b", "gpipe", f"schedule={schedule!r}"
        ):
            pipelined(schedule=schedule)

    @parameterized.parameters("sometimes", None, True)
    def test_unknown_remat(self, remat):
        with self.assert_raises(
            ValueError,
            "`remat`",
            "always",
            "except_last",
            "never",
            f"remat={remat!r}",
        ):
            pipelined(remat=remat)

    @parameterized.parameters("float32", "int8", 16)
    def test_unknown_boundary_dtype(self, dtype):
        with self.assert_raises(
            ValueError,
            "`boundary_dtype`",
            "bfloat16",
            "float16",
            f"boundary_dtype={dtype!r}",
        ):
            pipelined(boundary_dtype=dtype)

    def test_unknown_argument(self):
        with self.assert_raises(TypeError, "num_chunks"):
            pipelined(num_chunks=3)

    @parameterized.parameters((3, 2), (2, 3), (1, 2))
    def test_schedule_for_other_numbers(self, num_stages, num_micro_batches):
        schedule = tf_gpipe.Schedule(
            [
                ["F0.0", "F0.1", "B0.1", "B0.0"],
                ["F1.0", "F1.1", "B1.1", "B1.0"],
            ],
            name="mine",
        )
        with self.assert_raises(
            ValueError,
            "'mine' is for 2 stages and 2 micro-batches",
            f"num_stages={num_stages}",
            f"num_micro_batches={num_micro_batches}",
        ):
            pipelined(
                schedule=schedule,
                num_stages=num_stages,
                num_micro_batches=num_micro_batches,
            )

    def test_what_is_no_layer(self):
        with self.assert_raises(ValueError, "keras.Layer", "Received: dense"):
            pipelined([keras.Input((4,)), "dense"])


class ScheduleTest(ErrorTest):
    @parameterized.parameters(
        ([["F0.0", "F0.1", "B0.0"]], "'mine'", "lacks", "B0.1"),
        ([["F0.0"]], "lacks", "B0.0"),
        ([["F0.0", "B0.0"], ["F2.0", "B2.0"]], "lacks", "F1.0", "B1.0"),
        ([["F0.0", "F0.0", "B0.0"]], "repeats", "F0.0"),
        (
            [["F0.0", "B0.0"], ["F0.1", "B0.1"]],
            "stage 0",
            "rows 0 and 1",
            "F0.1",
        ),
        ([["B0.0", "F0.0"]], "never finish", "B0.0 waits for F0.0"),
        (
            [
                ["F0.0", "B0.0", "F0.1", "B0.1"],
                ["F1.0", "F1.1", "B1.0", "B1.1"],
            ],
            "never finish",
            "B0.0 waits for B1.0",
            "F1.1 waits for F0.1",
        ),
        ([], "no tasks"),
        ([[], []], "no tasks"),
        ([["F0.0", "B0"]], "'B0'", "'F2.0'"),
        ([["F0.0", "X0.0"]], "'X0.0'"),
        ([["F0.0", "B-1.0"]], "'B-1.0'"),
        ([["F0.0", "B0.0.0"]], "'B0.0.0'"),
        ([["F0.0", ""]], "''"),
    )
    def test_invalid(self, tasks, *words):
        with self.assert_raises(ValueError, *words):
            tf_gpipe.Schedule(tasks, name="mine")


class UnbuiltTest(ErrorTest):
    def test_no_layers(self):
        for layers in ([], keras.Sequential([])):
            with self.assert_raises(ValueError, "needs layers", "empty list"):
                pipelined(layers)

    def test_what_is_no_list(self):
        for layers in (5, 10**30, "abc", b"x", 2.5, {"a": 1}, {1}):
            with self.assert_raises(TypeError, "`layers` must", repr(layers)):
                pipelined(layers)

    def test_nothing_but_an_input(self):
        with self.assert_raises(ValueError, "needs layers"):
            pipelined([keras.Input((4,))])

    @parameterized.parameters("call", "build", "fit", "predict")
    def test_model_without_layers(self, method):
        model = tf_gpipe.PipelinedSequential(
            num_stages=2,
            num_micro_batches=2,
            devices=["CPU:0", "CPU:1"],
            name="hollow",
        )
        model.compile("sgd", "mse")
        x, y = make_data()
        with self.assert_raises(ValueError, "hollow", "no layers"):
            {
                "call": lambda: model(x),
                "build": lambda: model.build((None, 4)),
                "fit": lambda: model.fit(x, y, verbose=0),
                "predict": lambda: model.predict(x, verbose=0),
            }[method]()

    def test_stages_before_the_build(self):
        model = pipelined(make_layers()[1:], name="early")
        with self.assert_raises(ValueError, "early", "not been built", "Input"):
            _ = model.stages
        model.build((None, 4))
        self.assertLen(model.stages, 2)

    def test_fit_before_compile(self):
        with self.assert_raises(ValueError, "compile()"):
            pipelined().fit(*make_data(), verbose=0)

    def test_stateless_call(self):
        model = pipelined()
        with self.assert_raises(NotImplementedError, "GradientTape"):
            model.stateless_call(
                model.trainable_variables,
                model.non_trainable_variables,
                make_data()[0],
            )


class InLayerTest(ErrorTest):
    def _make(self, error, with_input=True):
        layer = Refuses(name="moody")
        layer.error = error
        layers = [*make_layers(), layer]
        if not with_input:
            layers = layers[1:]
        return layers, layer

    @parameterized.parameters(Refusal, ValueError, TypeError, KeyError)
    def test_while_it_is_built(self, error):
        layers, layer = self._make(error)
        layer.armed = True
        with self.assertRaises(error) as caught:
            pipelined(layers, balance=[2, 2])
        self.assertIs(type(caught.exception), error)
        self.assertIn("no such luck", str(caught.exception))
        self.assert_notes(
            caught.exception,
            "moody",
            "Refuses",
            "stage 1",
            "CPU:1",
            "(None, 4)",
        )

    @parameterized.parameters(Refusal, ValueError, TypeError, KeyError)
    def test_while_it_is_built_by_data(self, error):
        layers, layer = self._make(error, with_input=False)
        layer.armed = True
        model = pipelined(layers, balance=[2, 2])
        model.compile("sgd", "mse")
        with self.assertRaises(error) as caught:
            model.fit(*make_data(), verbose=0)
        self.assertIs(type(caught.exception), error)
        self.assertIn("no such luck", str(caught.exception))
        self.assert_notes(
            caught.exception, "moody", "Refuses", "stage 1", "CPU:1"
        )

    @pairwise.product(
        error=(Refusal, ValueError, TypeError, KeyError),
        schedule=("1f1b", "gpipe"),
        run_eagerly=(False, True),
    )
    @pytest.mark.slow_after(1)
    def test_while_training(self, error, schedule, run_eagerly):
        layers, layer = self._make(error)
        model = pipelined(layers, balance=[2, 2], schedule=schedule)
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        layer.armed = True
        with self.assertRaises(error) as caught:
            model.fit(*make_data(6), batch_size=6, verbose=0)
        self.assertIs(type(caught.exception), error)
        self.assertIn("no such luck", str(caught.exception))
        self.assert_notes(
            caught.exception, "moody", "Refuses", "stage 1", "CPU:1", ", 4)"
        )
        layer.armed = False
        model.fit(*make_data(), verbose=0)

    @parameterized.parameters("call", "predict", "evaluate", "tape")
    def test_elsewhere(self, method):
        layers, layer = self._make(Refusal)
        model = pipelined(layers, balance=[2, 2])
        model.compile("sgd", "mse")
        layer.armed = True
        x, y = make_data()

        def tape():
            with tf.GradientTape():
                model(x, training=True)

        with self.assertRaises(Refusal) as caught:
            {
                "call": lambda: model(x),
                "predict": lambda: model.predict(x, verbose=0),
                "evaluate": lambda: model.evaluate(x, y, verbose=0),
                "tape": tape,
            }[method]()
        self.assert_notes(
            caught.exception, "moody", "stage 1", f"{KIND}:1", ", 4)"
        )

    @parameterized.parameters(True, False)
    def test_tells_no_output(self, with_input):
        layers = [*make_layers(2), Untold(name="untold")]
        x, y = make_data()
        model = pipelined(layers[1:])
        for _ in range(2):
            with self.assert_raises(
                NotImplementedError, "untold", "Untold", "compute_output_spec"
            ):
                if with_input:
                    pipelined(layers)
                else:
                    model(x)
        if not with_input:
            model.pop()
            model.compile("sgd", "mse")
            model.fit(x, y, verbose=0)

    def test_why_an_output_is_not_told(self):
        divide = keras.layers.Lambda(lambda x: 1 // 0, name="divide")
        with self.assert_raises(
            NotImplementedError, "divide", "ZeroDivisionError", "by zero"
        ):
            pipelined([*make_layers(2), divide])

    @parameterized.parameters(True, False)
    def test_output_that_does_not_fit_the_next_stage(self, with_input):
        misfit = keras.layers.Dense(3, name="misfit")
        misfit.build((None, 7))
        layers = [keras.Input((4,)), keras.layers.Dense(5), misfit]
        with self.assertRaises(ValueError) as caught:
            model = pipelined(
                layers if with_input else layers[1:], balance=[1, 1]
            )
            model(make_data()[0])
        error = caught.exception
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        for word in ("misfit", "7", "5)", "stage 1", "CPU:1"):
            self.assertIn(word, text)


class DataTest(ErrorTest):
    @parameterized.parameters(True, False)
    def test_ragged(self, with_input):
        x = tf.ragged.constant([[1.0, 2.0, 3.0, 4.0], [1.0]])
        layers = make_layers()
        model = pipelined(layers if with_input else layers[1:])
        with self.assert_raises(TypeError, "dense", "RaggedTensor"):
            model(x)

    @parameterized.parameters(True, False)
    def test_sparse(self, with_input):
        # Keras makes it dense before a layer that takes no sparse tensors.
        x = np.eye(4, dtype="float32")
        layers = make_layers()
        model = pipelined(layers if with_input else layers[1:])
        found = model(tf.sparse.from_dense(x))
        self.assertAllClose(model(x), found)

    @parameterized.parameters(True, False)
    def test_different_batch_sizes(self, compiled):
        model = pipelined([Joined(), keras.layers.Dense(2)])
        x = {"a": tf.ones((4, 3)), "b": tf.ones((3, 3))}
        with self.assert_raises(ValueError, "same batch size", "[3, 4]"):
            (tf.function(model) if compiled else model)(x)

    @pairwise.product(
        schedule=("1f1b", "gpipe"),
        sizes=((None, None), (8, None), (None, 8)),
        num_micro_batches=(4, 3, 1),
    )
    @pytest.mark.slow_after(2)
    def test_batch_sizes_that_a_trace_does_not_know(self, sizes, **kwargs):
        """Inputs of equal sizes pass, of unequal ones are refused."""
        inputs = [keras.Input((3,)) for _ in range(2)]
        x = [keras.layers.Dense(2)(x) for x in inputs]
        y = keras.layers.Dense(1)(keras.layers.Concatenate()(x))
        model = tf_gpipe.PipelinedModel(
            inputs, y, num_stages=2, devices=["CPU:0", "CPU:1"], **kwargs
        )
        model.compile("sgd", "mse")

        @tf.function(
            input_signature=[tf.TensorSpec([n, 3]) for n in (*sizes, None)]
        )
        def step(a, b, y):
            return model.loss_and_gradients((a, b), y[:, :1])[0]

        step(*[tf.ones((8, 3))] * 3)
        unequal = (8, 12, 8) if sizes[1] is None else (12, 8, 8)
        message = "same batch size"
        if kwargs["num_micro_batches"] == 1:
            # Nothing is cut, and the layer that joins them may be the first.
            message += "|Dimension 0 in both shapes must be equal"
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
            step(*(tf.ones((n, 3)) for n in unequal))

    @pairwise.product(
        rows=(4, 6, 12), num_micro_batches=(8, 4, 3), known=(True, False)
    )
    @pytest.mark.slow_after(2)
    def test_labels_of_no_multiple_of_the_rows(self, rows, known, **kwargs):
        model = pipelined(schedule="1f1b", **kwargs)
        model.compile("sgd", "mse")

        @tf.function(
            input_signature=[
                tf.TensorSpec([n if known else None, 4]) for n in (8, rows)
            ]
        )
        def step(x, y):
            return model.loss_and_gradients(x, y)[0]

        # Keras refuses them too, where it knows the rows of outputs.
        ours = "Labels and sample weights must have as many rows"
        with self.assertRaisesRegex(
            ValueError if known else tf.errors.InvalidArgumentError,
            f"{ours}|Dimensions must be equal" if known else ours,
        ):
            step(tf.ones((8, 4)), tf.ones((rows, 4)))

    @parameterized.parameters("1f1b", "gpipe")
    def test_labels_of_another_batch_size(self, schedule):
        model = pipelined(schedule=schedule)
        model.compile("sgd", "mse")
        x, y = make_data(6)
        for rows in (5, 4, 3):
            with self.assertRaises((ValueError, tf.errors.OpError)):
                model.train_on_batch(x, y[:rows])

    def test_no_batch_axis(self):
        model = pipelined([keras.layers.Rescaling(2.0), keras.layers.ReLU()])
        with self.assert_raises(ValueError, "batch axis", "scalar"):
            model(tf.constant(1.0))

    @parameterized.product(
        model=("sequential", "functional"),
        method=("fit", "evaluate", "call"),
    )
    def test_none(self, model, method):
        layers = make_layers()
        if model == "functional":
            plain = keras.Sequential(layers)
            model = tf_gpipe.PipelinedModel(
                plain.inputs, plain.outputs, num_stages=2
            )
        else:
            model = pipelined(layers)
        model.compile("sgd", "mse")
        _, y = make_data()
        with self.assert_raises(
            ValueError, layers[0].name, "not optional", "None"
        ):
            {
                "call": lambda: model([None]),
                "evaluate": lambda: model.evaluate([None], y, verbose=0),
                "fit": lambda: model.fit([None], y, verbose=0),
            }[method]()

    def test_none_before_the_build(self):
        model = pipelined(make_layers()[1:])
        model.compile("sgd", "mse")
        with self.assert_raises(ValueError, "all of its inputs", "None"):
            model.fit([None], make_data()[1], verbose=0)

    def test_wrong_input_shape(self):
        with self.assert_raises(ValueError, "4", "(6, 3)"):
            pipelined()(np.ones((6, 3), "float32"))

    @parameterized.parameters("fit", "evaluate", "predict")
    def test_wrong_shape_of_images(self, method):
        inputs = keras.Input((8, 8, 1))
        x = keras.layers.Conv2D(2, 3)(inputs)
        model = tf_gpipe.PipelinedModel(
            inputs,
            keras.layers.GlobalAveragePooling2D()(x),
            num_stages=2,
            num_micro_batches=2,
        )
        model.compile("sgd", "mse")
        x, y = np.zeros((4, 16, 16, 1)), np.zeros((4, 2))
        with self.assert_raises(ValueError, "(None, 8, 8, 1)", "16, 16"):
            getattr(model, method)(x, *[y][: method != "predict"], verbose=0)

    @parameterized.parameters([[]], [[keras.Input((4,))]])
    def test_pipeline_in_a_pipeline(self, first):
        inner = pipelined([*first, keras.layers.Dense(4)], num_stages=1)
        with self.assert_raises(ValueError, inner.name, "its layers"):
            pipelined([inner, keras.layers.Dense(4)])(np.ones((4, 4)))
        if first:
            inputs = keras.Input((4,))
            with self.assert_raises(ValueError, inner.name, "its layers"):
                tf_gpipe.PipelinedModel(inputs, inner(inputs), num_stages=1)


class ActivityRegularizerTest(ErrorTest):
    @parameterized.parameters("gpipe", "1f1b")
    def test_of_a_pipeline(self, schedule):
        layers = [keras.Input((4,)), keras.layers.Dense(4)]
        model = pipelined(layers, num_stages=1, schedule=schedule)
        model.compile("sgd", "mse")
        model.activity_regularizer = keras.regularizers.L2(0.1)
        with self.assert_raises(ValueError, model.name, "last layer"):
            model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)

    def test_of_a_model_made_into_one(self):
        plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        graph = keras.Model(plain.inputs, plain.outputs)
        for model in (plain, graph):
            model.activity_regularizer = keras.regularizers.L2(0.1)
            with self.assert_raises(ValueError, model.name, "last layer"):
                tf_gpipe.PipelinedModel.from_model(model, num_stages=1)
        with self.assert_raises(ValueError, plain.name, "last layer"):
            tf_gpipe.PipelinedSequential(plain, num_stages=1)


class LossTest(ErrorTest):
    @parameterized.product(
        schedule=("1f1b", "zero_bubble", "gpipe"), eagerly=(False, True)
    )
    def test_no_loss(self, schedule, eagerly):
        plain = keras.Sequential(make_layers())
        for model in (plain, pipelined(schedule=schedule)):
            model.compile("sgd", run_eagerly=eagerly)
            with self.assert_raises(
                ValueError, "No loss to compute. Provide a `loss` argument"
            ):
                model.fit(*make_data(), verbose=0)

    @parameterized.product(
        schedule=("1f1b", "gpipe"),
        dtype=(("float32", 1e-5), ("float64", 1e-12)),
    )
    @pytest.mark.slow_after(1)
    def test_no_loss_but_those_of_layers(self, schedule, dtype):
        dtype, rtol = dtype
        keras.config.set_floatx(dtype)
        self.addCleanup(keras.config.set_floatx, "float32")
        layers = [
            keras.Input((4,)),
            keras.layers.Dense(4, kernel_regularizer="l2"),
            keras.layers.Dense(2, activity_regularizer="l2"),
        ]
        plain = keras.Sequential(layers)
        model = pipelined(
            keras.models.clone_model(plain).layers, schedule=schedule
        )
        model.set_weights(plain.get_weights())
        x = np.ones((6, 4), dtype)
        losses = []
        for each in (plain, model):
            each.compile("sgd")
            losses.append(each.fit(x, x, verbose=0).history["loss"])
        self.assertAllClose(*losses, rtol=rtol, atol=0)

    @parameterized.parameters((["mse", None],), ([None],))
    def test_no_loss_among_those_of_one_output(self, loss):
        model = pipelined()
        model.compile("sgd", loss)
        x, y = make_data()
        with self.assert_raises(ValueError, "`None` in it. Received: loss="):
            model.fit(x, y, verbose=0)

    @parameterized.parameters("1f1b", "gpipe")
    def test_gradients_before_compile(self, schedule):
        x, y = make_data()
        with self.assert_raises(ValueError, "No loss to compute", "`compile"):
            pipelined(schedule=schedule).loss_and_gradients(x, y)

    @parameterized.parameters("mse", "binary_crossentropy")
    def test_outputs_of_one_axis(self, loss):
        x, y = make_data()
        layers = [*make_layers(1), keras.layers.Dense(1, "sigmoid")]
        model = pipelined([*layers, keras.layers.Reshape(())])
        model.compile("sgd", loss)
        with self.assert_raises(
            ValueError, f"'{loss}'", "(batch_size,)", "make it (batch_size, 1)"
        ):
            model.fit(x, y[:, 0], verbose=0)
        model = pipelined(layers)
        model.compile("sgd", loss)
        model.fit(x, y[:, :1], verbose=0)

    @parameterized.parameters(one_number, OneNumber(name="one_number"))
    def test_one_number_with_1f1b(self, loss):
        model = pipelined(schedule="1f1b")
        model.compile("sgd", loss)
        with self.assert_raises(
            ValueError, "'one_number'", "one number", "schedule='gpipe'"
        ):
            model.fit(*make_data(), verbose=0)

    @parameterized.parameters(
        {"schedule": "gpipe"}, {"schedule": "1f1b", "num_micro_batches": 1}
    )
    def test_one_number_of_the_whole_mini_batch(self, **kwargs):
        plain = keras.Sequential(make_layers())
        model = pipelined(**kwargs)
        model.set_weights(plain.get_weights())
        x, y = make_data(5)
        x = x * np.arange(5, dtype="float32")[:, None]
        for m in (plain, model):
            m.compile(keras.optimizers.SGD(0.01), one_number)
            m.fit(x, y, epochs=2, verbose=0)
        for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)

    def test_one_of_several_losses_not_reduced(self):
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(3)(inputs)
        outputs = [keras.layers.Dense(1)(hidden) for _ in range(2)]
        model = tf_gpipe.PipelinedModel(
            inputs, outputs, num_stages=2, devices=["CPU:0", "CPU:1"]
        )
        none = keras.losses.MeanSquaredError(reduction=None)
        model.compile("sgd", [none, "mse"])
        with self.assert_raises(ValueError, "reduction=None", "'gpipe'"):
            model.train_on_batch(np.ones((8, 4)), [np.ones((8, 1))] * 2)

    def test_own_call_with_1f1b(self):
        class Own(keras.losses.Loss):
            def __call__(self, y_true, y_pred, sample_weight=None):
                return keras.ops.mean(y_pred)

        model = pipelined(schedule="1f1b")
        model.compile("sgd", Own(name="own"))
        with self.assert_raises(
            ValueError, "'own'", "`__call__`", "schedule='gpipe'"
        ):
            model.fit(*make_data(), verbose=0)


class BatchNormTest(ErrorTest):
    def _layers(self):
        return [
            keras.Input((4,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(renorm=True, name="again"),
        ]

    def test_renorm(self):
        with self.assert_raises(
            ValueError, "'again'", "renorm=True", "num_micro_batches=1"
        ):
            pipelined(self._layers())

    def test_renorm_inside_a_layer(self):
        inner = keras.Sequential(self._layers())
        with self.assert_raises(ValueError, "'again'", "renorm=True"):
            pipelined([keras.Input((4,)), inner, keras.layers.Dense(2)])

    def test_renorm_added_later(self):
        model = pipelined()
        with self.assert_raises(ValueError, "'again'", "renorm=True"):
            model.add(self._layers()[-1])
            model(make_data()[0])

    def test_renorm_with_one_micro_batch(self):
        model = pipelined(self._layers(), num_micro_batches=1)
        model.compile("sgd", "mse")
        model.fit(*make_data(), verbose=0)


if __name__ == "__main__":
    tf.test.main()
