"""The scripts and notebooks in examples/ run, and show that they worked."""

import json
import os
import pathlib
import re
import subprocess
import tempfile

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import quick_python

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# A pattern in the output of each script.
SHOWS = {
    "causal_lm_lora.py": r"before: cdefgh[\s\S]*after: cdcdc",
    "contrastive.py": r"nearest neighbour is the same digit: 0\.9",
    "custom_train_step.py": r"loss: (0\.\d+) as a pipeline, \1",
    "keras_hub_classifier.py": r"classes of the two texts: \[1 0\]",
    "mnist_from_scratch.py": r"accuracy of the exported model: 0\.9",
    "resnet_transfer.py": r"base as it was: True",
    "two_hosts.py": r"loss: [\d.]+ at first, [\d.]+ in the end",
    "unet_segmentation.py": r"union on other images: 0\.[789]",
}
NOTEBOOKS = {
    "kaggle_two_t4.ipynb": r"bubble [\d.]+%",
    "laptop_cpu.ipynb": r"accuracy: 0\.\d+",
    "one_gpu.ipynb": r"M=8, remat always: \d+ MiB",
}
QUICK = ("contrastive.py", "custom_train_step.py")


def cells(path):
    """Returns a notebook's cells of code, as one program.

    The program runs in a process, without a kernel: commands that install
    something are in text cells.
    """
    notebook = json.loads(path.read_text())
    return "\n".join(
        "".join(x["source"])
        for x in notebook["cells"]
        if x["cell_type"] == "code"
    )


class ExamplesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*QUICK)
    @pytest.mark.slow_after(1)
    def test_quick(self, name):
        self.check_script(name)

    @parameterized.parameters(*(x for x in SHOWS if x not in QUICK))
    @pytest.mark.slow
    def test_script(self, name):
        self.check_script(name)

    @parameterized.parameters(*NOTEBOOKS)
    @pytest.mark.slow
    def test_notebook(self, name):
        printed = self.run_code(cells(EXAMPLES / name), name)
        self.assertRegex(printed, NOTEBOOKS[name])

    def check_script(self, name):
        printed = self.run_code((EXAMPLES / name).read_text(), name)
        self.assertRegex(printed, SHOWS[name])

    def run_code(self, code, name):
        if "import keras_hub" in code:
            pytest.importorskip("keras_hub", exc_type=ImportError)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        # AutoGraph reads source code from files.
        program = pathlib.Path(folder) / "program.py"
        program.write_text(code)
        done = subprocess.run(
            [*quick_python.command(), program],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, f"{name}: {done.stderr[-3000:]}")
        return done.stdout

    def test_all_are_here(self):
        found = [x.name for x in EXAMPLES.glob("*.py")]
        self.assertCountEqual(found, SHOWS)
        found = [x.name for x in EXAMPLES.glob("*.ipynb")]
        self.assertCountEqual(found, NOTEBOOKS)

    @parameterized.parameters(*SHOWS)
    def test_is_short(self, name):
        self.assertLessEqual(
            len((EXAMPLES / name).read_text().splitlines()), 60
        )

    @parameterized.parameters(*NOTEBOOKS)
    def test_notebook_has_no_outputs(self, name):
        notebook = json.loads((EXAMPLES / name).read_text())
        self.assertEqual(notebook["nbformat"], 4)
        for cell in notebook["cells"]:
            self.assertFalse(cell.get("outputs"))
        self.assertTrue(re.search(r"split_cpu\(2\)", cells(EXAMPLES / name)))


if __name__ == "__main__":
    tf.test.main()
