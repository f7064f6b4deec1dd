"""Logging: one loguru set-up for every process; the launcher redirects each process's streams to its log file."""

import os
import sys

from loguru import logger


def setup(component: str, level: str | None = None, json_logging: bool = False) -> None:
    """Log to stderr, line by line, coloured on a terminal. `level` falls back to `$PRIME_LOG_LEVEL`, then `info`."""
    level = (level or os.environ.get("PRIME_LOG_LEVEL") or "info").upper()
    colours = os.environ.get("LOGURU_FORCE_COLORS") == "1" or sys.stderr.isatty()
    logger.remove()
    logger.configure(extra={"component": component})
    form = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> <cyan>{extra[component]}</cyan> {message}"
    logger.add(sys.stderr, level=level, format=form, colorize=colours, serialize=json_logging, backtrace=False)
