"""What the target `parity` compares: trainer and engine of a training as its configuration has them, for every type and
attention path that they can run. Light: plans ask it too."""

from typing import Any, get_args

from rlmake.config.fields import dump
from rlmake.config.inference import InferenceConfig
from rlmake.config.reading import parse
from rlmake.config.rl import RLConfig
from rlmake.config.sft import SFTConfig
from rlmake.config.trainer import Attention, TrainerCommon
from rlmake.core.errors import ConfigError

ASKED = {"sequences": 16, "tokens": 48, "seed": 0}
"""Completions of so many prompts, of so many tokens each at most."""
VALUES = 1 << 22
"""At most so many logprobs are compared: with a large vocabulary completions are shorter."""
DTYPES = ("float32", "bfloat16")
ATTENTIONS = tuple(name for name in get_args(Attention) if name != "auto")

Run = RLConfig | SFTConfig


def trainer_of(run: Run) -> TrainerCommon:
    """The configuration of a run's trainer."""
    return run.trainer if isinstance(run, RLConfig) else run


def trainer_with(run: Run, model: str, dtype: str, attention: str) -> Any:
    """The trainer's configuration on the weights in the folder `model`, one rank, in `dtype` with `attention`.

    Raises `ConfigError` where it can't be: its message says why.
    """
    data = dump(trainer_of(run))
    data["model"] |= {"name": model, "compute_dtype": dtype, "attn": attention, "lora": None, "ac": None}
    data["model"] |= {"cp": 1, "dp_replicate": 1}
    data["tokenizer"]["name"] = model
    data |= {"resume": None, "trace_path": None}
    return parse(type(trainer_of(run)), data)


def pairs_of(run: Run) -> tuple[list[tuple[str, str]], list[dict[str, str]]]:
    """`(type, attention)` of all pairs that the run's device has, and `{dtype, attention, reason}` of the others."""
    pairs, left_out = [], []
    on_cpu = trainer_of(run).device == "cpu"
    for attention in ATTENTIONS:
        reason = None if on_cpu or attention != "exact" else "the exact forward runs on a CPU"
        try:
            trainer_with(run, "model", DTYPES[0], attention)
        except ConfigError as error:
            reason = error.faults[0].message
        for dtype in DTYPES:
            if reason is None:
                pairs.append((dtype, attention))
            else:
                left_out.append({"dtype": dtype, "attention": attention, "reason": reason})
    return pairs, left_out


def engine_of(run: Run, model: str = "", dtype: str = "float32") -> InferenceConfig:
    """The run's engine on the weights in the folder `model` in `dtype`; of a run without one, what its device has."""
    trainer = trainer_of(run)
    if run.inference is None:
        config = InferenceConfig(device=trainer.device, cpu_threads=trainer.cpu_threads, seed=trainer.seed)
    else:
        config = run.inference.model_copy(deep=True)
    config.server.host, config.server.port, config.output_dir, config.check_weights = "127.0.0.1", 0, None, False
    vllm = config.vllm
    vllm.model, vllm.served_model_name, vllm.chat_template = model, None, None
    vllm.data_parallel_size, vllm.enable_lora = 1, False  # a LoRA run's weights are merged
    if config.engine == "vllm":
        vllm.dtype, vllm.arguments = dtype, {**vllm.arguments, "max_logprobs": -1}
    else:
        config.transformers.dtype = dtype
    return config


def gpus_of(run: Run) -> int:
    """GPUs that trainer and engine take; they take turns, the trainer on one."""
    engine = engine_of(run)
    return max(engine.gpus_per_engine if engine.device == "cuda" else 0, 1 if trainer_of(run).device == "cuda" else 0)
