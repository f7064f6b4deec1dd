"""Errors that are the user's to mend: one clear line each, never a traceback."""

import difflib
import errno
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn


class UserError(Exception):
    """A mistake or a state of the world that the user can mend. The command line prints it as one line and exits."""

    exit_code = 2


class RunFailed(UserError):
    """A started run ended badly; the message names the component, its exit code and its log."""

    exit_code = 1


def shown(text: str) -> str:
    """A name or path as it can stand in a line: line breaks are written out."""
    return text if len(text.splitlines()) < 2 and not text.endswith("\n") else repr(text)[1:-1]


@dataclass(frozen=True)
class Fault:
    """One fault of a configuration: which file, which key, what was expected.

    `via`: of a fault between several values the file that brings them together, where `file` is one that it extends; ""
    until that is known.
    """

    message: str
    key: str | None = None
    file: str | None = None
    via: str | None = None

    def __str__(self) -> str:
        """One line, whatever a name or value in it holds."""
        return ": ".join(shown(part) for part in (self.file, self.key, self.message) if part)


class ConfigError(UserError):
    """One or more faults in configuration files or command lines; prints one line per fault, see `lines`."""

    def __init__(self, faults: Iterable[Fault] | Fault | str):
        if isinstance(faults, str):
            faults = [Fault(faults)]
        elif isinstance(faults, Fault):
            faults = [faults]
        self.faults = list(faults)
        super().__init__("\n".join(lines(self.faults)))


def lines(faults: Iterable[Fault]) -> list[str]:
    """One line per fault. The same one in several files, as of a fragment that they share, is said once:
    `data.name: … (in experiments/a.toml and 999 more)`.
    """
    alike: dict[tuple[str | None, str], list[Fault]] = {}
    for number, fault in enumerate(_without_via(faults)):
        alike.setdefault((fault.key, fault.message) if fault.file else (None, f"#{number}"), []).append(fault)
    found = []
    for same in alike.values():
        files = list(dict.fromkeys(fault.file for fault in same if fault.file))
        if len(files) < 2:
            found += map(str, same)
            continue
        found.append(f"{Fault(same[0].message, same[0].key)} (in {_where(files)})")
    return found


def _where(files: list[str]) -> str:
    return " and ".join(map(shown, files)) if len(files) <= 2 else f"{shown(files[0])} and {len(files) - 1} more"


def _without_via(faults: Iterable[Fault]) -> Iterator[Fault]:
    """The faults, each once; one that only files that extend another have says in which: `(in experiments/b.toml)`."""
    vias: dict[Fault, list[str | None]] = {}
    for number, fault in enumerate(faults):
        vias.setdefault(replace(fault, via=None) if fault.file else replace(fault, via=f"#{number}"), []).append(
            fault.via
        )
    for fault, files in vias.items():
        where = "" if None in files or "" in files else f" (in {_where(list(dict.fromkeys(files)))})"
        yield replace(fault, message=f"{fault.message}{where}", via=None)


def nearest(name: str, options: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `options`, or an empty string when nothing is near."""
    hits = difflib.get_close_matches(str(name), [str(option) for option in options], n=1, cutoff=0.6)
    return f"; did you mean '{hits[0]}'?" if hits else ""


FULL = {errno.ENOSPC, errno.EDQUOT}
_OF_PATHS = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_OF_PATHS |= {errno.EEXIST, errno.EIO, errno.EROFS, errno.ESTALE}
_HINTS = dict.fromkeys(FULL, "; free some space and start again, what is finished is kept")
_HINTS |= {errno.EACCES: "; whoever starts this needs the right to it"}


class StorageError(UserError):
    """The machine's disk is full: nobody wrote anything wrong."""

    exit_code = 1


def of_system(error: Exception) -> UserError | None:
    """What the system refused to do with a file, as one line; None for all that may as well be a mistake in our code.

    An `OSError` counts when it names a file; a full disk also without one, as writing to an open file says it, and as
    safetensors passes it on (`… (os error 28)`).
    """
    number, path, reason = None, None, ""
    if isinstance(error, OSError):
        number, path, reason = error.errno, error.filename2 or error.filename, error.strerror
    elif type(error).__name__ == "SafetensorError" and (match := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(match[1])
        reason, path = os.strerror(number), "weights" if number in _OF_PATHS else None
    if number in FULL:
        return StorageError(f"{f'{shown(os.fsdecode(path))}: ' if path else ''}{reason}{_HINTS[number]}")
    if number in _OF_PATHS and isinstance(path, str | bytes | os.PathLike):
        return UserError(f"{shown(os.fsdecode(path))}: {reason}{_HINTS.get(number, '')}")
    return None


def leave(error: Exception) -> NoReturn:
    """End the process with `error: …` lines for what is the user's to mend; anything else is raised again.

    With `RLMAKE_TRACEBACK=1` the traceback is shown before the lines.
    """
    said = error if isinstance(error, UserError) else of_system(error)
    if said is None:
        raise error
    if os.environ.get("RLMAKE_TRACEBACK") == "1":
        traceback.print_exception(error)
    for line in str(said).splitlines() or [type(said).__name__]:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(said.exit_code)


def entry_point(main: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a console entry point: a `UserError`, and what the system refused to do with a file, become `error: …` lines
    on stderr and an exit code, see `leave`."""

    @functools.wraps(main)
    def wrapper(*args, **kwargs) -> None:
        try:
            code = main(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            sys.exit(141)
        except Exception as error:
            leave(error)
        sys.exit(code or 0)

    return wrapper
