"""Errors that are the user's to mend: one clear line each, never a traceback."""

import difflib
import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class UserError(Exception):
    """A mistake or a state of the world that the user can mend. The command line prints it as one line and exits."""

    exit_code = 2


class RunFailed(UserError):
    """A started run ended badly; the message names the component, its exit code and its log."""

    exit_code = 1


@dataclass(frozen=True)
class Fault:
    """One fault of a configuration: which file, which key, what was expected."""

    message: str
    key: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.key, self.message) if part)


class ConfigError(UserError):
    """One or more faults in configuration files or command lines; prints one line per fault."""

    def __init__(self, faults: Iterable[Fault] | Fault | str):
        if isinstance(faults, str):
            faults = [Fault(faults)]
        elif isinstance(faults, Fault):
            faults = [faults]
        self.faults = list(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


def nearest(name: str, options: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `options`, or an empty string when nothing is near."""
    hits = difflib.get_close_matches(str(name), [str(option) for option in options], n=1, cutoff=0.6)
    return f"; did you mean '{hits[0]}'?" if hits else ""


def entry_point(main: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a console entry point: a `UserError` becomes `error: …` lines on stderr and its exit code."""

    @functools.wraps(main)
    def wrapper(*args, **kwargs) -> None:
        try:
            code = main(*args, **kwargs)
        except UserError as error:
            for line in str(error).splitlines() or [type(error).__name__]:
                print(f"error: {line}", file=sys.stderr)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            sys.exit(141)
        sys.exit(code or 0)

    return wrapper
