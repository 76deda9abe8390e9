"""`tf_gpipe.verify`: compares a pipeline's numbers with plain Keras's."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import progress
from tf_gpipe import upstream
from tf_gpipe.devices import slots
from tf_gpipe.devices import worker_lost
from tf_gpipe.schedule import schedules
from tf_gpipe.verification import comparable
from tf_gpipe.verification import steps
from tf_gpipe.verification.layers import Layers
from tf_gpipe.verification.report import TOLERANCES
from tf_gpipe.verification.report import Comparison
from tf_gpipe.verification.report import Report
from tf_gpipe.verification.step_comparison import add_variables
from tf_gpipe.verification.step_comparison import compared
from tf_gpipe.verification.step_comparison import differ
from tf_gpipe.verification.steps import Step
from tf_gpipe.verification.steps import Variables

# Prefix of the names of all that is compared after a step of evaluation.
_EVALUATE = "evaluate: "


@progress.shown(after=progress.PATIENCE)
@worker_lost.naming_failures
def verify(
    model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None
) -> Report:
    """Compares a pipeline with the plain Keras model, on one mini-batch.

    The same layers with the same weights take a step of `fit`, of `evaluate`
    and of `predict`, as the pipeline and as plain Keras would, on one device.
    The model is left as it was: weights, slots, other state, seeds, metrics
    and what `compile` has made.

    Numbers differ if they are further apart than 1e-4 in float32 (1e-9 in
    float64, 1e-2 in float16, 5e-2 in bfloat16: the widest of those that the
    layers compute in), relative to the largest entry of their tensor, or to a
    hundredth of the largest entry of all tensors of their kind. Weights, slots
    and statistics are measured by their change. Where gradients agree, but an
    optimizer magnifies their rounding, as Adam does with the gradient of a bias
    before a normalisation, the plain optimizer is given the pipeline's
    gradients.

    A model may magnify rounding beyond that. Make and verify it after
    `keras.config.set_floatx("float64")`: what differs then is not rounding.

    Args:
        model: A compiled and built `PipelinedSequential` or `PipelinedModel`.
        x: Inputs of one mini-batch, as for `fit`.
        y: Labels, as for `fit`.
        sample_weight: Sample weights, as for `fit`, or `None`.

    Returns:
        A `Report`, with `ok`, `worst` and `first_layer`; printed, it is a page.
        What goes wrong is in it, too, and not raised, but for a lost worker.

    Raises:
        tf.errors.UnavailableError: If a worker is lost.

    Example:

    >>> model = tf_gpipe.PipelinedSequential(
    ...     [keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)],
    ...     num_stages=2,
    ...     devices=["CPU:0", "CPU:0"],
    ... )
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((16, 8), "float32")
    >>> report = tf_gpipe.verify(model, x, x[:, :1])
    >>> report.ok, report.first_layer
    (True, None)
    """
    try:
        problem = comparable.problem(model, x)
        if problem is None:
            return _Verification(model, x).run(x, y, sample_weight)
    except tf.errors.UnavailableError:
        raise  # A worker is lost.
    except Exception as e:
        problem = f"The model could not be looked at: {e!r}"
    return Report(False, {}, None, [], [problem], [], [])


class _Verification:
    """One run of `verify`: the comparison, the problems and the notes."""

    def __init__(self, model: Any, x: Any):
        self._model = model
        rows = len(keras.tree.flatten(x)[0])
        self._pipeline = model._pipeline.with_rows(rows)
        self._all = Comparison(_tolerance(model))
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._compared: list[str] = []
        if self._pipeline.boundary_dtype:
            self._notes.append(
                "What travels between devices is rounded, by the argument "
                f"boundary_dtype={self._pipeline.boundary_dtype!r}."
            )

    def run(self, x: Any, y: Any, sample_weight: Any) -> Report:
        """Compares the steps, restores the model and returns the report."""
        model = self._model
        first: str | None = None
        alone: list[str] = []
        attributes = steps.Attributes(model)
        variables = None
        with _exact_products():
            try:
                data = tuple(
                    keras.tree.map_structure(_as_tensor, each)
                    for each in (x, y, sample_weight)
                )
                # As the first step does: the slots must exist before their
                # values are saved.
                slots.build(model)
                variables = Variables(model)
                # No warnings beside the report, which names the layers.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    first, alone = self._compare(variables, data)
            except tf.errors.UnavailableError:
                raise  # A worker is lost.
            except Exception as e:
                self._tell("The comparison", e)
            finally:
                if variables is not None:
                    variables.restore()
                attributes.restore()
        return Report(
            bool(self._compared)
            and not (self._all.failed() or alone or self._problems),
            self._all.worst(),
            first,
            alone,
            self._problems,
            self._notes,
            self._compared,
        )

    def _compare(
        self, variables: Variables, data: tuple
    ) -> tuple[str | None, list[str]]:
        """Compares the steps, then searches the layers that differ.

        Returns:
            Tuple of the name of the first layer that differs, or `None`, and
            the names of the layers that differ when run by themselves.
        """
        layers = Layers(self._model, variables, data[0], self._all.tolerance)
        modes = [
            training
            for training in (True, False)
            if self._compare_steps(layers, variables, data, training)
        ]
        if not self._all.failed() and len(modes) == 2:
            return None, []
        alone = [x for mode in (True, False) for x in layers.alone(mode)]
        self._notes += dict.fromkeys(layers.notes)
        found = list(alone)
        for training in modes:
            # It may raise as the pipeline did, which is reported already.
            with contextlib.suppress(Exception):
                found += filter(None, [layers.through(training)])
        found += self._owners(layers, "statistic")
        if not found and not self._all.failed("loss"):
            # Only the backward pass differs. A wrong gradient spreads to all
            # earlier layers, so the last layer with one is the cause.
            owners = self._owners(layers, "gradient")
            found = [x for x in layers.names if x in owners][-1:]
        if not found and not self._all.failed("gradient"):
            # The gradients agree, but the optimizer's updates differ, as where
            # an embedding has several gradient slices for one row.
            found = self._owners(layers, "variable")
        if not found and self._all.failed():
            self._notes.append(
                "No layer differs by itself. Look at the loss, the metrics, "
                "the optimizer, and what the model overrides."
            )
        in_order = [x for x in layers.names if x in found]
        first = in_order[0] if in_order else None
        return first, [x for x in layers.names if x in alone]

    def _owners(self, layers: Layers, kind: str) -> list[str]:
        """Returns the names of the layers whose variables of a kind differ."""
        names = [x.name.removeprefix(_EVALUATE) for x in self._all.failed(kind)]
        return [x for x in map(layers.of, names) if x is not None]

    def _compare_steps(
        self,
        layers: Layers,
        variables: Variables,
        data: tuple,
        training: bool,
    ) -> bool:
        """Compares steps of training, or of evaluation and prediction.

        Returns:
            Boolean, whether the pipeline was compared with its own number of
            micro-batches.
        """
        make = steps.train if training else steps.evaluate
        what = "training" if training else "evaluation"

        def step(**kwargs: Any) -> Step:
            return make(self._model, variables, data, **kwargs)

        def plain_step(**kwargs: Any) -> Step:
            with steps.plain(self._model):
                return step(**kwargs)

        expected = self._try("The plain model", what, plain_step)
        if expected is None:
            self._try("The pipeline", what, step)
            return False
        drawn = variables.drawn(expected.variables)
        if drawn and self._model._stage_jit_compile:
            self._notes.append(
                f"In {what} layers draw random numbers. XLA, which compiles "
                "the stages, draws others."
            )
            return False
        reasons = self._reasons(layers, drawn, training)
        scope: Any = contextlib.nullcontext()
        if reasons:
            self._notes.append(
                f"In {what} {' and '.join(reasons)}. So the pipeline was "
                f"compared in {what} with num_micro_batches=1, and each of "
                "the other layers by itself in micro-batches."
            )
            scope = self._one_micro_batch()
        with scope:
            received = self._try("The pipeline", what, step)
        if received is None:
            return False
        prefix = "" if training else _EVALUATE
        comparison = compared(
            variables, expected, received, prefix, self._all.tolerance
        )
        if comparison.failed():
            again = plain_step(times=2)
            if differ(expected, again, self._all.tolerance):
                self._notes.append(
                    f"In {what} the plain model does not repeat its own "
                    "numbers: it draws random numbers that are not of "
                    "`keras.random`. It was not compared."
                )
                return False
        if comparison.failed() and not comparison.failed("gradient"):
            # The optimizer may magnify the rounding of gradients: compare with
            # the plain optimizer's update by the pipeline's gradients.
            if expected.gradients:
                expected = plain_step(gradients=received.gradients)
            add_variables(
                comparison, variables, expected, received, prefix, again=True
            )
        self._all.update(comparison)
        self._compared.append(what)
        loss = expected.logs.get("loss", 0.0)
        if not np.isfinite(loss).all():
            # All that follows from it is as little a number, and so alike.
            self._problems.append(
                f"In {what} the loss of the plain model is {loss}, and tells "
                "nothing. Give `x` and `y` for which it is a finite number."
            )
        return not reasons

    def _reasons(
        self, layers: Layers, drawn: bool, training: bool
    ) -> list[str]:
        """Returns why numbers depend on the number of micro-batches."""
        reasons = []
        if self._pipeline.schedule.num_micro_batches > 1:
            if drawn:
                reasons.append(
                    "layers draw random numbers (dropout masks, say), which "
                    "depend on the number of micro-batches"
                )
            norms = layers.with_batch_norms() if training else []
            if norms:
                several = ", ..." if norms[3:] else ""
                reasons.append(
                    "batch normalisation normalises over a micro-batch "
                    f"({', '.join(norms[:3])}{several})"
                )
        return reasons

    @contextlib.contextmanager
    def _one_micro_batch(self) -> Iterator[None]:
        """A scope in which the model does not split its mini-batches."""
        pipeline = self._pipeline
        num_stages = len(pipeline.stages)
        try:
            schedule = schedules.get(
                pipeline.schedule.name,
                num_stages,
                1,
                len(pipeline.schedule.tasks),
            )
        except ValueError:
            # The user's own schedule, or one for several micro-batches only.
            schedule = schedules.get("gpipe", num_stages, 1)
        attributes = vars(self._model)
        attributes["_pipeline"] = dataclasses.replace(
            pipeline, schedule=schedule, num_micro_batches=None
        )
        try:
            yield
        finally:
            attributes["_pipeline"] = pipeline

    def _try(self, who: str, what: str, step: Callable) -> Step | None:
        try:
            with progress.doing(f"{who}, in {what}"):
                return step()
        except tf.errors.UnavailableError:
            raise  # A worker is lost.
        except Exception as e:
            self._tell(f"{who}, in {what},", e)
            return None

    def _tell(self, who: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        self._problems.append(
            f"{who} raised {type(error).__name__}: "
            + " ".join([*lines[:8], *getattr(error, "__notes__", ())])
        )


def _tolerance(model: Any) -> float:
    dtypes = [x.compute_dtype for x in upstream.layers_within(model)]
    dtypes.append(model._pipeline.boundary_dtype)
    known = [TOLERANCES[x] for x in dtypes if x in TOLERANCES]
    return max(known, default=TOLERANCES["float32"])


def _as_tensor(x: Any) -> Any:
    """Converts an array to a tensor as `fit` does."""
    if x is None or tf.is_tensor(x):
        return x
    x = np.asarray(x)
    dtype = keras.config.floatx() if x.dtype == np.float64 else None
    return tf.convert_to_tensor(x, dtype)


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """A scope in which GPUs do not round factors to TensorFloat-32."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
