"""A run whose workers, or whose trainer, are killed ends with the same bits."""

import json
import subprocess
import sys

import pytest
from absl.testing import absltest

from tools import child_process


@pytest.mark.slow
class ChaosTest(absltest.TestCase):
    def test_kills(self):
        result = subprocess.run(
            [
                *(sys.executable, "-m", "tools.chaos", "--json"),
                # With this seed, a worker and the trainer are killed within a
                # second of training.
                *("--kills=2", "--seed=3330", "--of=both", "--num_epochs=3"),
            ],
            capture_output=True,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
        found = json.loads(result.stdout)
        self.assertTrue(found["equal"], found["different"])
        self.assertEqual(found["kills"], 2)
        self.assertEqual(
            [x["kind"] for x in found["series"]], ["worker", "trainer"]
        )
        self.assertGreater(found["arrays"], 100)
        self.assertGreater(found["lost_seconds"], 0)


if __name__ == "__main__":
    absltest.main()
