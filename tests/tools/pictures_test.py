"""The pictures of the documentation are those that the library draws."""

import pathlib
import tempfile

import matplotlib.image
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tools import pictures

# How far pixels may be apart, on average: letters are drawn by other libraries.
SAME = 0.02


class PicturesTest(parameterized.TestCase):
    @parameterized.parameters(*pictures.SIMULATED)
    @pytest.mark.slow_after(1)
    def test_simulated(self, name):
        found, drawn = self.draw(name)
        self.assertEqual(found.shape, drawn.shape, REDRAW)
        self.assertLess(np.mean(np.abs(found - drawn)), SAME, REDRAW)

    @parameterized.parameters("readme", "measured")
    @pytest.mark.slow
    def test_measured(self, name):
        # Times differ, but there are as many devices and charts.
        found, drawn = self.draw(name)
        self.assertEqual(found.shape, drawn.shape, REDRAW)

    def draw(self, name):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "picture.png")
            pictures.PICTURES[name](path)
            drawn = matplotlib.image.imread(path)
        return matplotlib.image.imread(pictures.FOLDER / f"{name}.png"), drawn

    def test_each_is_shown(self):
        pages = [pictures.ROOT / "README.md"]
        pages += sorted((pictures.ROOT / "docs").rglob("*.md"))
        text = "".join(x.read_text() for x in pages)
        for path in pictures.FOLDER.iterdir():
            self.assertIn(path.stem, pictures.PICTURES)
            self.assertIn(f"pictures/{path.name}", text)

    def test_unknown_name(self):
        with self.assertRaises(SystemExit):
            pictures.main(["none"])


REDRAW = "Draw it again: python -m tools.pictures"

if __name__ == "__main__":
    absltest.main()
