"""A parser of flags whose errors are one line, and say what was meant."""

import argparse
import re
from typing import NoReturn

from tf_gpipe.checks import near

# What argparse says of a value that is none of those that it may be, and of
# flags that there are not.
_CHOICE = re.compile(r".*invalid choice: '(.*)' \(choose from (.*)\)")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")


class Formatter(
    argparse.ArgumentDefaultsHelpFormatter,
    argparse.RawDescriptionHelpFormatter,
):
    """Shows descriptions as they are, and defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in ({}, None) or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """The parser of the flags of a command.

    Args:
        name: String, the name of the command.
        description: String, the docstring of its module.
    """

    def __init__(self, name: str, description: str | None):
        super().__init__(
            prog=f"python -m tf_gpipe {name}",
            description=description,
            formatter_class=Formatter,
        )

    def flag(self, name: str) -> argparse.Action:
        """Returns a flag that the parser has, to change its help."""
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
