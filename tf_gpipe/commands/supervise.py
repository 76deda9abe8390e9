"""Runs a program, and starts it again when it dies.

    python -m tf_gpipe supervise --restarts=20 python train.py

A program whose `fit` has a `tf_gpipe.callbacks.Checkpoint` goes on from the
newest checkpoint each time. Once a worker is lost, TensorFlow goes on with none
in the same process: so it is the program that starts again.

It starts again if a signal or an error has ended it, at most --restarts times.
What it ends with is final if it is 0, 2 (wrong arguments), or after Ctrl-C or
SIGTERM, which are handed on. It ends with this process. A shell script must
start it by `exec`: what the script itself waits for gets no signal, and does
not end with this process.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from tf_gpipe.commands import flags
from tf_gpipe.commands import workers
from tf_gpipe.commands.parser import Parser

# The exit status of a program that may succeed later, from <sysexits.h>.
TEMPORARY = 75
# Environment variable that tells a program that it is supervised.
SUPERVISED = "TF_GPIPE_SUPERVISED"
_USAGE = 2
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# A program that ended within the first time is restarted after the second.
_AT_ONCE_SECONDS, _PAUSE_SECONDS = 10.0, 1.0


def run(command: Sequence[str], restarts: int, errors: bool = True) -> int:
    """Runs a command, and restarts it when it dies.

    Args:
        command: List of strings.
        restarts: Integer, the most restarts.
        errors: Boolean, whether to restart after any error. If `False`, only
            after a signal or exit status 75.

    Returns:
        Integer, the last exit status; 128 plus the signal's number if a signal
        has ended it.
    """
    for i in range(restarts + 1):
        start = time.monotonic()
        stops: list[int] = []
        status = workers.run_in_foreground(
            command,
            stops=stops,
            env={**os.environ, SUPERVISED: "1"},
            preexec_fn=workers.end_with_parent,
        )
        if _is_final(status, errors) or i == restarts:
            break
        if stops:
            print(
                f"tf_gpipe: the program has ended with status {status}. It "
                "does not start again, as it was to stop by Ctrl-C or SIGTERM.",
                file=sys.stderr,
                flush=True,
            )
            break
        print(
            f"tf_gpipe: the program has ended with status {status}. It starts "
            f"again, {i + 1} of {restarts}.",
            file=sys.stderr,
            flush=True,
        )
        if time.monotonic() - start < _AT_ONCE_SECONDS:
            time.sleep(_PAUSE_SECONDS)
    return status


def _is_final(status: int, errors: bool) -> bool:
    if status in (0, _USAGE, *_STOPPED):
        return True
    return not (errors or status == TEMPORARY or status > 128)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("supervise", __doc__)
    parser.add_argument(
        "--restarts",
        type=flags.positive,
        default=20,
        help="how often to start it again at most",
    )
    args = flags.parse_with_program(parser, argv)
    return run(args.command, args.restarts)
