"""What the tests of monitors share."""

import pytest
from loguru import logger


@pytest.fixture
def warnings():
    """Lines that were warned of."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)), level="WARNING")
    yield lines
    logger.remove(handler)
