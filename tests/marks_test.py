"""Tests have their marks where pytest sees them."""

import pathlib
import re

from absl.testing import absltest

TESTS = pathlib.Path(__file__).parent


class MarksTest(absltest.TestCase):
    def test_marks_are_below_parameters(self):
        """absl drops a mark above `parameterized`."""
        for path in TESTS.rglob("*_test.py"):
            lost = re.findall(
                r"@pytest\.mark\..*\n\s*@(?:parameterized|pairwise)\.",
                path.read_text(),
            )
            self.assertEmpty(lost, path)


if __name__ == "__main__":
    absltest.main()
