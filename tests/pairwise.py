"""Cells of a grid that stand for all of them, each of which traces a model.

Of three axes and more the whole grid finds little beyond what it finds that
holds each pair of values (Kuhn et al., 2004, "Software fault interactions").
With `TF_GPIPE_TEST_ALL=1` in the environment all cells are tried.
"""

import collections
import os

import allpairspy
from absl.testing import parameterized

ALL = os.environ.get("TF_GPIPE_TEST_ALL", "") == "1"


def product(**axes):
    """Returns a decorator like that of `parameterized.product`, of few cells.

    Each two values of two axes meet.
    """
    if ALL:
        return parameterized.product(**axes)
    cells = allpairspy.AllPairs(collections.OrderedDict(axes))
    return parameterized.parameters(*(cell._asdict() for cell in cells))


def each(**axes):
    """As `product`, of the fewest cells: each value is in one of them.

    For what does not depend on how the values of two axes meet.
    """
    if ALL:
        return parameterized.product(**axes)

    def cell(i):
        # Each axis begins elsewhere when it begins again, so that two of the
        # same length do not go along.
        return {
            name: values[(i + j * (i // len(values))) % len(values)]
            for j, (name, values) in enumerate(axes.items())
        }

    count = max(map(len, axes.values()))
    return parameterized.parameters([cell(i) for i in range(count)])


def some(values, count):
    """Returns the first `count` of a sequence of values drawn by chance."""
    return values if ALL else values[:count]
