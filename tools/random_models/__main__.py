"""Compares pipelines of randomly drawn models with plain Keras.

    python -m tools.random_models --num=1000 --seed=0

draws 1000 models, and runs each with `tf_gpipe.verify`. The exit status is 1 if
any differs by more than rounding: small differences in float32 that vanish in
float64 are rounding.
"""

import argparse
import json
import os
import sys

# Set before TensorFlow is imported: at start it reports a missing GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tf_gpipe import progress  # noqa: E402
from tf_gpipe.commands import devices  # noqa: E402
from tools import command_line  # noqa: E402
from tools.random_models.comparing import difference  # noqa: E402
from tools.random_models.drawing import Drawing  # noqa: E402

_MOST_STAGES = 4
_MODELS_A_LINE = 50


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--num",
        type=command_line.positive,
        default=1000,
        help="how many models (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first; those of the others count up (default: 0)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    args = parser.parse_args(argv)
    devices.ensure(_MOST_STAGES)
    different = []
    seeds = range(args.seed, args.seed + args.num)
    with progress.shown(not args.json):
        for done, seed in enumerate(progress.track(seeds, "comparing"), 1):
            drawing = Drawing(seed, has_state=seed % 2 == 1)
            kinds = ", ".join(drawing.has()) or "of every day"
            found, rounding = difference(drawing)
            if found and rounding:
                progress.say(f"seed {seed} ({kinds}) magnifies rounding")
            elif found:
                different.append({"seed": seed, "kinds": drawing.has()})
                progress.say(f"seed {seed} ({kinds}) differs:\n{found}")
            if done % _MODELS_A_LINE == 0:
                progress.say(f"{done} of {args.num} models")
    print(f"{len(different)} of {args.num} models differ")
    if args.json:
        print(json.dumps({"models": args.num, "different": different}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
