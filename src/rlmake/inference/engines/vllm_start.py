"""Starting vLLM: its arguments and environment from the configuration, and what is said when it does not start."""

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError
from rlmake.inference.engines import vllm_versions
from rlmake.models.text import load_tokenizer

EXTENSION = "rlmake.inference.engines.vllm_worker.Extension"
CALL_PARSER = "hermes"  # reads what the embedded engine reads: <tool_call>{"name", "arguments"}</tool_call>
KEPT_LINES = 200
LAST_WORDS_S = 0.3  # until what the other processes printed has arrived
MEMORY = re.compile(r"out of memory|no available memory|not enough memory|less than desired GPU memory"
                    r"|KV cache is needed|larger than the available KV cache", re.I)  # fmt: skip
FAULT = re.compile(r"\b(\w*(?:Error|Exception)): (.+)")
ECHO = re.compile("(Engine core|WorkerProc) initialization failed")


def arguments(cfg: Any, folder: Path) -> dict[str, Any]:
    """vLLM's arguments by their names: every key of `[inference.vllm]`, and what our contract needs."""
    table = cfg.vllm.model_dump()
    extra = table.pop("arguments")
    table["model"] = str(folder)
    table["served_model_name"] = [cfg.vllm.served_model_name or cfg.vllm.model]
    for name in ("api_server_count", "data_parallel_size"):  # one engine a process; several stand behind the router
        del table[name]
    if not table["enable_lora"]:
        del table["enable_lora"]
        table.pop("max_lora_rank", None)
    calls, reasoning = table.pop("tool_call_parser"), table.pop("reasoning_parser")
    if calls == "auto":
        template = cfg.vllm.chat_template or load_tokenizer(folder).chat_template or ""
        calls = CALL_PARSER if "<tool_call>" in template else "none"
    if calls != "none":
        table |= {"enable_auto_tool_choice": True, "tool_call_parser": calls}
    if reasoning not in ("auto", "none"):
        table["reasoning_parser"] = reasoning
    ours = {
        "seed": cfg.seed, "logprobs_mode": "processed_logprobs", "max_logprobs": 100, "worker_extension_cls": EXTENSION,
    }  # fmt: skip
    table = {key: value for key, value in (ours | table | extra).items() if value is not None}
    return vllm_versions.fp32_head(table) if cfg.enable_fp32_lm_head else table


def set_environment(cfg: Any) -> None:
    """Variables that vLLM reads while it is imported; what the user has set stays."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Its sampler has no processed log-probabilities.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # A host that cannot reach itself by its own address (a container without network) hangs otherwise.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": {"trace": "DEBUG", "debug": "DEBUG", "success": "INFO"}.get(
            cfg.log.level or "info", (cfg.log.level or "info").upper()
        ),
    }
    if cfg.device == "cpu":
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if "kv_cache_memory_bytes" not in cfg.vllm.arguments:  # which this variable would override
            defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if cfg.vllm.enforce_eager:  # else its sampler is compiled at the first request, for half a minute
            defaults["TORCHDYNAMO_DISABLE"] = "1"
        if cfg.check_weights:
            defaults[vllm_versions.KEEP_GIVEN] = "1"
    elif cfg.vllm.dtype == "float32":  # else attention multiplies with TF32: logprobs are off by 0.002
        defaults["TRITON_F32_DEFAULT"] = "ieee"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns a failed start into one line. vLLM loads the model in other processes, and the reason stands only in what
    they print: so all output passes through here on its way, and its last lines are kept."""
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    with _copied(kept):
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            time.sleep(LAST_WORDS_S)
            said = " ".join(str(error).split())
            raise UserError(reason([*kept, f"{type(error).__name__}: {said}"])) from None


def reason(lines: list[str]) -> str:
    """Why vLLM did not start, from what it printed."""
    for line in reversed(lines):
        if MEMORY.search(line) and (fault := FAULT.search(line)):
            return (
                f"inference.vllm: not enough memory: {fault[2][:300]} (lower inference.vllm.gpu_memory_utilization, "
                "max_model_len or max_num_seqs, or free the card)"
            )
    faults = [found for line in lines if (found := FAULT.search(line)) and not ECHO.search(line)]
    said = f"{faults[-1][1]}: {faults[-1][2][:300]}" if faults else (lines[-1][:300] if lines else "no word of it")
    return f"inference.vllm: vLLM did not start: {said}"


@contextlib.contextmanager
def _copied(kept: deque[str]) -> Iterator[None]:
    """Passes what this process and those it starts print through a pipe to where it went before, keeping lines.

    The pipe stays for the processes that were started meanwhile; this process prints directly again afterwards.
    """
    saved = [os.dup(1), os.dup(2)]
    pipes = [os.pipe(), os.pipe()]

    def copy(source: int, to: int) -> None:
        rest = b""
        while chunk := os.read(source, 1 << 16):
            os.write(to, chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            kept.extend(line.decode(errors="replace") for line in lines)

    for number, ((source, sink), to) in enumerate(zip(pipes, saved, strict=True), 1):
        os.dup2(sink, number)
        os.close(sink)
        threading.Thread(target=copy, args=(source, os.dup(to)), daemon=True).start()
    try:
        yield
    finally:
        for number, to in enumerate(saved, 1):
            os.dup2(to, number)
            os.close(to)
