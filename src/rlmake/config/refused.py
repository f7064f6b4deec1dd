"""How a validator says which keys it refuses, several at once."""

from collections.abc import Iterable


class Refused(ValueError):
    """Faults found by a validator of a table: `(key relative to the table, what was expected)` each."""

    def __init__(self, faults: Iterable[tuple[str, str]] | tuple[str, str]):
        self.faults = [faults] if isinstance(faults, tuple) else list(faults)
        super().__init__("; ".join(f"{key}: {message}" if key else message for key, message in self.faults))
