"""A run whose workers, or whose trainer, are killed ends with the same bits."""

import json
import subprocess
import sys

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tools import child_process


@pytest.mark.slow
class ChaosTest(parameterized.TestCase):
    @parameterized.parameters("worker", "trainer")
    def test_kills(self, what):
        result = subprocess.run(
            [
                *(sys.executable, "-m", "tools.chaos", "--json"),
                *("--kills=2", "--seed=1", f"--of={what}"),
            ],
            capture_output=True,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
        found = json.loads(result.stdout)
        self.assertTrue(found["equal"], found["different"])
        self.assertEqual(found["kills"], 2)
        self.assertGreater(found["arrays"], 100)
        self.assertGreater(found["lost_seconds"], 0)


if __name__ == "__main__":
    absltest.main()
