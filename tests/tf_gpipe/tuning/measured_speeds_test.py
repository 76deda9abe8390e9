"""What the functions run by which devices are measured."""

import collections

import tensorflow as tf

from tests.devices import KIND
from tests.tf_gpipe.step.executed_graph import executed_graph
from tf_gpipe.tuning import measured_speeds

DEVICES = [f"{KIND}:{i}" for i in range(2)]


def executed(function, kind):
    """Returns how often operations of a kind run, by device."""
    nodes = executed_graph(function)
    return collections.Counter(
        x.device[-len(KIND) - 2 :] for x in nodes if x.op.startswith(kind)
    )


class MeasuredSpeedsTest(tf.test.TestCase):
    def test_each_transfer_is_one(self):
        run = measured_speeds._there_and_back(*DEVICES, 8)
        self.assertEqual(executed(run, "Reverse"), dict.fromkeys(DEVICES, 4))

    def test_each_operation_is_launched(self):
        run = measured_speeds._launches(DEVICES[1])
        self.assertEqual(executed(run, "Maximum"), {DEVICES[1]: 100})

    def test_products(self):
        run = measured_speeds._products(DEVICES, 4)
        found = executed(run, ("MatMul", "_MklMatMul"))
        self.assertEqual(found, dict.fromkeys(DEVICES, 8))

    def test_the_same_work_with_and_without_transfers(self):
        for kind, counts in (
            ("Reverse", dict.fromkeys(DEVICES, 4)),
            (("MatMul", "_MklMatMul"), {DEVICES[0]: 5}),
        ):
            for sends in (False, True):
                run = measured_speeds._working(*DEVICES, 8, 4, 5, sends)
                self.assertEqual(executed(run, kind), counts)

    def test_ends_of_the_slowest_connection(self):
        names = [f"/job:worker/task:{i // 2}/GPU:{i % 2}" for i in range(4)]
        find = measured_speeds._ends
        self.assertEqual(find(names), (names[0], names[2]))
        self.assertEqual(find(names[:2]), (names[0], names[1]))
        self.assertEqual(find(DEVICES), tuple(DEVICES))

    def test_measured(self):
        found = measured_speeds.measured(DEVICES, [None, 2**30])
        self.assertEqual([x.name for x in found.devices], DEVICES)
        self.assertEqual([x.memory for x in found.devices], [None, 2**30])
        self.assertGreater(found.bandwidth, 0)
        # Devices of one process send nothing.
        self.assertEqual(found.handling, 0)
        for x in found.devices:
            self.assertGreater(x.speed.flops, 0)
            self.assertGreater(x.speed.memory, 0)


if __name__ == "__main__":
    tf.test.main()
