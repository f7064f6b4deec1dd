"""With what and on what something was made: recorded in manifests, never part of an identity."""

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "rlmake", "torch", "transformers", "vllm", "verifiers", "renderers", "datasets", "safetensors", "tokenizers",
    "numpy", "snakemake",
)  # fmt: skip


@functools.cache
def versions() -> dict[str, str]:
    """Python and the packages that results rest on, as far as they are installed here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def hardware() -> dict[str, Any]:
    """`{machine, cpu, cores, memory_gib, gpus}`: the kind of machine; no host's name."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "machine": platform.machine(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []
