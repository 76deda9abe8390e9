"""Cells of a grid in which each two values of two axes meet."""

import collections

import allpairspy
from absl.testing import parameterized


def product(**axes):
    """Returns a decorator like that of `parameterized.product`, of few cells.

    Of three axes and more the whole grid finds little beyond what it finds
    that holds each pair of values (Kuhn et al., 2004, "Software fault
    interactions"), and each cell traces a model.
    """
    cells = allpairspy.AllPairs(collections.OrderedDict(axes))
    return parameterized.parameters(*(cell._asdict() for cell in cells))
