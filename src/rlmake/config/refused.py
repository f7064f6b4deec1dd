"""How a validator says which keys it refuses, several at once."""

from collections.abc import Iterable
from urllib.parse import urlsplit


class Refused(ValueError):
    """Faults found by a validator of a table: `(key relative to the table, what was expected)` each."""

    def __init__(self, faults: Iterable[tuple[str, str]] | tuple[str, str]):
        self.faults = [faults] if isinstance(faults, tuple) else list(faults)
        super().__init__("; ".join(f"{key}: {message}" if key else message for key, message in self.faults))


def require_url(key: str, url: str | None) -> None:
    """Refuse what no request could be sent to; None is somebody else's to judge."""
    if url is not None and not ((parts := urlsplit(url)).scheme in ("http", "https") and parts.hostname):
        raise Refused((key, f"expected a URL like http://127.0.0.1:8000/v1, not '{url}'"))
