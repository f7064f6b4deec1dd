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
    if url is None:
        return
    parts = urlsplit(url)
    try:
        there = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no port
        there = False
    if not there:
        raise Refused((key, f"expected a URL like http://127.0.0.1:8000/v1, not '{url}'"))


def require_address(key: str, address: str | None) -> None:
    """Refuse what no socket could connect to; None is somebody else's to judge."""
    if address is None or (address.startswith("ipc://") and len(address) > 6):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not address.startswith("tcp://") or host in ("", "*", "0.0.0.0") or not 0 < number < 65536:
        raise Refused((key, f"expected an address like tcp://node7:5005, not '{address}'"))


def require_step(key: str, folder: str | None) -> None:
    """Refuse what is no checkpoint's folder `…/step_<n>`."""
    prefix, _, number = (folder or "step_1").rstrip("/").rpartition("/")[2].partition("_")
    if prefix != "step" or not (number.isascii() and number.isdigit()) or int(number) < 1:
        raise Refused((key, f"must end in step_<n>, not '{folder}'"))
