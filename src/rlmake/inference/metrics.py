"""`/metrics` in Prometheus' text format, under vLLM's names, so that one reader serves both engines."""

from rlmake.inference.engines.base import Stats


def render(stats: Stats, model: str) -> str:
    """The exposition of one engine."""
    label = _label(model)
    rows = [
        ("vllm:num_requests_running", "gauge", "Sequences being generated.", stats.running),
        ("vllm:num_requests_waiting", "gauge", "Sequences waiting for a slot.", stats.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1.", stats.kv_usage),
        ("vllm:num_preemptions_total", "counter", "Sequences that lost their slot.", stats.preemptions),
        ("vllm:prompt_tokens_total", "counter", "Prompt tokens processed.", stats.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", "Tokens generated.", stats.generation_tokens),
    ]
    lines = _lines(rows, label)
    lines += ["# HELP vllm:request_success_total Sequences that ended.", "# TYPE vllm:request_success_total counter"]
    for reason, count in sorted(stats.finished.items()):
        lines.append(f'vllm:request_success_total{{finished_reason="{reason}",model_name="{label}"}} {count}')
    lines += [
        "# HELP vllm:cache_config_info Size of the KV cache in blocks of one token.",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{stats.capacity}"}} 1',
    ]
    return "\n".join(lines) + "\n" + own(stats.version, stats.paused, model)


def own(version: int, paused: bool, model: str) -> str:
    """What is not vLLM's."""
    rows = [
        ("rlmake:policy_version", "gauge", "Version of the weights served.", version),
        ("rlmake:paused", "gauge", "1 while generation is paused.", int(paused)),
    ]
    return "\n".join(_lines(rows, _label(model))) + "\n"


def _lines(rows: list[tuple[str, str, str, float]], label: str) -> list[str]:
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f'{name}{{model_name="{label}"}} {value}']
    return lines


def _label(model: str) -> str:
    return model.replace("\\", "\\\\").replace('"', '\\"')
