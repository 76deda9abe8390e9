"""The examples in docstrings, README and docs run, and print what they say."""

import contextlib
import doctest
import importlib
import io
import os
import pathlib
import pkgutil
import re
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
import tf_gpipe
from tests import quick_python
from tf_gpipe.verification.report import TOLERANCES

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block below this line cannot run by itself.
NO_RUN = "<!-- no-run -->"
NAMES = {
    "keras": keras,
    "model_zoo": model_zoo,
    "np": np,
    "tf": tf,
    "tf_gpipe": tf_gpipe,
}


def modules():
    """Returns the names of all modules of tf_gpipe and model_zoo."""
    return [
        x.name
        for package in (tf_gpipe, model_zoo)
        for x in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


def examples():
    """Returns a dict from names of objects to the `DocTest`s of examples."""
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
    """Returns a dict from `page:line` to the blocks of Python that can run."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(
            rf"(?<!{NO_RUN}\n)^```python\n(?P<code>.*?)^```$",
            text,
            re.DOTALL | re.MULTILINE,
        ):
            line = text[: match.start()].count("\n") + 1
            found[f"{page.relative_to(ROOT)}:{line}"] = match["code"]
    return found


def run_alone(code, **environment):
    """Runs a block in a new process."""
    # AutoGraph reads source code from files.
    pathlib.Path("block.py").write_text(code)
    return subprocess.run(
        [*quick_python.command(), "block.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


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

    def test_first_block_in_a_process_of_its_own(self):
        """README's example, which splits the CPU of a fresh process."""
        place, code = next(iter(BLOCKS.items()))
        self.assertStartsWith(place, "README.md")
        self.assertIn("split_cpu(2)", code)
        # The spans, since the chart has no column for a task that is short
        # beside a pause of the machine.
        code += "\nprint(*((s.device, s.task.kind) for s in timeline.spans))\n"
        # TensorFlow logs failed optimisations of the graph.
        done = run_alone(code, TF_CPP_MIN_LOG_LEVEL="0")
        self.assertEqual(done.returncode, 0, done.stderr)
        printed = done.stdout
        self.assertNotIn("OP_REQUIRES", done.stderr)
        for device in (0, 1):
            self.assertIn(f"\nCPU:{device}  ", printed)
            for kind in "FB":
                self.assertIn(f"({device}, '{kind}')", printed)
        self.assertTrue(pathlib.Path("exported").exists())

    @parameterized.parameters(*BLOCKS)
    @pytest.mark.slow
    def test_block_in_a_process_of_its_own(self, place):
        """A block runs where there is one device, as on most laptops."""
        if "import keras_hub" in BLOCKS[place]:
            pytest.importorskip("keras_hub", exc_type=ImportError)
        done = run_alone(BLOCKS[place])
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])

    def test_there_are_examples(self):
        self.assertIn(
            "tf_gpipe.models.sequential.PipelinedSequential", EXAMPLES
        )
        pages = {place.split(":")[0] for place in BLOCKS}
        self.assertContainsSubset(
            {"README.md", "docs/guides/pipeline.md", "docs/guides/verify.md"},
            pages,
        )

    def test_tolerances(self):
        """The public table has the tolerances of `verify`."""
        page = (ROOT / "docs" / "numerical_contract.md").read_text()
        table = dict(
            re.findall(r"\| [^|]* in (\w+\d+) \|[^|]*\| (\S+) \|", page)
        )
        self.assertEqual(
            {name: float(text) for name, text in table.items()}, TOLERANCES
        )


if __name__ == "__main__":
    tf.test.main()
