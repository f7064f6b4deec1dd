"""Options of a command: argparse, whose refusals are one line with the nearest name.

Entry points that take a configuration have `rlmake.config` for this.
"""

import argparse
import re
from collections.abc import Iterator
from typing import NoReturn

from rlmake.core.errors import UserError, nearest

_UNKNOWN = re.compile(r"unrecognized arguments: (--?[^\s=]+)")
_CHOICE = re.compile(r"(?:argument (?P<of>\S+): )?invalid choice: '(?P<given>[^']*)' \(choose from (?P<there>.*)\)")


class ArgumentParser(argparse.ArgumentParser):
    """`argparse`'s, which raises `UserError` in place of printing how all of it is used."""

    def error(self, message: str) -> NoReturn:
        if unknown := _UNKNOWN.search(message):
            message = f"{unknown[1]}: unknown option{nearest(unknown[1], self._options())}"
        elif choice := _CHOICE.search(message):
            there = choice["there"].replace("'", "").split(", ")
            message = f"no '{choice['given']}'{nearest(choice['given'], there)}; there are {', '.join(there)}"
        raise UserError(f"{self.prog}: {message}; {self.prog} --help shows all")

    def _options(self) -> Iterator[str]:
        """Of this parser, and of those below it, whose unknown options come here."""
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    yield from below._options()
