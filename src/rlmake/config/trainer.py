"""Configuration of the RL trainer, and the model table it shares with the SFT trainer."""

from typing import ClassVar, Literal

from pydantic import model_validator

from rlmake.config.fields import OFFSETS, Config, FieldClass, group, horizon, runtime, semantic
from rlmake.config.loss import IPOConfig, Loss
from rlmake.config.optim import (
    AdamWConfig,
    ConstantSchedule,
    Optim,
    Scheduler,
    depends_on_max_steps,
    schedule_faults,
)
from rlmake.config.refused import Refused
from rlmake.config.shared import (
    EnvVars,
    FilesystemBroadcast,
    FilesystemTransport,
    GcConfig,
    MonitorsConfig,
    ResumeConfig,
    RolloutTransport,
    RunConfig,
    TokenizerConfig,
    TrainerCkptConfig,
    TrainerLogConfig,
    WeightBroadcast,
    check_env_vars,
)

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Attention = Literal["auto", "exact", "varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"]

# In deterministic mode bytes also depend on how the work is cut up.
CUT_OF_WORK = ("model.compile", "model.ac", "model.dp_replicate", "model.fused_lm_head_token_chunk_size", "cpu_threads")


class CompileConfig(Config):
    """torch.compile of each block."""

    fullgraph: bool = runtime(False, "Refuse graph breaks.")


class ActivationCheckpointing(Config):
    """Recompute activations in the backward pass."""

    mode: Literal["full", "selective"] = runtime("full", "Whole blocks, or parts of them.")
    freq: int = runtime(1, "Every how many blocks.", ge=1)
    targets: list[Literal["norm", "attn_proj", "mlp"]] = runtime(
        lambda: ["norm"], "Parts that mode 'selective' recomputes."
    )


class ActivationOffloading(Config):
    """Keep in host memory what blocks keep for the backward pass."""

    pin_memory: bool = runtime(True, "Page-locked host memory, for copies that the device makes by itself.")
    max_inflight_activations: int = runtime(5, "How many tensors may be on their way at a time.", ge=1)


class LoRAConfig(Config):
    """Low-rank adapters in place of a full fine-tune."""

    rank: int = semantic(16, "Rank.", ge=1)
    alpha: float = semantic(32.0, "Scale; the adapter counts alpha / rank.", gt=0)
    dropout: float = semantic(0.0, "Dropout on the adapter's input.", ge=0, lt=1)
    target_modules: list[str] = semantic(
        lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "Modules to adapt."
    )


class TrainerModelConfig(Config):
    """The model to train, its numerics and how it is spread over devices."""

    name: str = semantic("Qwen/Qwen3-0.6B", "Hub id, directory, or target of the build.")
    trust_remote_code: bool = semantic(False, "Run code that ships with the model.")
    seq_len: int = semantic(2048, "Longest row in tokens.", ge=2, le=OFFSETS)
    attn: Attention = semantic("auto", "Attention; auto: exact on the CPU, varlen on GPUs.")
    impl: Literal["auto", "hf"] = semantic(
        "auto", "Implementation of the model; there is one, Hugging Face's, and no other key depends on it."
    )
    optimization_dtype: Dtype = semantic("float32", "Type of the trained weights.")
    compute_dtype: Literal["auto"] | Dtype = semantic(
        "auto", "Type of the matrix products; auto: float32 on the CPU, bfloat16 on GPUs."
    )
    reduce_dtype: Dtype = semantic("float32", "Type in which gradients are summed over ranks.")
    fused_lm_head_token_chunk_size: int | Literal["disabled"] = runtime(8192, "Tokens per chunk of the LM head.")
    compile: CompileConfig | None = runtime(None, "Compile the blocks.")
    ac: ActivationCheckpointing | None = runtime(None, "Recompute activations.")
    ac_offloading: ActivationOffloading | None = runtime(
        None, "Keep activations in host memory; switches 'ac' on where it is off."
    )
    fsdp_cpu_offload: bool = runtime(
        False, "Keep parameters, gradients and optimizer states in host memory; the update is made there."
    )
    optim_cpu_offload: bool = runtime(False, "Keep optimizer states in host memory.")
    reshard_after_forward: bool = runtime(True, "Free gathered parameters after the forward pass.")
    dp_replicate: int = runtime(1, "Copies of the sharded model.", ge=1)
    cp: int = runtime(1, "Ranks that share one row (context parallel).", ge=1)
    ep: int | Literal["auto"] = runtime("auto", "Ranks that share the experts.")
    freeze_moe_router: Literal["auto"] | bool = semantic(
        "auto", "Leave the routers of a mixture of experts as they are; auto: true for RL, false for SFT."
    )
    lora: LoRAConfig | None = semantic(None, "Train adapters only.")

    @model_validator(mode="after")
    def _offload(self):
        if self.fsdp_cpu_offload and self.optim_cpu_offload:
            raise Refused(("optim_cpu_offload", "excludes fsdp_cpu_offload"))
        if self.ac_offloading is not None and self.ac is None:
            self.ac = ActivationCheckpointing()
        return self


class FakeDataConfig(Config):
    """Made-up batches, to try the trainer alone."""

    batch_size: int = semantic(2, "Rows per step.", ge=1)
    generate_samples: bool = semantic(False, "Make samples and pack them, rather than full rows.")


class TrainerDataConfig(Config):
    """Where batches come from."""

    fake: FakeDataConfig | None = semantic(None, "Made-up batches in place of the orchestrator's.")


class TrainerCommon(Config):
    """What both trainers have."""

    model: TrainerModelConfig = group(TrainerModelConfig, "The model to train.")
    tokenizer: TokenizerConfig = group(TokenizerConfig, "Tokenizer.")
    optim: Optim = group(AdamWConfig(), "Optimizer.")
    scheduler: Scheduler = group(ConstantSchedule(), "Learning-rate schedule.")
    ckpt: TrainerCkptConfig | None = horizon(None, "Save checkpoints.")
    resume: ResumeConfig | None = runtime(None, "Resume.")
    log: TrainerLogConfig = group(TrainerLogConfig, "Logging.")
    monitors: MonitorsConfig = group(MonitorsConfig, "Monitors.")
    run: RunConfig = group(RunConfig, "Name and directory.")
    max_steps: int | None = horizon(None, "Last step, counted from the very first one; endless when absent.", ge=1)
    seed: int = semantic(0, "Seed of everything random.", ge=0)
    device: Device = semantic("cuda", "Where it runs; derived from the deployment under a launcher.")
    cpu_threads: int = runtime(2, "Threads on the CPU.", ge=1)
    matmul_precision: Literal["highest", "high", "medium"] = semantic("high", "Precision of float32 matrix products.")
    gc: GcConfig | None = runtime(GcConfig(), "Run the garbage collector at fixed steps only.")
    trace_path: str | None = runtime(None, "Write a profiler trace to this file; needs max_steps < 10.")
    dist_timeout_seconds: int = runtime(3600, "Timeout of collective operations.", ge=1)
    env_vars: EnvVars = runtime(dict, "Environment variables of the process.")

    @model_validator(mode="after")
    def _resolve_model(self):
        on_cpu = self.device == "cpu"
        if self.model.attn == "auto":
            self.model.attn = "exact" if on_cpu else "varlen"
        if self.model.compute_dtype == "auto":
            self.model.compute_dtype = "float32" if on_cpu else "bfloat16"
        if self.tokenizer.name is None:
            self.tokenizer.name = self.model.name
        faults = schedule_faults(self.scheduler, self.max_steps)
        if on_cpu and self.model.attn.startswith("flash"):
            faults.append(("model.attn", f"{self.model.attn} needs a GPU; the CPU has 'exact'"))
        if self.model.cp > 1 and self.model.attn == "exact":
            faults.append(("model.attn", "'exact' knows no model.cp above 1; use 'varlen'"))
        if self.optim.type == "muon" and self.model.fsdp_cpu_offload:
            faults.append(("model.fsdp_cpu_offload", "does not work with muon"))
        if self.trace_path is not None and (self.max_steps is None or self.max_steps >= 10):
            faults.append(("trace_path", "needs max_steps below 10"))
        if faults:
            raise Refused(faults)
        check_env_vars(self.env_vars)
        return self

    def settle(self, *, rl: bool) -> None:
        """Resolve what differs between RL and SFT."""
        if self.model.freeze_moe_router == "auto":
            self.model.freeze_moe_router = rl
        if self.optim.weight_decay == "auto":
            self.optim.weight_decay = 0.0 if rl else 0.01

    def horizon_classes(self) -> dict[str, FieldClass]:
        """`max_steps` counts where the schedule depends on it, and what a fork leaves unread counts too."""
        fields: dict[str, FieldClass] = {"max_steps": "semantic"} if depends_on_max_steps(self.scheduler) else {}
        if self.model.fsdp_cpu_offload and self.device == "cuda" and self.deterministic:
            fields["model.fsdp_cpu_offload"] = "semantic"  # the host's update rounds otherwise than the card's
        if self.ckpt is not None and self.resume is not None and self.resume.dir is not None:
            skips = (name for name in TrainerCkptConfig.model_fields if name.startswith("skip_"))
            fields |= {f"ckpt.{name}": "semantic" for name in skips}
        return fields


class TrainerConfig(TrainerCommon):
    """The RL trainer (`trainer`)."""

    entry: ClassVar[str | None] = "trainer"

    output_dir: str | None = runtime(None, "Run directory.")
    deterministic: bool | Literal["auto"] = semantic("auto", "Same configuration, same bytes; auto: on the CPU.")
    loss: Loss = group(IPOConfig(), "The rl component of the loss.")
    data: TrainerDataConfig = group(TrainerDataConfig, "Where batches come from.")
    weight_broadcast: WeightBroadcast = group(FilesystemBroadcast(), "How new weights reach the engines.")
    check_weights: bool = runtime(False, "Send a hash of each tensor along; set by inference.check_weights.")
    rollout_transport: RolloutTransport = group(FilesystemTransport(), "How batches reach the trainer.")
    enable_token_export: bool = runtime(False, "Write per-token values of each batch to token_exports/.")

    @model_validator(mode="after")
    def _resolve(self):
        self.settle(rl=True)
        if self.deterministic == "auto":
            self.deterministic = self.device == "cpu"
        return self

    def reclassified(self) -> dict[str, FieldClass]:
        return self.horizon_classes() | (dict.fromkeys(CUT_OF_WORK, "semantic") if self.deterministic else {})
