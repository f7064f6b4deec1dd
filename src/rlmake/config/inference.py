"""Configuration of the inference server."""

import functools
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from rlmake.config.deployment import InferDeployment, InferSingleNode
from rlmake.config.fields import OFFSETS, Config, FieldClass, group, runtime, semantic
from rlmake.config.refused import Refused
from rlmake.config.rl_checks import engines_fit
from rlmake.config.shared import (
    ComponentLogConfig,
    EnvVars,
    FilesystemBroadcast,
    RunConfig,
    SlurmConfig,
    WeightBroadcast,
    check_env_vars,
)
from rlmake.config.trainer import Device
from rlmake.core.errors import nearest


class ServerConfig(Config):
    """The HTTP server."""

    host: str = runtime("127.0.0.1", "Address to listen on.")
    port: int = runtime(8000, "Port; 0: taken from the system and published in the run directory.", ge=0, le=65535)
    liveness_timeout_seconds: float = runtime(30.0, "Timeout of the liveness probe.", gt=0)


class TransformersConfig(Config):
    """The embedded engine."""

    max_slots: int = semantic(64, "Sequences generated at the same time.", ge=1)
    prefill_tokens: int = semantic(2048, "Prompt tokens processed in one forward pass.", ge=1)
    dtype: Literal["float32", "bfloat16"] = semantic("float32", "Type of the weights.")


class VllmConfig(Config):
    """The vLLM engine; model, its names, `max_model_len`, `chat_template` and adapters count for both engines.

    Any other argument of vLLM's server may stand in the table under its own name (`max_num_seqs = 256`).
    """

    model: str = semantic("Qwen/Qwen3-0.6B", "Hub id, directory, or target of the build.")
    max_model_len: int | None = semantic(None, "Longest sequence; the model's own limit when absent.", ge=2, le=OFFSETS)
    chat_template: str | None = semantic(None, "Chat template in place of the tokenizer's own.")
    trust_remote_code: bool = semantic(False, "Run code that ships with the model.")
    served_model_name: str | None = runtime(None, "Name in /v1/models; `model` when absent.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = semantic("auto", "Type of the weights.")
    enforce_eager: bool = runtime(False, "No CUDA graphs.")
    tensor_parallel_size: int = runtime(1, "GPUs that share one copy of the model.", ge=1)
    data_parallel_size: int = runtime(1, "Copies of the model.", ge=1)
    api_server_count: int = runtime(1, "API server processes.", ge=1)
    gpu_memory_utilization: float = runtime(0.9, "Share of GPU memory to use.", gt=0, le=1)
    enable_prefix_caching: bool | None = runtime(None, "Reuse prefixes; the engine's default when absent.")
    quantization: str | None = semantic(None, "Quantisation of the weights.")
    tool_call_parser: str = semantic("auto", "Parser of tool calls.")
    reasoning_parser: str = semantic("auto", "Parser of reasoning.")
    enable_lora: bool = runtime(False, "Serve adapters.")
    max_lora_rank: int = runtime(16, "Greatest rank of an adapter.", ge=1)
    arguments: dict[str, Any] = semantic(dict, "Arguments of vLLM's server that have no field here, by their names.")

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, data: Any) -> Any:
        """Move vLLM's own arguments from the table itself into `arguments`."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        names = vllm_arguments()
        found = {key: data.pop(key) for key in list(data) if key not in cls.model_fields and key in names}
        if unknown := [key for key in data if key not in cls.model_fields]:
            hint = nearest(unknown[0], [*cls.model_fields, *names])
            raise Refused((unknown[0], f"vLLM's server has no such argument{hint}; one that is newer than 0.32 may "
                                       "stand in [inference.vllm.arguments]"))  # fmt: skip
        if found:
            data["arguments"] = {**(data.get("arguments") or {}), **found}
        return data

    @model_validator(mode="after")
    def _not_ours(self):
        taken = [name for name in self.arguments if name in type(self).model_fields or name in OURS]
        if taken:
            raise Refused([(f"arguments.{name}", OURS.get(name, "stands in the table itself")) for name in taken])
        return self


OURS = {
    "host": "is server.host", "port": "is server.port", "uds": "is not served; server.host and server.port are",
    "worker_extension_cls": "is what new weights arrive through", "seed": "is inference.seed",
    "logprobs_mode": "is processed_logprobs: the trainer's ratio counts on it", "enable_log_requests": "is log.level",
    "enable_log_outputs": "is log.level", "enable_auto_tool_choice": "follows from tool_call_parser",
    "model_tag": "is model", "data_parallel_rank": "follows from the deployment",
    "data_parallel_multi_port_external_lb": "follows from the deployment", "headless": "follows from the deployment",
    "enable_return_routed_experts": "belongs to router replay, which is not built yet",
}  # fmt: skip


@functools.cache
def vllm_arguments() -> frozenset[str]:
    """Names of the arguments of vLLM's server, of all versions that are supported."""
    return frozenset((Path(__file__).parent / "vllm_arguments.txt").read_text(encoding="utf-8").split())


BOTH_ENGINES = (
    "model",
    "max_model_len",
    "chat_template",
    "trust_remote_code",
    "served_model_name",
    "enable_lora",
    "max_lora_rank",
)


@functools.cache
def _of_vllm_only() -> dict[str, Any]:
    """Options that the other engine does not have, with their defaults."""
    fields = {name: info for name, info in VllmConfig.model_fields.items() if name not in BOTH_ENGINES}
    return {name: info.get_default(call_default_factory=True) for name, info in fields.items()}


class InferenceConfig(Config):
    """The inference server (`inference`)."""

    entry: ClassVar[str | None] = "inference"

    engine: Literal["auto", "vllm", "transformers"] = semantic("auto", "Engine; auto: vllm on GPUs, else transformers.")
    device: Device = semantic("cpu", "Where it runs; derived from the deployment under a launcher.")
    cpu_threads: int = runtime(2, "Threads on the CPU.", ge=1)
    python: str | None = runtime(None, "Interpreter of the server's own environment; this one when absent.")
    server: ServerConfig = group(ServerConfig, "The HTTP server.")
    transformers: TransformersConfig = group(TransformersConfig, "The embedded engine.")
    vllm: VllmConfig = group(VllmConfig, "The vLLM engine, and the model of both.")
    enable_fp32_lm_head: bool = semantic(True, "Last layer in float32.")
    weight_broadcast: WeightBroadcast = group(FilesystemBroadcast(), "How new weights arrive.")
    check_weights: bool = runtime(False, "After an update, compare the engine's parameters with the trainer's by hash.")
    seed: int = semantic(0, "Seed of requests that bring none.", ge=0)
    deterministic: bool | Literal["auto"] = semantic("auto", "Same requests, same bytes; auto: on the CPU.")
    log: ComponentLogConfig = group(ComponentLogConfig, "Logging.")
    run: RunConfig = group(RunConfig, "Name and directory.")
    output_dir: str | None = runtime(None, "Run directory.")
    env_vars: EnvVars = runtime(dict, "Environment variables of the process.")
    dry_run: bool = runtime(False, "Validate, write the resolved configuration, start nothing.")
    deployment: InferDeployment = group(InferSingleNode(), "Placement of a server that is started by itself.")
    slurm: SlurmConfig | None = runtime(None, "Submit to SLURM.")

    @model_validator(mode="after")
    def _resolve(self):
        if self.engine == "auto":
            self.engine = "vllm" if self.device == "cuda" else "transformers"
        if self.deterministic == "auto":
            self.deterministic = self.device == "cpu" and self.engine == "transformers"
        if self.engine == "vllm" and self.deterministic:
            raise Refused(("deterministic", "the vllm engine does not promise equal bytes; use engine 'transformers'"))
        check_env_vars(self.env_vars)
        if self.deployment.type == "multi_node" and self.slurm is None:
            raise Refused(("deployment.type", "multi_node needs [slurm]"))
        if self.deployment.type == "multi_node":
            place = self.deployment
            key = "deployment.gpus_per_node"
            if faults := engines_fit(self, place.gpus_per_node, key, place.num_nodes, table="vllm"):
                raise Refused(faults)
        if self.check_weights and self.engine == "vllm" and (reason := self._uncheckable()):
            raise Refused(("check_weights", reason))
        if self.engine == "transformers" and (faults := self._unread()):
            raise Refused(faults)
        return self

    def _uncheckable(self) -> str | None:
        """Why vLLM's parameters are not those that were sent, bit for bit."""
        if self.vllm.quantization is not None:
            return f"with quantization = '{self.vllm.quantization}' the engine's parameters are others"
        if self.gpus_per_engine > 1:
            return "an engine over several GPUs holds parts of the parameters only"
        return None

    @property
    def gpus_per_engine(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.vllm.tensor_parallel_size * int(self.vllm.arguments.get("pipeline_parallel_size", 1))

    def _unread(self) -> list[tuple[str, str]]:
        """Options of the vLLM engine that were set although it is not the one in use."""
        changed = [name for name, default in _of_vllm_only().items() if getattr(self.vllm, name) != default]
        return [
            (f"vllm.{name}", "counts for the vllm engine only, and the engine is 'transformers'") for name in changed
        ]

    def reclassified(self) -> dict[str, FieldClass]:
        """Only the engine in use counts, and the thread count where bytes are promised."""
        fields: dict[str, FieldClass] = {"cpu_threads": "semantic"} if self.deterministic else {}
        if self.engine == "vllm":
            fields |= {f"transformers.{name}": "runtime" for name in TransformersConfig.model_fields}
        else:
            fields |= {f"vllm.{name}": "runtime" for name in _of_vllm_only()}
        return fields
