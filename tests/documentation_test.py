"""The examples in docstrings and in README run, and print what they say."""

import contextlib
import doctest
import importlib
import io
import pathlib
import pkgutil
import re

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
import tf_gpipe

README = pathlib.Path(__file__).parents[1] / "README.md"
NAMES = {"keras": keras, "np": np, "tf": tf, "tf_gpipe": tf_gpipe}


def modules():
    """Returns the names of all modules of the packages."""
    return [
        x.name
        for package in (tf_gpipe, model_zoo)
        for x in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


def examples():
    """Returns the docstrings with examples: a `DocTest` each, by name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for name in modules():
        module = importlib.import_module(name)
        names = {**vars(module), **NAMES}
        for test in finder.find(module, name, globs=names):
            if test.examples:
                found[test.name] = test
    return found


def blocks():
    """Returns README's blocks of Python that can be run, by their line."""
    text = README.read_text()
    return {
        text[: match.start()].count("\n") + 1: match["code"]
        for match in re.finditer(
            r"^```python\n(?P<code>.*?)^```$", text, re.DOTALL | re.MULTILINE
        )
    }


EXAMPLES = examples()
BLOCKS = blocks()


class DocumentationTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(contextlib.chdir(self.get_temp_dir()))

    @parameterized.parameters(*sorted(EXAMPLES))
    def test_docstring(self, name):
        printed = io.StringIO()
        doctest.DocTestRunner().run(EXAMPLES[name], out=printed.write)
        self.assertEmpty(printed.getvalue())

    @parameterized.parameters(*BLOCKS)
    def test_readme(self, line):
        code = compile(BLOCKS[line], f"{README.name}:{line}", "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, {})

    def test_there_are_examples(self):
        self.assertIn(
            "tf_gpipe.models.sequential.PipelinedSequential", EXAMPLES
        )
        self.assertGreaterEqual(len(BLOCKS), 4)


if __name__ == "__main__":
    tf.test.main()
