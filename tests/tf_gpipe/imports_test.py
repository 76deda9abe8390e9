"""Imports point down: a package imports only packages below it."""

import ast
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized

import tf_gpipe

PACKAGE = pathlib.Path(tf_gpipe.__file__).parent
# From top to bottom. The packages of a row do not import one another.
FLOORS = (
    ("__init__", "__main__", "commands", "worker"),
    ("public",),
    ("verification", "callbacks", "tuning"),
    ("models", "checkpoints"),
    ("planning",),
    ("step", "partition"),
    ("stage",),
    ("devices", "random_numbers"),
    ("schedule", "table", "upstream", "upstream_server"),
    ("checks", "progress", "whole_files", "_version"),
)
# Commands use the package as users do; `worker` is one of them.
USERS = ("commands", "worker", "__main__")


def package_of(path):
    """Returns the name of a file's package or module directly in tf_gpipe."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path):
    """Returns the packages of tf_gpipe that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{x.name}" for x in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "tf_gpipe":
                found.add(rest[0] if rest else "__init__")
    return found


class ImportsTest(parameterized.TestCase):
    @parameterized.parameters(*sorted(PACKAGE.rglob("*.py")))
    def test_point_down(self, path):
        package = package_of(path)
        if package in USERS:
            return
        (floor,) = (i for i, row in enumerate(FLOORS) if package in row)
        below = {x for row in FLOORS[floor + 1 :] for x in row}
        self.assertContainsSubset(imported(path), below | {package})

    def test_each_package_has_a_floor(self):
        found = {package_of(path) for path in PACKAGE.rglob("*.py")}
        self.assertCountEqual(found, [x for row in FLOORS for x in row])

    @parameterized.parameters(
        *(x.parent for x in PACKAGE.glob("*/__init__.py"))
    )
    def test_a_package_says_what_its_files_are(self, package):
        text = ast.get_docstring(
            ast.parse((package / "__init__.py").read_text())
        )
        files = {x.stem for x in package.glob("*.py")} - {"__init__"}
        self.assertContainsSubset(files, re.findall(r"\w+", text))


if __name__ == "__main__":
    absltest.main()
