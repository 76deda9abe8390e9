"""The `Report` of `verify`, and differences relative to rounding."""

import dataclasses
import math
import textwrap
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import numpy as np

# The largest difference of two entries that counts as rounding, relative to the
# largest entry of a tensor. Sums in another order differ by some units in the
# last place for each layer.
TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
# Differences are relative to at least this share of the largest entry of all
# tensors of a kind, as some tensors are zero but for rounding, such as the
# gradient of a bias before a normalisation.
_FLOOR = 1e-2
KINDS = (
    "loss",
    "metric",
    "gradient",
    "variable",
    "slot",
    "statistic",
    "prediction",
)
_WIDTH = 80


class Difference(NamedTuple):
    """How far a tensor of the pipeline is from the plain model's.

    Attributes:
        name: String, what was compared.
        difference: Float, the largest difference of two entries, relative to
            what the tolerance is relative to; infinite where shapes differ, or
            only one of the two is finite.
        tolerance: Float, the largest difference that rounding explains.
    """

    name: str
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Boolean, whether the difference is one of rounding."""
        return self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` returns; `str` of it is a page.

    Attributes:
        ok: Boolean, whether nothing differs, of all that could be compared,
            and nothing went wrong. `False` if no step could be compared.
        worst: Dictionary from each kind of value that was compared ("loss",
            "metric", "gradient", "variable", "slot", "statistic",
            "prediction") to its worst `Difference`, which has a name.
        first_layer: String, the name of the first layer, in the order of the
            model, that differs; `None` if none does.
        layers: List of the names of all layers that differ by themselves, when
            they are given what they get in the plain model.
        problems: List of strings, what went wrong.
        notes: List of strings, what cannot be compared, and why.
        compared: List of the steps that were compared, `"training"` and
            `"evaluation"`.

    Example:

    >>> model = tf_gpipe.PipelinedSequential(
    ...     [keras.Input((8,)), keras.layers.Dense(1)], num_stages=1
    ... )
    >>> model.compile("sgd", "mse")
    >>> report = tf_gpipe.verify(model, np.ones((4, 8)), np.ones((4, 1)))
    >>> report.worst["loss"].name, report.worst["loss"].ok
    ('loss', True)
    """

    ok: bool
    worst: dict[str, Difference]
    first_layer: str | None
    layers: list[str]
    problems: list[str]
    notes: list[str]
    compared: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dictionary that JSON can hold."""
        found = dataclasses.asdict(self)
        found["worst"] = {
            kind: {**x._asdict(), "difference": _finite(x.difference)}
            for kind, x in self.worst.items()
        }
        return found

    def __str__(self) -> str:
        verdict = "differs from the plain model"
        if self.ok:
            verdict = "has the plain model's numbers"
            if len(self.compared) == 1:
                verdict += f" in {self.compared[0]}, all that was compared"
        elif not self.layers and all(x.ok for x in self.worst.values()):
            verdict = "could not be compared with the plain model"
        lines = [f"The pipeline {verdict}.", ""]
        if self.worst:
            lines.append(
                f"{'':10}  {'worst difference':>16}  {'tolerance':>9}  of"
            )
        for kind in KINDS:
            if kind in self.worst:
                x = self.worst[kind]
                mark = "" if x.ok else "  DIFFERS"
                lines.append(
                    f"{kind:10}  {x.difference:16.1e}  {x.tolerance:9.0e}  "
                    f"{x.name}{mark}"
                )
        if self.first_layer is not None:
            lines += ["", f"The first layer that differs: {self.first_layer}"]
        if self.layers:
            lines += _wrapped(
                "Layers that differ by themselves: " + ", ".join(self.layers)
            )
        for title, texts in (
            ("Problems:", self.problems),
            ("Not compared, or not as it runs:", self.notes),
        ):
            if texts:
                lines += ["", title]
                for text in texts:
                    lines += _wrapped(text, "- ")
        return "\n".join(lines) + "\n"


class Comparison:
    """Collects the `Difference`s of each kind of value."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance
        self.found: dict[str, list[Difference]] = {}

    def add(
        self,
        kind: str,
        expected: Mapping[str, np.ndarray],
        received: Mapping[str, np.ndarray],
        before: Mapping[str, np.ndarray] | None = None,
        floor: float = 0.0,
        again: bool = False,
    ) -> None:
        """Compares arrays by their names.

        Args:
            kind: One of `KINDS`.
            expected: Arrays of the plain model.
            received: Arrays of the pipeline.
            before: The arrays before a step. If given, differences are relative
                to the step's changes, and the rounding of the values
                themselves is allowed for.
            floor: Differences are relative to at least this.
            again: Boolean, whether the arrays replace those that were added
                before and differ.
        """
        found = differences(
            expected, received, self.tolerance, before=before, floor=floor
        )
        known = self.found.setdefault(kind, [])
        if again:
            by_name = {x.name: x for x in found}
            known[:] = [x if x.ok else by_name.get(x.name, x) for x in known]
        else:
            known += found

    def update(self, other: "Comparison") -> None:
        """Adds the differences of another comparison."""
        for kind, found in other.found.items():
            self.found.setdefault(kind, []).extend(found)

    def failed(self, kind: str | None = None) -> list[Difference]:
        """Returns the differences above the tolerance, of a kind or of all."""
        kinds = self.found if kind is None else [kind]
        return [x for k in kinds for x in self.found.get(k, ()) if not x.ok]

    def worst(self) -> dict[str, Difference]:
        return {
            kind: max(found, key=lambda x: (not x.ok, x.difference))
            for kind, found in self.found.items()
            if found
        }


def differences(
    expected: Mapping[str, np.ndarray],
    received: Mapping[str, np.ndarray],
    tolerance: float,
    before: Mapping[str, np.ndarray] | None = None,
    floor: float = 0.0,
) -> list[Difference]:
    """Returns the difference of each array; see `Comparison.add`."""
    sizes = {}
    for name, x in expected.items():
        change = _changed(x, None if before is None else before.get(name))
        sizes[name] = largest([change])
    floats = [sizes[k] for k, x in expected.items() if _is_float(x)]
    floor = max([floor, *(_FLOOR * x for x in floats)])
    found = []
    for name in dict.fromkeys([*expected, *received]):
        a, b = expected.get(name), received.get(name)
        if a is None or b is None:
            where = "the pipeline" if b is None else "the plain model"
            missing = f"{name} (not there in {where})"
            found.append(Difference(missing, math.inf, tolerance))
            continue
        if not _is_float(a):
            same = a.shape == b.shape and bool(np.all(a == b))
            found.append(Difference(name, 0.0 if same else math.inf, 0.0))
            continue
        scale = max(sizes[name], floor)
        if before is not None:
            # Where a small step is added to a large value, the rounding of the
            # sum exceeds that of the step.
            rounding = 4 * _epsilon(a.dtype) * largest([a])
            scale += rounding / tolerance
        found.append(Difference(name, _apart(a, b, scale), tolerance))
    return found


def largest(arrays: Iterable[Any]) -> float:
    """Returns the largest absolute value of all finite entries, or 0."""
    sizes = [0.0]
    for x in arrays:
        x = np.abs(np.asarray(x, dtype="float64"))
        x = x[np.isfinite(x)]
        if x.size:
            sizes.append(float(x.max()))
    return max(sizes)


def _changed(x: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """Returns the change since `before`; `x` itself if that is unknown."""
    if not _is_float(x) or before is None or before.shape != x.shape:
        return x
    return x.astype("float64") - before.astype("float64")


def _apart(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    """Returns the largest difference of two entries, relative to `scale`."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.astype("float64"), b.astype("float64")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)[~same]
    if not np.isfinite(apart).all():
        return math.inf
    return float(apart.max()) / scale if scale else math.inf


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" or x.dtype.name == "bfloat16"


def _epsilon(dtype: np.dtype) -> float:
    return 2.0**-8 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _wrapped(text: str, bullet: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
    )
