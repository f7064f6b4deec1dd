"""The options of `rlmake`'s own verbs: argparse, whose refusals are one line with the nearest name."""

import argparse
import re
from typing import NoReturn

from rlmake.core.errors import UserError, nearest

_UNKNOWN = re.compile(r"unrecognized arguments: (--?[^\s=]+)")


class ArgumentParser(argparse.ArgumentParser):
    """`argparse`'s, which raises `UserError` in place of printing how all of it is used."""

    def error(self, message: str) -> NoReturn:
        if unknown := _UNKNOWN.search(message):
            message = f"{unknown[1]}: unknown option{nearest(unknown[1], self._option_string_actions)}"
        raise UserError(f"{self.prog}: {message}; {self.prog} --help shows all")
