"""The table of schedules in the documentation, computed again."""

import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized

from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.memory import Sizes
from tf_gpipe.schedule.memory import device_peaks
from tf_gpipe.schedule.simulate import simulate

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "how_it_works.md"
TABLE = re.findall(r"^\| `(\w+)` \| (\d) \|(.+)\|$", DOCS.read_text(), re.M)


def row(name, each):
    """Returns the numbers of a row, with `each` stages a device."""
    bubbles, kept = [], []
    for num_devices in (4, 8):
        for num_micro_batches in (8, 32):
            plan = schedules.get(
                name, each * num_devices, num_micro_batches, num_devices
            )
            bubble = simulate(plan, remat="never").bubble
            bubbles.append(f"{100 * bubble:.1f}")
        peaks = device_peaks(plan, "never", [Sizes()] * plan.num_stages)
        kept.append(f"{max(peaks) / each / num_devices:.2f}")
    return [*bubbles, *kept]


class TableTest(parameterized.TestCase):
    def test_has_all(self):
        names = {name for name, _, _ in TABLE}
        self.assertEqual(names, {*schedules.NAMES} - {"auto"})

    @parameterized.parameters(*TABLE)
    def test_row(self, name, each, numbers):
        found = [x.strip() for x in numbers.split("|")]
        self.assertEqual(row(name, int(each)), found)


if __name__ == "__main__":
    absltest.main()
