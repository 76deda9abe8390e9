"""Generators of random numbers are found wherever a `PyDataset` holds them."""

import functools
import random
import weakref

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe import random_numbers


class Data(keras.utils.PyDataset):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def __len__(self):
        return 1


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def method(self):
        return self.held


def draw(numbers, size=1):
    return numbers.random(size)


def function(numbers):
    return lambda: numbers.random()


def default(numbers):
    def drawing(numbers=numbers):
        return numbers.random()

    return drawing


def keyword(numbers):
    def drawing(*, numbers=numbers):
        return numbers.random()

    return drawing


def iterator(numbers):
    def numbers_from():
        while True:
            yield numbers.random()

    found = numbers_from()
    next(found)
    return found


HOLDERS = {
    "an attribute": lambda x: x,
    "a list": lambda x: [x],
    "a dictionary of tuples": lambda x: {"a": (1, x)},
    "a function": function,
    "a default": default,
    "a keyword's default": keyword,
    "a part of a function": lambda x: functools.partial(draw, x),
    "a part by name": lambda x: functools.partial(draw, numbers=x),
    "an iterator": iterator,
    "a slot": Slots,
    "a method": lambda x: Slots([x]).method,
    "another data set": lambda x: Data([Data(x)]),
    "a long list": lambda x: [*map(str, range(200_000)), x],
}


class RandomNumbersTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*HOLDERS)
    def test_is_found(self, holder):
        numbers = np.random.default_rng(1)
        drawn = random_numbers.watched(Data(HOLDERS[holder](numbers)))
        self.assertEmpty(drawn())
        numbers.random()
        self.assertEqual(list(drawn()), [random_numbers.OWN])

    @parameterized.parameters(
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
        lambda: random.Random(1),
    )
    def test_is_made_as_it_is_needed(self, make):
        data = Data([])
        drawn = random_numbers.watched(data)
        data.held.append({"made": make()})
        self.assertEqual(list(drawn()), [random_numbers.OWN])

    def test_everything_is_reached_once(self):
        """An object that holds itself, and more objects than are looked at."""
        held: list = [[] for _ in range(2 * random_numbers._MOST_OBJECTS)]
        held.append(held)
        self.assertEmpty(random_numbers.watched(Data(held))())

    def test_proxies_are_not_asked(self):
        gone = weakref.proxy(Data(None))
        self.assertEmpty(random_numbers._within(Data([gone])))

    @parameterized.parameters(
        random, np.random, random.choice, np.random.normal, Slots, draw
    )
    def test_what_all_share_is_no_part_of_it(self, shared):
        self.assertEmpty(random_numbers._within(Data(shared)))


if __name__ == "__main__":
    tf.test.main()
