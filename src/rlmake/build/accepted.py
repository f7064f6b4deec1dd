"""What a user declared equivalent: the work that would be planned now stands for a build that is there.

    outputs/.store/accepted/<stage>-<fingerprint>.json    the record below

`fingerprint` is what the configuration gives, `stands_for` what is in the store. The registry puts the second in the
place of the first, so whatever rests on it is left as it is too.
"""

import time
from pathlib import Path
from typing import Any

import msgspec

from rlmake.build.store import STORE
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_record, write_json

SCHEMA = 1
FOLDER = STORE / "accepted"


class _Accepted(msgspec.Struct):
    stage: str
    fingerprint: str
    stands_for: str
    run: str
    changes: list[str]
    reason: str
    at: str


def path(stage: str, fingerprint: str) -> Path:
    return FOLDER / f"{stage}-{fingerprint}.json"


def read() -> dict[tuple[str, str], dict[str, Any]]:
    """`{(stage, fingerprint): record}` of all that was accepted."""
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        try:
            record = read_record(file, _Accepted, SCHEMA)
        except UserError as error:
            raise UserError(f"{error}; remove it, and accept anew what was accepted") from None
        found[record["stage"], record["fingerprint"]] = record
    return found


def write(stage: str, fingerprint: str, stands_for: str, run: str, changes: list[str], reason: str) -> None:
    """Record that `fingerprint` stands for what was built as `stands_for`."""
    record = {
        "schema": SCHEMA,
        "stage": stage,
        "fingerprint": fingerprint,
        "stands_for": stands_for,
        "run": run,
        "changes": changes,
        "reason": reason,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(path(stage, fingerprint), record)
