"""Which classes have code that may change something beside a layer."""

import functools

import keras
import tensorflow as tf
from absl.testing import parameterized

from tf_gpipe.stage import likeness
from tf_gpipe.stage import user_code

L = keras.layers

units = []
count = 0
factors = {"a": 1.0}
SIZE = (3, "same")


class Recorder:
    def __init__(self):
        self.tensors = []


class Flags:
    active = False


recorder = Recorder()
flags = Flags()


def _noted(x):
    units.append(x)
    return x


def _recording(method):
    kept = []

    @functools.wraps(method)
    def run(self, x):
        kept.append(x)
        return method(self, x)

    return run


def _twice(method):
    @functools.wraps(method)
    def run(self, x):
        return 2 * method(self, x)

    return run


class GlobalList(L.Layer):
    def call(self, x):
        units.append(x)
        return x


class GlobalTable(L.Layer):
    def call(self, x):
        return x * factors["a"]


class GlobalNumber(L.Layer):
    def call(self, x):
        global count
        count += 1
        return x


class GlobalObject(L.Layer):
    def call(self, x):
        recorder.tensors.append(x)
        return x


class Helped(L.Layer):
    def call(self, x):
        return _noted(x)


class HelpedWithin(L.Layer):
    def call(self, x):
        return sum(_noted(i) for i in [x, x])


class Default(L.Layer):
    def call(self, x, seen=[]):  # noqa: B006
        seen.append(x)
        return x


class Decorated(L.Layer):
    @_recording
    def call(self, x):
        return x


class OfClass(L.Layer):
    kept = []  # noqa: RUF012

    def call(self, x):
        self.kept.append(x)
        return x


class Slotted(L.Layer):
    __slots__ = ("slot",)


class PerLayer:
    values = {}  # noqa: RUF012

    def __get__(self, layer, kind):
        return self if layer is None else self.values[id(layer)]

    def __set__(self, layer, value):
        self.values[id(layer)] = value


class Described(L.Layer):
    value = PerLayer()


class Property(L.Layer):
    @property
    def last(self):
        return _noted(self.factor)

    def call(self, x):
        return x


class Static(L.Layer):
    @staticmethod
    def last(x):
        return _noted(x)


class Compiled(L.Layer):
    @tf.function
    def call(self, x):
        return x


class Cached(L.Layer):
    @functools.lru_cache(3)  # noqa: B019
    def size(self):
        return 3


def _around():
    kept = []

    class Around(L.Layer):
        def call(self, x):
            return kept.append(x)

    class Early(L.Layer):
        def call(self, x):
            return later(x)

    found = [Around, Early, type("Inherited", (Around,), {})]
    assert all(map(user_code.may_change, found))
    later = keras.ops.abs  # noqa: F841
    return found


class Plain(L.Layer):
    count: int = 0
    size = SIZE
    units = SIZE

    def __init__(self, unit=3):
        super().__init__()
        units.append(unit)

    @property
    def doubled(self):
        return 2 * self.factor

    @staticmethod
    def helped(x):
        return Plain.last(x) + SIZE[0]

    @classmethod
    def last(cls, x):
        return keras.ops.abs(x)

    def call(self, x, units=SIZE):
        # Attributes have the names of global lists.
        self.units = [self.doubled for _ in units]
        tf.concat(x, 0).count = count
        if flags.active:
            return super().call(x)
        return keras.activations.gelu(x) if isinstance(x, tf.Tensor) else None


class DecoratedPlainly(L.Layer):
    @_twice
    def call(self, x):
        return x


class Recursive(L.Layer):
    def call(self, x):
        return _down(x, 3)


def _down(x, n):
    return _down(x, n - 1) if n else x


class MayChangeTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        *(GlobalList, GlobalTable, GlobalNumber, GlobalObject, Helped),
        *(HelpedWithin, Default, Decorated, OfClass, Slotted, Described),
        *(Property, Static, Compiled, Cached),
    )
    def test_may(self, kind):
        self.assertTrue(user_code.may_change(kind))

    def test_closures(self):
        self.assertLen(_around(), 3)

    @parameterized.parameters(
        *(Plain, DecoratedPlainly, Recursive, L.Dense, L.LSTM),
    )
    def test_may_not(self, kind):
        self.assertFalse(user_code.may_change(kind))

    @parameterized.parameters(
        (_noted, True),
        (lambda x: units.append(x), True),
        (lambda x, n=3: x * n, False),
        (keras.activations.gelu, False),
    )
    def test_functions(self, function, expected):
        self.assertEqual(user_code.may_change(function), expected)

    @parameterized.parameters(
        (lambda: L.Dense(3, _noted), False),
        (lambda: L.Lambda(lambda x: _noted(x)), False),
        (lambda: Decorated(), False),
        (lambda: L.Dense(3, keras.activations.gelu), True),
        (lambda: Plain(), True),
    )
    def test_alike(self, make, expected):
        """Layers are unlike all others if their code may change something."""
        one, other = make(), make()
        alike = likeness.of(one).form == likeness.of(other).form
        self.assertEqual(alike, expected)
        costs = [likeness.of(x, in_costs=True).form for x in (one, one)]
        self.assertEqual(*costs)

    def test_holding_an_object(self):
        """Layers that hold one object of an unknown class may change it."""
        layers = [L.Dense(3) for _ in range(3)]
        for layer in layers[:2]:
            layer.recorder = recorder
        forms = [likeness.of(layer).form for layer in layers]
        self.assertLen(set(forms), 3)

    def test_made_by_exec(self):
        """A class without a module is not a library's."""
        names = {"L": L}
        exec(
            "class Read(L.Layer):\n"
            "    def call(self, x):\n"
            "        return x * len(self.name)\n"
            "def read(x): return x\n",
            names,
        )
        for x in (names["Read"], names["read"]):
            self.assertFalse(user_code.is_of_library(x))
        for x in (L.Dense, keras.activations.gelu, dict, tf.nn.relu):
            self.assertTrue(user_code.is_of_library(x))


if __name__ == "__main__":
    tf.test.main()
