"""Tries random wrong uses, and reports those that end as they should not.

    python -m tools.wrong_uses --num=500 --seed=0

Each use is a call or a command line with one or two arguments replaced. It must
end with a deliberate error, or train as plain Keras does. A call's deliberate
error is one that plain Keras raises, too, or a ValueError, TypeError,
ImportError or UnavailableError that the code raises on purpose; a command
line's is one line and an exit status above 0, before anything is trained.
"""

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import warnings

# Set before TensorFlow is imported: at start it reports a missing GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tf_gpipe import progress  # noqa: E402
from tf_gpipe.commands import devices  # noqa: E402
from tools import command_line  # noqa: E402
from tools.wrong_uses import calls  # noqa: E402
from tools.wrong_uses import command_lines  # noqa: E402
from tools.wrong_uses import outcome  # noqa: E402
from tools.wrong_uses import values  # noqa: E402

NUM_DEVICES = 2
# The share of command lines among the uses.
_COMMANDS = 0.3


def drawn_call(draw: random.Random) -> tuple[calls.Use, dict[str, str]]:
    """Returns a call, and the source text of each wrong argument, by name."""
    use = draw.choice(calls.USES)
    names = list(use.arguments)
    count = min(draw.choice([1, 1, 1, 2]), len(names))
    texts = list(values.OF_ARGUMENTS)
    return use, {x: draw.choice(texts) for x in draw.sample(names, count)}


def call_problem(draw: random.Random) -> str | None:
    """Returns what is wrong with the end of a drawn call, or `None`."""
    use, wrong = drawn_call(draw)

    def arguments():
        return {
            name: values.OF_ARGUMENTS[wrong[name]]()
            if name in wrong
            else make()
            for name, make in use.arguments.items()
        }

    expected, plain_error = None, None
    with contextlib.ExitStack() as scopes:
        # A directory where a model may be saved under any name.
        directory = scopes.enter_context(tempfile.TemporaryDirectory())
        scopes.enter_context(contextlib.chdir(directory))
        scopes.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for stream in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            scopes.enter_context(stream(io.StringIO()))
        if use.plain is not None:
            expected, plain_error = outcome.end_of(
                lambda: use.plain(**arguments())
            )
        received, error = outcome.end_of(lambda: use.run(**arguments()))
    if error is not None:
        found = outcome.problem(error, plain_error)
    elif plain_error is not None and "name" not in wrong:
        # Plain Keras rejects some names only as scopes while it traces.
        found = f"is accepted, where plain Keras raises {plain_error!r:.300}"
    elif isinstance(received, str):
        leaked = outcome.leaked(received)
        found = f"tells of '{leaked}': {received}" if leaked else None
    elif expected is not None:
        found = outcome.difference(expected, received)
    else:
        found = None
    if found is None:
        return None
    told = ", ".join(f"{x}={y}" for x, y in wrong.items())
    return f"{use.name}({told}): {found}"


def use_problem(seed: int) -> str | None:
    """Returns what is wrong with the end of a seed's use, or `None`."""
    draw = random.Random(seed)
    if draw.random() < _COMMANDS:
        line = command_lines.drawn(draw)
        found = command_lines.problem(line)
        return found and f"{line}: {found}"
    return call_problem(draw)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.wrong_uses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--num",
        type=command_line.positive,
        default=500,
        help="how many uses (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    args = parser.parse_args(argv)
    devices.ensure(NUM_DEVICES)
    found = {}
    seeds = range(args.seed, args.seed + args.num)
    with progress.shown(not args.json):
        for seed in progress.track(seeds, "trying wrong uses"):
            problem = use_problem(seed)
            if problem:
                found[seed] = problem
                progress.say(f"seed {seed}: {problem}")
    print(f"{len(found)} of {args.num} wrong uses end as they should not")
    if args.json:
        print(json.dumps({"uses": args.num, "problems": found}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
