"""Numbers and times as a reader wants them."""

import math
from datetime import UTC, datetime
from typing import Any


def number(value: float | int | None, digits: int = 3) -> str:
    """About `digits` significant digits: `0.873`, `12.4k`, `3.1e-6`; integers whole up to 9,999."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if float(value).is_integer() and size < 10_000:
        return f"{int(value):,}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.{digits}g}{unit}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.{max(digits - 2, 0)}e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.{digits}g}" if size < 1000 else f"{value:,.0f}"


def signed(value: float, digits: int = 3) -> str:
    return ("+" if value > 0 else "−" if value < 0 else "±") + number(abs(value), digits)


def fixed(value: float | None, places: int = 3) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def duration(seconds: float | None) -> str:
    """`48 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(value: Any) -> datetime | None:
    """A time of a record: seconds since the epoch, or ISO 8601."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(str(value))
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        return None


def clock(value: Any) -> str:
    found = moment(value)
    return found.strftime("%Y-%m-%d %H:%M UTC") if found else "–"


def between(start: Any, end: Any) -> float | None:
    """Seconds from one recorded time to another."""
    first, last = moment(start), moment(end)
    return (last - first).total_seconds() if first and last else None


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values that enclose [low, high] (1, 2, 2.5 or 5 times a power of ten apart)."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(n * step, 12 - math.floor(math.log10(step))) for n in range(first, last + 1)]


def tick_labels(ticks: list[float]) -> list[str]:
    """Ticks of one axis, all with the same unit and with as many places as tell neighbours apart."""
    size = max(abs(tick) for tick in ticks)
    unit, name = next(((u, n) for u, n in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= 10 * u), (1.0, ""))
    if 0 < size < 1e-3:
        exponent = math.floor(math.log10(size))
        unit, name = 10.0**exponent, f"e{exponent}"
    step = (ticks[1] - ticks[0]) / unit
    places = next((n for n in range(8) if abs(round(step, n) - step) < step * 1e-6), 8)
    return ["0" if tick == 0 else f"{tick / unit:,.{places}f}{name}" for tick in ticks]
