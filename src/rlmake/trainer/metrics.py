"""Numbers about a step, named as on the page: statistics over tokens, times, throughput, memory."""

import os
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlmake.trainer.world import World

WINDOW = 10  # steps over which throughput is averaged


class Clock:
    """Seconds by name within a step (`time/<name>`), and throughput over the last steps."""

    def __init__(self) -> None:
        self.times: dict[str, float] = defaultdict(float)
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    @contextmanager
    def measure(self, name: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] += time.perf_counter() - start

    def throughput(self, tokens: int, seconds: float) -> float:
        """Tokens per second over the last `WINDOW` steps, this one (`tokens` in `seconds`) included."""
        self._recent.append((tokens, seconds))
        return sum(t for t, _ in self._recent) / max(sum(s for _, s in self._recent), 1e-9)

    def take(self) -> dict[str, float]:
        """`time/*` of the step; starts the next one."""
        found = {f"time/{name}": seconds for name, seconds in self.times.items()}
        self.times.clear()
        return found


def performance(rate: float, flops_per_token: float, peak: float | None, world: World) -> dict[str, float]:
    """`perf/*` of `rate` tokens/s over all ranks. MFU in percent, only where the device has a known peak.

    Memory is the reserved peak on a GPU, the process's resident peak on a CPU, in GiB of this rank.
    """
    found = {"perf/throughput": rate, "perf/throughput_per_gpu": rate / world.size}
    if peak is not None:
        found["perf/mfu"] = 100.0 * flops_per_token * rate / (peak * world.size)
        found["perf/peak_memory"] = torch.cuda.max_memory_reserved(world.device) / 2**30
    else:
        import resource

        found["perf/peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def ckpt_disk(folder: Path) -> dict[str, float]:
    """`system/ckpt_disk_*`: room on the disk of `folder`; nothing for one that can't be asked."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return {}
    gib = stat.f_frsize / 2**30
    found = {"free_gib": stat.f_bavail * gib, "used_gib": (stat.f_blocks - stat.f_bfree) * gib}
    found |= {"total_gib": stat.f_blocks * gib, "free_ratio": stat.f_bavail / max(stat.f_blocks, 1)}
    return {f"system/ckpt_disk_{name}": value for name, value in found.items()}


class TokenStatistics:
    """Collects values per token over a step's micro-batches, and describes them over all ranks."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[Tensor, Tensor, np.ndarray]]] = defaultdict(list)

    def add(self, name: str, values: Tensor, mask: Tensor, envs: np.ndarray) -> None:
        """`values` [N] where `mask` [N] is set; `envs` [N] (objects) names each token's environment."""
        self._kept[name].append((values.detach().float(), mask, envs))

    def describe(self, world: World, by_env: tuple[str, ...], plain: tuple[str, ...]) -> dict[str, float]:
        """`<name>/all/<stat>` and `<name>/<env>/<stat>` for `by_env`, `<name>/<stat>` for `plain`; every rank calls it.

        Statistics: mean, median, std, min, max, over the tokens of the whole step. What no token has is left out.
        """
        mine = {}
        for name, kept in self._kept.items():  # read from the device here, once, and not while it still has to compute
            chosen = [(values.cpu().numpy(), mask.cpu().numpy(), envs) for values, mask, envs in kept]
            values = np.concatenate([values[mask] for values, mask, _ in chosen])
            mine[name] = (values, np.concatenate([envs[mask] for _, mask, envs in chosen]))
        gathered = world.gather(mine)
        found: dict[str, float] = {}
        for name in (*by_env, *plain):
            parts = [part[name] for part in gathered if name in part]
            values = np.concatenate([part[0] for part in parts]) if parts else np.empty(0)
            if not len(values):
                continue
            if name in plain:
                found |= _stats(name, values)
                continue
            found |= _stats(f"{name}/all", values)
            envs = np.concatenate([part[1] for part in parts])
            for env in sorted(set(envs)):
                found |= _stats(f"{name}/{env}", values[envs == env])
        return found


def _stats(name: str, values: np.ndarray) -> dict[str, float]:
    values = values.astype(np.float64)
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/median": float(np.median(values)),
        f"{name}/std": float(values.std()),
        f"{name}/min": float(values.min()),
        f"{name}/max": float(values.max()),
    }
