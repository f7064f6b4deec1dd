"""What a shell starts in the background ignores SIGINT, and so would all that the tests start and interrupt."""

import signal

import pytest
from loguru import logger

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def warnings():
    """Lines that were warned of."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)), level="WARNING")
    yield lines
    logger.remove(handler)
