"""Comparison of two steps of a model: as plain Keras, and as a pipeline."""

from tf_gpipe.verification.report import KINDS
from tf_gpipe.verification.report import Comparison
from tf_gpipe.verification.steps import Step
from tf_gpipe.verification.steps import Variables

# Differences of losses, metrics and changes of statistics are relative to at
# least this, as those that should be 0 consist of rounding.
_SMALL = 1e-2


def compared(
    variables: Variables,
    expected: Step,
    received: Step,
    prefix: str,
    tolerance: float,
) -> Comparison:
    """Returns the comparison of two steps.

    Args:
        variables: `Variables` of the model, with their values before the steps.
        expected: `Step` of the plain model.
        received: `Step` of the pipeline.
        prefix: String, before the names of what both steps of `verify` have.
        tolerance: As of `Comparison`.
    """
    comparison = Comparison(tolerance)
    _add_logs(comparison, expected, received, prefix)
    comparison.add("gradient", expected.gradients, received.gradients)
    comparison.add("prediction", expected.outputs, received.outputs)
    add_variables(comparison, variables, expected, received, prefix)
    return comparison


def add_variables(
    comparison: Comparison,
    variables: Variables,
    expected: Step,
    received: Step,
    prefix: str,
    again: bool = False,
) -> None:
    """Compares the variables after two steps; the rest is as of `compared`."""
    for kind in ("variable", "slot", "statistic"):
        named = variables.named(kind, prefix)
        comparison.add(
            kind,
            named(expected.variables),
            named(received.variables),
            named(variables.values),
            # A statistic of numbers that cancel out consists of rounding.
            _SMALL if kind == "statistic" else 0.0,
            again,
        )


def differ(one: Step, other: Step, tolerance: float) -> bool:
    """Returns whether two steps of the same model differ."""
    comparison = Comparison(tolerance)
    for kind, a, b in zip(KINDS, one[:3], other[:3], strict=False):
        comparison.add(kind, a, b, floor=_SMALL)
    return bool(comparison.failed())


def _add_logs(
    comparison: Comparison, expected: Step, received: Step, prefix: str
) -> None:
    """Adds the losses and metrics of two steps to a comparison."""

    def named(logs: dict, losses: bool) -> dict:
        return {
            prefix + name: x
            for name, x in logs.items()
            if (name == "loss" or name.endswith("_loss")) == losses
        }

    for kind in ("loss", "metric"):
        comparison.add(
            kind,
            named(expected.logs, kind == "loss"),
            named(received.logs, kind == "loss"),
            floor=_SMALL,
        )
