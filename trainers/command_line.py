"""Programs whose users see their own mistakes as one line."""

import sys

from absl import app
from absl import flags
from absl import logging

from trainers.interruption import Stopped


class UserError(Exception):
    """What the user has to put right: a flag, a file, a worker process.

    Args:
        error: The exception or string to tell, on one line.
    """

    def __init__(self, error):
        super().__init__(" ".join(str(error).split()))


def run(main, takes_arguments=False, **defaults):
    """Parses the flags, calls `main()`, and exits.

    A bad flag and a `UserError` end the program with one line on standard
    error and exit status 1, a signal that has stopped a training run with 128
    and its number. Other exceptions keep their traceback: they are not the
    user's mistakes.

    Args:
        main: Function without arguments, or of the list of arguments that
            are not flags.
        takes_arguments: Boolean, whether there may be such arguments. Defaults
            to `False`.
        **defaults: Values of flags that are not given.
    """
    for name, value in defaults.items():
        flags.FLAGS.set_default(name, value)

    def guarded_main(argv):
        if len(argv) > 1 and not takes_arguments:
            sys.exit(f"Error: unexpected arguments: {' '.join(argv[1:])}")
        try:
            main(argv[1:]) if takes_arguments else main()
        except UserError as error:
            sys.exit(f"Error: {error}")
        except Stopped as stopped:
            print(stopped)
            # As a shell tells of a command that a signal has ended.
            sys.exit(128 + stopped.number)

    app.run(guarded_main, flags_parser=_parse)


def _parse(argv):
    try:
        arguments = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f"Error: {UserError(error)}")
    # Else `app.run` would choose INFO, at which TFDS reports what it reads.
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING
    return arguments
