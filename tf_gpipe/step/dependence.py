"""How a value depends on the rows of a batch, judged by its values for some.

For a batch A of n rows, B of m, AB with the rows of both, and AA with those of
A twice, a value F is

    a mean, if  (n + m) * F(AB) = n * F(A) + m * F(B)
    a sum, if             F(AB) =     F(A) +     F(B)

A constant is a mean. Anything else, such as a product of two means, cannot be
computed from the values for A and B. Whether it rather grows as a mean or as a
sum does, F(AA) tells.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_gpipe.step.made_up_batches import A
from tf_gpipe.step.made_up_batches import B


class Dependence(NamedTuple):
    """How a value without a batch axis depends on the rows of a batch.

    Attributes:
        kind: "mean" or "sum", whichever is closer.
        exact: Whether the value is exactly that.
        constant: Whether it is the same for all rows.
    """

    kind: str
    exact: bool
    constant: bool = False


def dependence(
    found: Sequence[tuple[np.ndarray, ...]], tolerance: float
) -> Dependence | None:
    """Returns how a value depends on rows; `None` if that cannot be told.

    Args:
        found: For several A and B: the values for batches A, B, AB and AA.
        tolerance: As `Trials.tolerance`.
    """
    n, m = A, B
    seen = False
    kinds, growths = {"mean", "sum"}, {"mean", "sum"}
    constant = True
    for values in found:
        if not np.issubdtype(values[0].dtype, np.number):
            a, b, ab, _ = values
            seen = True
            # The same in all trials, or it depends on what the rows are.
            known = (a, b, ab, found[0][0])
            if not all(np.array_equal(a, x) for x in known):
                constant = False
                kinds.clear()
            continue
        a, b, ab, aa = (np.asarray(x, "float64") for x in values)
        if not all(np.isfinite(x).all() for x in (a, b, ab, aa)):
            continue
        seen = True
        allowed = tolerance * max(np.abs(x).max() for x in (a, b, ab, aa))

        def same(x, y, allowed=allowed):
            return bool((np.abs(x - y) <= allowed).all())

        constant &= same(a, b) and same(a, ab)
        if not same(ab, (n * a + m * b) / (n + m)):
            kinds.discard("mean")
        if not same(ab, a + b):
            kinds.discard("sum")
        if not same(aa, a):
            growths.discard("mean")
        if not same(aa, 2 * a):
            growths.discard("sum")
    if not seen:
        return None
    if kinds:
        return Dependence("mean" if "mean" in kinds else "sum", True, constant)
    return Dependence("sum" if growths == {"sum"} else "mean", False)


def is_empty(found: Sequence[tuple[np.ndarray, ...]]) -> bool:
    """Returns whether a value is always zero, or the same boolean."""
    arrays = [x for values in found for x in values]
    if arrays[0].dtype == bool:
        return all(x.all() for x in arrays) or not any(map(np.any, arrays))
    return np.issubdtype(arrays[0].dtype, np.number) and not any(
        map(np.any, arrays)
    )


def compares_rows(found: tuple[np.ndarray, ...], tolerance: float) -> bool:
    """Returns whether the rows of A and B have other values in AB.

    `False` if AB has another number of values than both.

    Args:
        found: Values for the batches A, B, AB and AA, one or more a row.
        tolerance: As `Trials.tolerance`.
    """
    a, b, ab, _ = (np.asarray(x, "float64") for x in found)
    rows = np.concatenate([a, b])
    both = rows, ab
    if rows.shape != ab.shape or not all(np.isfinite(x).all() for x in both):
        return False
    allowed = tolerance * max(np.abs(x).max(initial=0) for x in both)
    return bool((np.abs(rows - ab) > allowed).any())


def is_reordered(found: tuple[np.ndarray, ...], tolerance: float) -> bool:
    """Returns whether AB has the rows of A and B in another order.

    They may be other rows, if layers compare those of a batch.

    Args:
        found: Values for the batches A, B, AB and AA.
        tolerance: As `Trials.tolerance`.
    """
    a, b, ab, _ = found
    rows = np.concatenate([a, b])
    if rows.shape != ab.shape:
        return False
    rows, ab = (x.reshape(len(x), -1) for x in (rows, ab))
    if np.issubdtype(rows.dtype, np.number):
        rows, ab = (x.astype("complex128") for x in (rows, ab))
        if not (np.isfinite(rows).all() and np.isfinite(ab).all()):
            return False
        allowed = tolerance * max(np.abs(x).max(initial=0) for x in (rows, ab))
        equal = (np.abs(rows[:, None] - ab[None]) <= allowed).all(-1)
    else:
        equal = (rows[:, None] == ab[None]).all(-1)
    permuted = equal.any(0).all() and equal.any(1).all()
    return bool(permuted and not equal.diagonal().all())
