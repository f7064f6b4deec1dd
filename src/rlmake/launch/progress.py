"""What the launcher shows while a run goes on: the main log, and on a terminal a bar with the step."""

import re
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

STEP = re.compile(r"SUCCESS.*\bStep (\d+)\b")
SHOWN = re.compile(r"(SUCCESS|WARNING)(.*)")


class Follower:
    """Reads a growing log from its beginning; `lines` gives what is new, whole lines only."""

    def __init__(self, log: Path):
        self._log, self._offset, self._rest = log, 0, b""

    def lines(self) -> list[str]:
        try:
            with open(self._log, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


class Display:
    """Shows a log while a run goes on. Context manager; `tick` is called often.

    `total`: the run's last step, None for an endless one. `brief`: only the lines of steps, evaluations and
    warnings, each behind the run's name, as in a build where several runs share one output.
    """

    def __init__(self, name: str, log: Path, start: int, total: int | None, brief: bool):
        self._name, self._brief = name, brief
        self._follower = Follower(log)
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if not brief and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(name, total=total, completed=start)

    def __enter__(self) -> "Display":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.tick()
        if self._bar:
            self._bar.stop()

    def tick(self) -> None:
        for line in self._follower.lines():
            step = STEP.search(line)
            if self._bar and step and "Evaluated" not in line:
                self._bar.update(self._task, completed=int(step[1]))
            if not self._brief:
                self._console.print(Text.from_ansi(line))
            elif shown := SHOWN.search(line):
                level = "" if shown[1] == "SUCCESS" else "warning: "
                self._console.print(Text.from_ansi(f"{self._name}: {level}{shown[2].strip()}"))
