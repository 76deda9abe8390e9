"""Commands of tf_gpipe, a library of pipeline parallelism for Keras.

tf-gpipe COMMAND [FLAGS], or python -m tf_gpipe COMMAND [FLAGS]
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

# A command is the module of this name in `tf_gpipe.commands`, with a function
# `main` of its arguments. It imports Keras and TensorFlow once it needs them.
COMMANDS = {
    "plan": "shows what each stage will need, before it is allocated",
    "supervise": "runs a program, and starts it again when it dies",
    "timeline": "shows when each device runs what, and what it waits for",
    "tune": "finds the arguments of the fastest pipeline that fits",
    "verify": "compares a pipeline with the plain Keras model",
    "worker": "runs stages for a program on another host",
    "workers": "runs a command with worker processes on this host",
}


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs a command, and returns its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        for command, what in COMMANDS.items():
            print(f"  {command:11}{what}")
        print("\npython -m tf_gpipe COMMAND --help lists the flags of one.")
        return 0
    if name not in COMMANDS:
        from tf_gpipe.checks import near

        print(
            f"tf_gpipe: unknown command. Expected one of: "
            f"{', '.join(COMMANDS)}. Received: {name}{near([name], COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    # Where `--model` finds a module. Of `python -m` it is there already.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(f"tf_gpipe.commands.{name}").main(rest)
    except KeyboardInterrupt:
        print("tf_gpipe: stopped by Ctrl-C.", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
