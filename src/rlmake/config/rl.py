"""Configuration of an RL run: trainer, orchestrator and inference server, and the keys they share."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from rlmake.config.deployment import Deployment, SingleNode, world_fields
from rlmake.config.fields import OFFSETS, Config, FieldClass, group, horizon, runtime, semantic
from rlmake.config.inference import InferenceConfig
from rlmake.config.names import auto_name
from rlmake.config.orchestrator import OrchestratorConfig
from rlmake.config.refused import Refused
from rlmake.config.rl_checks import rl_faults
from rlmake.config.shared import (
    CkptConfig,
    EnvVars,
    LogConfig,
    ResumeConfig,
    RolloutTransport,
    RunConfig,
    SharedMonitorsConfig,
    SlurmConfig,
    TokenizerConfig,
    WeightBroadcast,
    check_env_vars,
    default_output_dir,
)
from rlmake.config.spread import (
    ABSENT,
    SharingConfig,
    Spreader,
    as_int,
    get,
    is_null,
    put_adapter,
    put_device,
    put_server,
)
from rlmake.config.trainer import TrainerConfig


class SharedModelConfig(Config):
    """The model of all components."""

    name: str = semantic("Qwen/Qwen3-0.6B", "Hub id, directory, or target of the build.", shared=True)


class RLConfig(SharingConfig):
    """An RL run (`rl`)."""

    entry: ClassVar[str | None] = "rl"
    undumped: ClassVar[tuple[str, ...]] = (
        "model",
        "tokenizer",
        "max_steps",
        "seq_len",
        "seed",
        "deterministic",
        "ckpt",
        "resume",
        "weight_broadcast",
        "rollout_transport",
        "log",
        "monitors",
    )

    trainer: TrainerConfig = group(TrainerConfig, "The trainer.")
    orchestrator: OrchestratorConfig = group(OrchestratorConfig, "The orchestrator.")
    inference: InferenceConfig | None = semantic(None, "The inference server; None: one that runs elsewhere.")
    deployment: Deployment = group(SingleNode(), "Placement.")

    model: SharedModelConfig | None = semantic(None, "The model of all components.", shared=True)
    tokenizer: TokenizerConfig | None = semantic(None, "The tokenizer of all components.", shared=True)
    max_steps: int | None = horizon(None, "Last step, counted from the very first one.", ge=1, shared=True)
    seq_len: int | None = semantic(
        None, "Longest row of the trainer and longest rollout.", ge=2, le=OFFSETS, shared=True
    )
    seed: int = semantic(0, "Seed of everything random in all components.", ge=0, shared=True)
    deterministic: bool | Literal["auto"] = semantic(
        "auto", "Same configuration, same bytes; auto: when trainer and managed inference run on the CPU.", shared=True
    )
    ckpt: CkptConfig | None = horizon(None, "Save checkpoints.", shared=True)
    resume: ResumeConfig | None = runtime(None, "Resume.", shared=True)
    weight_broadcast: WeightBroadcast | None = runtime(
        None, "How new weights reach the engines; absent: nccl between GPUs, else filesystem.", shared=True
    )
    rollout_transport: RolloutTransport | None = runtime(
        None, "How batches reach the trainer; absent: zmq with a trainer on GPUs, else filesystem.", shared=True
    )
    log: LogConfig = runtime(LogConfig, "Logging of all components.", shared=True)
    monitors: SharedMonitorsConfig = runtime(SharedMonitorsConfig, "Monitors of all components.", shared=True)

    run: RunConfig = group(RunConfig, "Name and directory.")
    output_dir: str = runtime(default_output_dir, "Folder of runs; `$PRL_OUTPUT_DIR`, else outputs.")
    clean: bool = runtime(False, "Wipe the run directory before the start.")
    dashboard: bool = runtime(True, "From a terminal: start the user's dashboard if none runs, and say where it is.")
    dry_run: bool = runtime(False, "Validate, write the resolved configuration, start nothing.")
    slurm: SlurmConfig | None = runtime(None, "Submit to SLURM.")
    env_vars: EnvVars = runtime(dict, "Environment variables of all components.")

    @classmethod
    def spread(cls, data: dict[str, Any]) -> Spreader:
        """Fill the components' raw tables from the root's shared keys and the deployment."""
        for name in ("trainer", "orchestrator"):
            data.setdefault(name, {})
        spreader = Spreader(data)
        managed = isinstance(data.get("inference"), dict)
        inference = ("inference",) if managed else ()

        def everywhere(key: str) -> list[str]:
            return [f"{part}.{key}" for part in ("trainer", "orchestrator", *inference)]

        def both(key: str) -> list[str]:
            return [f"trainer.{key}", f"orchestrator.{key}"]

        for key in ("model", "tokenizer", "seq_len", "weight_broadcast", "rollout_transport"):
            if is_null(data.get(key)):
                data.pop(key, None)
        _defaults(data, managed)
        spreader.share("model.name", *both("model.name"), *(f"{part}.vllm.model" for part in inference))
        spreader.share("tokenizer.chat_template", *(f"{part}.vllm.chat_template" for part in inference))
        for key in ("seed", "deterministic", "log", "env_vars", "weight_broadcast"):
            spreader.share(key, *everywhere(key))
        for key in ("tokenizer", "max_steps", "resume", "rollout_transport", "monitors.file", "monitors.wandb"):
            spreader.share(key, *both(key))
        spreader.share("monitors.prime", "orchestrator.monitors.prime")
        spreader.share("seq_len", "trainer.model.seq_len", "orchestrator.seq_len")
        ckpt = get(data, "ckpt")
        if ckpt is not ABSENT:
            spreader.put("trainer.ckpt", ckpt, "ckpt")
            kept = {k: v for k, v in ckpt.items() if k != "output_dir"} if isinstance(ckpt, dict) else ckpt
            spreader.put("orchestrator.ckpt", kept, "ckpt")
        put_device(spreader, "trainer", "num_train_gpus")
        put_adapter(spreader, managed)
        if managed:
            put_device(spreader, "inference", "num_infer_gpus")
            put_server(spreader, "orchestrator.model.client")
            spreader.share("inference.check_weights", "trainer.check_weights")
        return spreader

    @model_validator(mode="after")
    def _resolve(self):
        self._reflect()
        check_env_vars(self.env_vars)
        place = self.deployment
        if place.type == "single_node":
            ranks = place.num_train_gpus or place.num_train_ranks
        else:
            ranks = place.num_train_nodes * place.ranks_per_node
        self.orchestrator.num_train_workers = max(1, ranks // self.trainer.model.cp)
        self.orchestrator.pad_to_multiple_of = self.trainer.model.cp
        if faults := rl_faults(self):
            raise Refused(faults)
        return self

    def _reflect(self) -> None:
        """Show in the shared keys what the components agreed on."""
        trainer = self.trainer
        self.model = SharedModelConfig(name=trainer.model.name)
        for key in ("max_steps", "seed", "deterministic", "resume", "weight_broadcast", "rollout_transport"):
            setattr(self, key, getattr(trainer, key))
        kept = CkptConfig.model_fields
        self.ckpt = trainer.ckpt and CkptConfig(**trainer.ckpt.model_dump(include=set(kept)))

    def reclassified(self) -> dict[str, FieldClass]:
        fields: dict[str, FieldClass] = {}
        if self.deterministic:
            fields = dict.fromkeys(world_fields(self.deployment), "semantic")
            if "deployment.num_train_ranks" in fields:
                fields["deployment.cpu_threads"] = "semantic"
        return fields

    def placed(self, run_dir: Path | str, name: str) -> "RLConfig":
        """A copy whose components know the run: `output_dir` of each is the run directory, `run.name` its name."""
        config = self.model_copy(deep=True)
        for part in (config, config.trainer, config.orchestrator, config.inference):
            if part is not None:
                part.run = RunConfig(name=name, dir=config.run.dir)
        for part in (config.trainer, config.orchestrator, config.inference):
            if part is not None:
                part.output_dir = str(run_dir)
        return config

    def auto_name(self, short_id: str) -> str:
        """A name for a run that was given none."""
        return auto_name([source.taskset_id for source in self.orchestrator.train.source], self.model.name, short_id)


def _defaults(data: dict[str, Any], managed: bool) -> None:
    """Root values that follow from the rest of the configuration, never from the machine."""
    if get(data, "deployment.type", "single_node") == "single_node":
        train_gpus = as_int(get(data, "deployment.num_train_gpus"), 1)
        infer_gpus = as_int(get(data, "deployment.num_infer_gpus"), 1)
    else:
        train_gpus = infer_gpus = as_int(get(data, "deployment.gpus_per_node"), 8)
    parts = ("trainer", "orchestrator", "inference")
    vllm = managed and (infer_gpus > 0 or get(data, "inference.engine") == "vllm")
    exact = train_gpus == 0 and not vllm
    for key, default in (("seed", 0), ("deterministic", exact)):
        if data.get(key, "auto") == "auto":
            given = [value for part in parts if (value := get(data, f"{part}.{key}", "auto")) != "auto"]
            data[key] = given[0] if given else default
            for part in parts:
                if get(data, f"{part}.{key}") == "auto":
                    del data[part][key]
    lora = get(data, "trainer.model.lora", None)
    shared = get(data, "deployment.share_gpus", False) in (True, "true")
    nccl = bool(managed and train_gpus and infer_gpus and is_null(lora)) and not shared
    for key, kind in (
        ("weight_broadcast", "nccl" if nccl else "filesystem"),
        ("rollout_transport", "zmq" if train_gpus else "filesystem"),
    ):
        if all(get(data, f"{part}.{key}") is ABSENT for part in parts):
            table = data.setdefault(key, {})
            if isinstance(table, dict):
                table.setdefault("type", kind)
