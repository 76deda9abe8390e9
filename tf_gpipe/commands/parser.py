"""A parser of flags whose errors are one line and suggest the right name."""

import argparse
import re
from typing import NoReturn

from tf_gpipe.checks import near

# argparse's messages for a value that is no choice, and for unknown flags.
_CHOICE = re.compile(r".*invalid choice: '(.*)' \(choose from (.*)\)")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")


class Formatter(
    argparse.ArgumentDefaultsHelpFormatter,
    argparse.RawDescriptionHelpFormatter,
):
    """Leaves descriptions as they are; omits defaults that are empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in ({}, None) or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """The parser of the flags of a command.

    Args:
        name: String, the name of the command.
        description: String, the docstring of the command's module.
    """

    def __init__(self, name: str, description: str | None):
        super().__init__(
            prog=f"python -m tf_gpipe {name}",
            description=description,
            formatter_class=Formatter,
        )

    def flag(self, name: str) -> argparse.Action:
        """Returns the action of a flag, so that its help can be changed."""
        return next(x for x in self._actions if x.dest == name)

    def error(self, message: str) -> NoReturn:
        choice = _CHOICE.fullmatch(message)
        unknown = _UNKNOWN.fullmatch(message)
        if choice:
            message += near([choice[1]], re.findall(r"\w+", choice[2]))
        if unknown:
            flags = [x.partition("=")[0] for x in unknown[1].split()]
            message += near(flags, self._option_string_actions)
        self.exit(2, f"{self.prog}: error: {message}\n")
