"""Covering samples of the grids that tests are parameterised by.

Each cell of a grid traces a model. Of a grid with three or more axes, cells in
which all pairs of values meet find nearly as many faults as all cells do (Kuhn
et al., 2004, "Software fault interactions"). With `TF_GPIPE_TEST_ALL=1` in the
environment the tests try all cells.
"""

import collections
import os

import allpairspy
from absl.testing import parameterized

ALL = os.environ.get("TF_GPIPE_TEST_ALL", "") == "1"


def product(**axes):
    """Like `parameterized.product`, with fewer cells.

    Any two values of two axes meet in some cell.
    """
    if ALL:
        return parameterized.product(**axes)
    cells = allpairspy.AllPairs(collections.OrderedDict(axes))
    return parameterized.parameters(*(cell._asdict() for cell in cells))


def each(**axes):
    """Like `product`, with as many cells as the longest axis has values.

    Each value is in some cell, and as many pairs of values as this allows. For
    tests whose axes do not interact.
    """
    if ALL:
        return parameterized.product(**axes)
    axes = {name: list(values) for name, values in axes.items()}
    met = collections.Counter()
    cells = []
    for _ in range(max(map(len, axes.values()))):
        cell = {}
        for name in sorted(axes, key=lambda name: -len(axes[name])):

            def order(i, cell=cell, name=name):
                new = [x for x in cell.items() if not met[x, (name, i)]]
                return met[name, i], -len(new)

            i = min(range(len(axes[name])), key=order)
            met.update([(name, i), *((x, (name, i)) for x in cell.items())])
            cell[name] = i
        cells.append({name: axes[name][i] for name, i in cell.items()})
    return parameterized.parameters(*cells)


def some(values, count):
    """Returns the first `count` of random values, or all if `ALL`."""
    return values if ALL else values[:count]
