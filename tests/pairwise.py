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

    Each value is in some cell. For tests whose axes do not interact.
    """
    if ALL:
        return parameterized.product(**axes)

    def cell(i):
        # An axis that starts over starts at another value, so that two axes of
        # the same length do not always have the same index.
        return {
            name: values[(i + j * (i // len(values))) % len(values)]
            for j, (name, values) in enumerate(axes.items())
        }

    count = max(map(len, axes.values()))
    return parameterized.parameters([cell(i) for i in range(count)])


def some(values, count):
    """Returns the first `count` of random values, or all if `ALL`."""
    return values if ALL else values[:count]
