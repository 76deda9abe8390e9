"""Memory of processes is measured whatever their heaps have free."""

import os
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tools import worker_usage

_MIB = 2**20
# Leaves a heap with 100 MiB of holes below its last block.
_HOLES = """
def blocks():
    return [b"x" * 50_000 for _ in range(100 * 2**20 // 50_000)]
freed, last = blocks(), b"x" * 50_000
del freed
"""
_WAITS = f"{_HOLES}print(flush=True); input(); found = blocks(); print()"
_MEASURES = f"""
import os
from tools import worker_usage
{_HOLES}
print(worker_usage.added([os.getpid()], blocks)[0])
"""


class WorkerUsageTest(parameterized.TestCase):
    def start(self, program, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    @parameterized.parameters(*worker_usage.KERNELS)
    def test_holes_in_the_heap(self, kernels):
        child = self.start(_WAITS, **worker_usage.KERNELS[kernels])
        child.stdout.readline()

        def step():
            child.stdin.write("\n")
            child.stdin.flush()
            child.stdout.readline()

        (added,) = worker_usage.added([child.pid], step)
        self.assertBetween(added, 90 * _MIB, 110 * _MIB)

    def test_holes_in_its_own_heap(self):
        child = self.start(_MEASURES, **worker_usage.GIVE_BACK)
        added = int(child.stdout.readline())
        self.assertBetween(added, 90 * _MIB, 110 * _MIB)

    def test_a_process_that_gives_nothing_back(self):
        child = self.start("print(flush=True); input()")
        child.stdout.readline()
        with self.assertRaisesRegex(RuntimeError, "without `GIVE_BACK`"):
            worker_usage.added([child.pid], lambda: None)
        self.assertIsNone(child.poll())


if __name__ == "__main__":
    absltest.main()
