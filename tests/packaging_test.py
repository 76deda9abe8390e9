"""`pip install .` installs what users import, and nothing else."""

import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv

import pytest
import tensorflow as tf

from tf_gpipe.__main__ import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
MY_MODELS = """
import keras
import tf_gpipe

def make():
    print(tf_gpipe.__file__)
    return [keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(4)]
"""


@pytest.mark.slow
class WheelTest(tf.test.TestCase):
    """The wheel alone is enough for users, away from the checkout."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(
            cls.enterClassContext(tempfile.TemporaryDirectory())
        )
        source = cls.folder / "source"
        shutil.copytree(
            ROOT, source, ignore=shutil.ignore_patterns(".*", "build")
        )
        environment = cls.folder / "environment"
        venv.create(environment, with_pip=True)
        cls.bin = environment / "bin"
        wheels = cls.folder / "wheels"
        run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            + ["--no-build-isolation", f"--wheel-dir={wheels}", str(source)]
        )
        shutil.rmtree(source)
        (wheel,) = wheels.glob("*.whl")
        run([cls.bin / "pip", "install", "--quiet", "--no-deps", wheel])
        # Links the packages of this environment, except for this project,
        # which may be installed here from a checkout.
        site = sysconfig.get_paths()["purelib"]
        (theirs,) = environment.glob("lib/python*/site-packages")
        for path in pathlib.Path(site).iterdir():
            ours = path.name.lower().startswith(("__editable__", "tf_gpipe"))
            if not ours and not (theirs / path.name).exists():
                (theirs / path.name).symlink_to(path)
        for path in theirs.glob("*.pth"):
            path.unlink()

    def run_there(self, *command):
        return run(
            [self.bin / command[0], *command[1:]],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.folder)},
        )

    def test_comes_from_the_wheel(self):
        out = self.run_there("python", "-c", "import tf_gpipe as t; print(t)")
        self.assertIn(str(self.folder), out)

    def test_example_of_readme(self):
        (code, *_) = re.findall(
            "^```python\n(.*?)^```$",
            (ROOT / "README.md").read_text(),
            re.DOTALL | re.MULTILINE,
        )
        (self.folder / "example.py").write_text(code)
        self.assertIn("loss", self.run_there("python", "example.py"))

    def test_commands(self):
        small = ["--model_args=num_blocks=1,num_filters=2", "--batch_size=8"]
        self.assertIn("bubble", self.run_there("tf-gpipe", "plan", *small))
        self.assertIn("bubble", self.run_there("tf-gpipe", "timeline"))
        self.assertIn("loss", self.run_there("tf-gpipe", "verify", *small))
        name = "import sys; print(sys.argv[1])"
        for command in (["workers", "1"], ["supervise"]):
            out = self.run_there(
                *("python", "-m", "tf_gpipe", *command),
                *("python", "-c", name, "said"),
            )
            self.assertIn("said", out)
        listed = self.run_there("tf-gpipe", "--help")
        for command in COMMANDS:
            self.assertIn(command, listed)
            self.run_there("tf-gpipe", command, "--help")


def run(command, **kwargs):
    """Returns the standard output of a command."""
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, **kwargs
    ).stdout


class InstallTest(tf.test.TestCase):
    @pytest.mark.slow
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
            # A module in the working directory, which prints where it found
            # tf_gpipe.
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
