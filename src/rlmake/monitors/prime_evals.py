"""Evaluations that a training makes of itself: on the platform each epoch of an environment is one of its own.

They go up in a thread, which the training does not wait for, and its end not for long; one that can't be uploaded is
warned of.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from loguru import logger

from rlmake.monitors.traces.records import Work

MOST = 8192  # episodes held until the numbers of their epoch come
FINISH_SECONDS, CLOSE_SECONDS = 120.0, 300.0  # for one evaluation, and for all that are left at the end
VERSION = "/policy_version"


class Evaluations:
    """`runs` is the SDK; `given` (model, framework, mode) is what each is opened with; `name` the training's."""

    def __init__(self, runs: Any, name: str, training: str, given: Mapping[str, Any]):
        self._runs, self._name, self._training, self._given = runs, name, training, dict(given)
        self._held: OrderedDict[tuple[str, int], list[Any]] = OrderedDict()  # (environment, version) -> episodes
        self._lock = threading.Lock()
        self._uploads: queue.SimpleQueue[tuple[str, int, list[Any], dict[str, Any]] | None] = queue.SimpleQueue()
        self._left = 0  # evaluations that are not up yet
        self._thread = threading.Thread(target=self._run, name="prime-evals", daemon=True)  # a service may never answer
        self._thread.start()

    def arrived(self, work: Work, episode: Any) -> None:
        with self._lock:
            self._held.setdefault((work.env, work.version or 0), []).append(episode)
            while len(self._held) > 1 and sum(map(len, self._held.values())) > MOST:
                self._held.popitem(last=False)

    def row(self, row: Mapping[str, Any]) -> None:
        """A row with the numbers of epochs (`eval/<env>/…`): what was held of them is complete and goes up."""
        for key in [key for key in row if key.startswith("eval/") and key.endswith(VERSION)]:
            env, version = key.removeprefix("eval/").removesuffix(VERSION), int(row[key])
            with self._lock:
                episodes = self._held.pop((env, version), [])
                self._left += 1
            prefix = f"eval/{env}/"
            numbers = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
            self._uploads.put((env, version, episodes, numbers))

    def _run(self) -> None:
        while (item := self._uploads.get()) is not None:
            self._upload(*item)
            with self._lock:
                self._left -= 1

    def _upload(self, env: str, version: int, episodes: list[Any], numbers: dict[str, Any]) -> None:
        try:
            run = self._runs.init(
                kind="eval",
                name=f"{self._name} {env} v{version}",
                environments=[env],
                config={"training_run": self._training, "policy_version": version},
                **self._given,
            )
            run.log_episodes(episodes)
            run.finish(numbers, timeout=FINISH_SECONDS)
        except Exception as error:  # the SDK's own, or httpx's: the training goes on
            logger.warning(f"monitors.prime: evaluation of {env} at v{version} was not uploaded: {error}")

    def close(self) -> None:
        """Wait for what is on its way, a few minutes at most."""
        self._uploads.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                f"monitors.prime: {self._left} evaluations were not uploaded in the last {CLOSE_SECONDS:.0f} s"
            )
