"""`pip install .` installs what users import, and nothing else."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[1]
MY_MODELS = """
import keras
import tf_gpipe

def make():
    print(tf_gpipe.__file__)
    return [keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(4)]
"""


class InstallTest(tf.test.TestCase):
    def test_install(self):
        with tempfile.TemporaryDirectory() as folder:
            # A copy: setuptools writes beside the sources.
            source = pathlib.Path(folder, "source")
            shutil.copytree(
                ROOT, source, ignore=shutil.ignore_patterns(".*", "build")
            )
            target = pathlib.Path(folder, "target")
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet"]
                + ["--no-deps", "--no-build-isolation"]
                + [f"--target={target}", str(source)],
                check=True,
            )
            installed = {
                path.name
                for path in target.iterdir()
                if path.suffix != ".dist-info"
            }
            self.assertEqual(installed, {"tf_gpipe", "model_zoo", "bin"})
            self.assertTrue((target / "tf_gpipe" / "py.typed").exists())
            # A module in the working directory, which knows what it runs with.
            pathlib.Path(folder, "my_models.py").write_text(MY_MODELS)
            output = subprocess.run(
                [target / "bin" / "tf-gpipe", "plan", "--model=my_models:make"],
                cwd=folder,
                env={"PYTHONPATH": str(target), "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            self.assertIn(str(target), output)
            self.assertIn("25 parameters", output)
            (metadata,) = target.glob("tf_gpipe-*.dist-info/METADATA")
            self.assertIn("License-File: LICENSE", metadata.read_text())
