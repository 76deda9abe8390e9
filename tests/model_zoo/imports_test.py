"""The zoo imports only Keras, except what its docstring names."""

import ast
import pathlib
import sys

from absl.testing import absltest
from absl.testing import parameterized

import model_zoo

PACKAGE = pathlib.Path(model_zoo.__file__).parent
# What a file needs beside Keras, Python and other files of the zoo.
OTHERS = {"decoding": {"numpy", "tensorflow"}}


def imported(path):
    """Returns the modules that a file imports, with their packages."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(x.name for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


class ImportsTest(parameterized.TestCase):
    @parameterized.parameters(*sorted(PACKAGE.rglob("*.py")))
    def test_keras_alone(self, path):
        names = imported(path)
        packages = {name.split(".")[0] for name in names}
        self.assertContainsSubset(
            packages - sys.stdlib_module_names,
            {"keras", "model_zoo", *OTHERS.get(path.stem, ())},
        )
        # Private modules of Keras and TensorFlow may change.
        inside = ("keras.src", "tensorflow.python")
        self.assertEmpty([x for x in names if x.startswith(inside)])

    def test_docstring_names_the_others(self):
        for file, packages in OTHERS.items():
            self.assertContainsSubset(
                packages, imported(PACKAGE / f"{file}.py")
            )
            for word in (f"model_zoo.{file}", *packages):
                self.assertIn(word.lower(), model_zoo.__doc__.lower())


if __name__ == "__main__":
    absltest.main()
