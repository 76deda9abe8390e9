"""`pip install .` installs what users import, and nothing else."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[1]


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
            self.assertEqual(installed, {"tf_gpipe", "model_zoo"})
            self.assertTrue((target / "tf_gpipe" / "py.typed").exists())
            code = (
                "import tf_gpipe, tf_gpipe.partition.contiguous, model_zoo; "
                "print(tf_gpipe.__file__, tf_gpipe.__version__)"
            )
            output = subprocess.run(
                [sys.executable, "-c", code],
                cwd=folder,
                env={"PYTHONPATH": str(target), "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            self.assertIn(str(target), output)
            (metadata,) = target.glob("tf_gpipe-*.dist-info/METADATA")
            self.assertIn("License-File: LICENSE", metadata.read_text())
