"""Marks of tests are where pytest sees them."""

import pathlib
import re

from absl.testing import absltest

TESTS = pathlib.Path(__file__).parent


class MarksTest(absltest.TestCase):
    def test_below_what_makes_several_tests_of_one(self):
        """Which would lose a mark above it."""
        for path in TESTS.rglob("*_test.py"):
            lost = re.findall(
                r"@pytest\.mark\..*\n\s*@(?:parameterized|pairwise)\.",
                path.read_text(),
            )
            self.assertEmpty(lost, path)


if __name__ == "__main__":
    absltest.main()
