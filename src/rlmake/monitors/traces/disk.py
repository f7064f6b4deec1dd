"""The guard of the disk: traces stop before it is full, so that checkpoints and metrics still find room."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from loguru import logger

WARN_BYTES = 10 << 30
STOP_BYTES = 2 << 30
CHECK_SECONDS = 5.0


def free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


class DiskGuard:
    """`ok()` is False while less than `STOP_BYTES` are free; warns once below `WARN_BYTES` and once for the stop.

    On a small disk the limits are a tenth and a fiftieth of it.
    """

    def __init__(self, folder: Path, free: Callable[[Path], int] = free_bytes):
        self.folder, self._free = folder, free
        stat = os.statvfs(folder)
        total = stat.f_blocks * stat.f_frsize
        self.warn, self.stop = min(WARN_BYTES, total // 10), min(STOP_BYTES, total // 50)
        self._checked, self._ok, self._warned = -CHECK_SECONDS, True, False

    def ok(self) -> bool:
        if (now := time.monotonic()) - self._checked < CHECK_SECONDS:
            return self._ok
        self._checked, free = now, self._free(self.folder)
        if free < self.stop and self._ok:
            logger.warning(
                f"{_gib(free)} left on the disk of {self.folder}: episodes are no longer written until there are "
                f"{_gib(self.warn)}; free some room, or stop them with --no-monitors.file"
            )
            self._ok = False
        elif free >= self.warn and not self._ok:
            logger.info(f"{_gib(free)} free again on the disk of {self.folder}: episodes are written again")
            self._ok = self._warned = True
        elif free < self.warn and self._ok and not self._warned:
            self._warned = True
            logger.warning(
                f"{_gib(free)} left on the disk of {self.folder}: below {_gib(self.stop)} no episodes are written"
            )
        return self._ok


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 29 else f"{size / (1 << 20):.0f} MiB"
