"""Answers as JSON."""

from typing import Any

import msgspec
from starlette.responses import Response


def reply(value: Any, status: int = 200, **headers: str) -> Response:
    """JSON; numbers that are not finite, or too large for a float, become null, half surrogates a mark."""
    try:
        data = msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        data = msgspec.json.encode(_clean(value))
    return Response(data, status, media_type="application/json", headers={"cache-control": "no-store", **headers})


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:  # what msgspec encodes
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else value
