"""Compares trained weights before and after a change of the code, bit by bit.

For changes that must not alter any number. Randomly drawn models train for
three steps with each schedule and each `remat` mode, and a digest of the
variables and optimizer slots is recorded for each run. Digests from different
processors or TensorFlow versions cannot be compared.

Examples:

    python -m tools.bits --record=bits.json     # before the change
    python -m tools.bits --compare=bits.json    # after it
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import sys

# Set before TensorFlow is imported: at start it reports a missing GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402

import tf_gpipe  # noqa: E402
from tf_gpipe import progress  # noqa: E402
from tf_gpipe.commands import devices  # noqa: E402
from tf_gpipe.schedule import schedules  # noqa: E402
from tools.random_models.drawing import Drawing  # noqa: E402
from tools.random_models.drawing import Kinds  # noqa: E402

# Together these seeds draw all of `drawing.Kinds` that `_Drawing` allows.
_SEEDS = range(12)
_SCHEDULES = schedules.NAMES
_SHARING = (*schedules.ANY_STAGES_A_DEVICE, *schedules.TWO_STAGES_A_DEVICE)
_REMAT = ("always", "except_last", "never")
_NUM_STAGES = 4
_NUM_STEPS = 3


class _Drawing(Drawing):
    """A random model with a given schedule and `remat` mode."""

    def __init__(self, seed, schedule, remat):
        kinds = Kinds(shared_devices=False, memory_limit=False)
        super().__init__(seed, has_state=True, kinds=kinds)
        self._run = {"schedule": schedule, "remat": remat}

    def pipeline(self, num_calls):
        arguments = {
            **super().pipeline(num_calls),
            "num_micro_batches": 4,
            "num_stages": min(num_calls, _NUM_STAGES),
            **self._run,
        }
        if arguments["schedule"] in _SHARING:
            # Two stages per device.
            arguments["num_stages"] = min(num_calls, _NUM_STAGES) // 2 * 2
            count = arguments["num_stages"] // 2
            arguments["devices"] = [f"CPU:{i}" for i in range(count)]
        return arguments


def digest(seed, schedule, remat):
    """Returns a digest of variables and slots after training a model."""
    keras.backend.clear_session()
    drawing = _Drawing(seed, schedule, remat)
    (x, y, sample_weight), _ = drawing.data()
    model = drawing.compiled(pipelined=True)
    for _ in range(_NUM_STEPS):
        model.train_on_batch(x, y, sample_weight)
    found = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(variable.numpy().tobytes())
    return found.hexdigest()[:16]


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--record", metavar="FILE", type=pathlib.Path)
    group.add_argument("--compare", metavar="FILE", type=pathlib.Path)
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[*_SEEDS],
        help="of the models; all by default",
    )
    args = parser.parse_args(argv)
    devices.ensure(_NUM_STAGES)
    if args.compare:
        before = json.loads(args.compare.read_text())
    digests, different = {}, []
    cells = [*itertools.product(args.seeds, _SCHEDULES, _REMAT)]
    with progress.shown():
        for cell in progress.track(cells, "training"):
            name = "/".join(map(str, cell))
            digests[name] = digest(*cell)
            if args.compare and digests[name] != before.get(name):
                different.append(name)
                progress.say(f"{name} differs")
    if args.record:
        args.record.write_text(json.dumps(digests, indent=1))
        print(f"{len(digests)} digests of tf_gpipe {tf_gpipe.__version__}")
        return 0
    print(f"{len(different)} of {len(digests)} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
