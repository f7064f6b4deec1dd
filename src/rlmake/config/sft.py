"""Configuration of supervised fine-tuning."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlmake.config.deployment import MOST_RANKS, CpuThreads, SFTMultiNode, world_fields
from rlmake.config.fields import OFFSETS, Config, FieldClass, group, runtime, semantic
from rlmake.config.inference import InferenceConfig
from rlmake.config.names import auto_name
from rlmake.config.online import OnlineEvalProcessConfig, SFTEvalConfig
from rlmake.config.refused import Refused
from rlmake.config.renderer import RendererConfig, resolve_auto
from rlmake.config.rl_checks import (
    completions_fit,
    engines_fit,
    over_nodes,
    ranks_fit,
    standing_alone,
    weights_arrive,
)
from rlmake.config.shared import (
    FilesystemBroadcast,
    HeartbeatConfig,
    RunConfig,
    SlurmConfig,
    WeightBroadcast,
    default_output_dir,
)
from rlmake.config.spread import SharingConfig, Spreader, adapter_name, get, put_device, put_engine
from rlmake.config.trainer import CUT_OF_WORK, TrainerCommon


class LossMask(Config):
    """Whose messages train."""

    system: bool = semantic(False, "System messages.")
    user: bool = semantic(False, "User messages.")
    assistant: bool = semantic(True, "Assistant messages.")
    tool: bool = semantic(False, "Tool messages.")


class Columns(Config):
    """Names of the columns in the data set."""

    messages: str = semantic("messages", "Conversations.")
    prompt: str = semantic("prompt", "Prompts.")
    completion: str = semantic("completion", "Completions.")
    tools: str = semantic("tools", "Tool definitions.")
    message_loss_mask: str = semantic("message_loss_mask", "Masks, one value per message.")
    renderer: dict[str, str] = semantic(
        lambda: {"reasoning_effort": "reasoning_effort"}, "Renderer fields that rows set: field → column."
    )


class _Rows(Config):
    batch_size: int = semantic(128, "Packed rows per step.", ge=1)
    seq_len: int = semantic(128, "Length of a packed row in tokens.", ge=2, le=OFFSETS)
    micro_batch_size: int = runtime(1, "Packed rows in one forward pass.", ge=1)
    seed: int = semantic(0, "Seed of the order; the run's `seed` when that is given and this is not.", ge=0)


class SFTDataConfig(_Rows):
    """A data set of conversations or of prompts and completions."""

    type: Literal["sft"] = semantic("sft", "Kind of data.")
    name: str = semantic("PrimeIntellect/Reverse-Text-SFT", "Hub id, file, directory, or target of the build.")
    revision: str | None = semantic(None, "Revision of a hub data set; the build needs it pinned.")
    subsets: list[str] | None = semantic(None, "Subsets to mix.")
    splits: list[str] | None = semantic(None, "Splits to mix; train when absent.")
    probabilities: list[float] | None = semantic(None, "Shares of the mixed parts.")
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = semantic("all_exhausted", "When a pass ends.")
    shuffle: bool = semantic(True, "Shuffle each epoch.")
    num_workers: int = runtime(1, "Threads that prepare rows ahead; 0: the trainer itself, when it needs them.", ge=0)
    loss_mask: LossMask = group(LossMask, "Whose messages train.")
    columns: Columns = group(Columns, "Names of the columns.")

    @model_validator(mode="after")
    def _mix(self):
        parts = max(len(self.subsets or ()), len(self.splits or ()))
        faults = []
        if self.subsets and self.splits and len(self.subsets) != len(self.splits):
            faults.append(("splits", f"has {len(self.splits)} entries, subsets {len(self.subsets)}"))
        if self.probabilities is not None and len(self.probabilities) != parts:
            faults.append(("probabilities", f"has {len(self.probabilities)} entries for {parts} mixed parts"))
        if not any((self.loss_mask.system, self.loss_mask.user, self.loss_mask.assistant, self.loss_mask.tool)):
            faults.append(("loss_mask", "no role trains"))
        if faults:
            raise Refused(faults)
        return self


class FakeSFTDataConfig(_Rows):
    """Made-up rows, to try the trainer alone."""

    type: Literal["fake"] = semantic("fake", "Kind of data.")
    length: Literal["fixed", "variable"] = semantic("fixed", "Lengths of the samples.")
    input_ids: Literal["increasing", "random"] = semantic("increasing", "Tokens of the samples.")


Data = Annotated[SFTDataConfig | FakeSFTDataConfig, Field(discriminator="type")]


class ValConfig(Config):
    """Loss on held-out data while training."""

    interval: int = semantic(50, "Steps between validations.", ge=1)
    eval_on_start: bool = semantic(False, "Validate before the first step.")
    data: Data = group(SFTDataConfig(), "The held-out data.")


class SFTSingleNode(CpuThreads):
    """One host; `num_train_gpus = 0`: the CPU."""

    type: Literal["single_node"] = runtime("single_node", "Kind of placement.")
    gpus_per_node: int = runtime(8, "GPUs of the host.", ge=0)
    num_train_gpus: int = runtime(1, "GPUs of the trainer; 0: CPU.", ge=0)
    num_infer_gpus: int = runtime(1, "GPUs of the inference server of the evaluations; 0: CPU.", ge=0)
    num_train_ranks: int = runtime(1, "Processes of the trainer on the CPU (gloo).", ge=1, le=MOST_RANKS)


class SFTConfig(SharingConfig, TrainerCommon):
    """Supervised fine-tuning (`sft`)."""

    entry: ClassVar[str | None] = "sft"

    data: Data = group(SFTDataConfig(), "Training data.")
    val: ValConfig | None = semantic(None, "Validation.")
    renderer: RendererConfig = group(RendererConfig(), "Renderer of messages.")
    eval: SFTEvalConfig | None = runtime(None, "Evaluations while training.")
    inference: InferenceConfig | None = runtime(None, "Inference server of the evaluations.")
    weight_broadcast: WeightBroadcast | None = runtime(None, "How new weights reach the engines.")
    deterministic: bool | Literal["auto"] = semantic("auto", "Same configuration, same bytes; auto: on the CPU.")
    deployment: Annotated[SFTSingleNode | SFTMultiNode, Field(discriminator="type")] = group(
        SFTSingleNode(), "Placement."
    )
    output_dir: str = runtime(default_output_dir, "Folder of runs; `$PRL_OUTPUT_DIR`, else outputs.")
    clean: bool = runtime(False, "Wipe the run directory before the start.")
    dashboard: bool = runtime(True, "From a terminal: start the user's dashboard if none runs, and say where it is.")
    dry_run: bool = runtime(False, "Validate, write the resolved configuration, start nothing.")
    heartbeat: HeartbeatConfig | None = runtime(None, "Call a URL while the process lives.")
    slurm: SlurmConfig | None = runtime(None, "Submit to SLURM.")

    @classmethod
    def spread(cls, data: dict[str, Any]) -> Spreader:
        """Device and threads follow from the deployment, the model's row length from the data; the order of the rows
        from the run's seed, where it has none of its own."""
        spreader = Spreader(data)
        if isinstance(data.get("data"), dict) and "seed" in data and "seed" not in data["data"]:
            spreader.put("data.seed", data["seed"], "seed")
        put_device(spreader, "", "num_train_gpus")
        spreader.put(
            "model.seq_len", get(data, "data.seq_len", SFTDataConfig.model_fields["seq_len"].default), "data.seq_len"
        )
        if isinstance(data.get("inference"), dict):
            put_engine(spreader)
        return spreader

    @model_validator(mode="after")
    def _resolve(self):
        self.settle(rl=False)
        if self.deterministic == "auto":
            self.deterministic = self.device == "cpu"
        if faults := self._faults():
            raise Refused(faults)
        return self

    def _faults(self) -> list[tuple[str, str]]:
        data, place, faults = self.data, self.deployment, []
        single = place.type == "single_node"
        if single:
            on_cpu = place.num_train_gpus == 0
            ranks = place.num_train_ranks if on_cpu else place.num_train_gpus
            total = place.num_train_gpus + (place.num_infer_gpus if self.inference else 0)
            if total > place.gpus_per_node:
                faults.append(
                    ("deployment.gpus_per_node", f"{total} GPUs are asked for, the host has {place.gpus_per_node}")
                )
            faults += engines_fit(self.inference, place.num_infer_gpus, "deployment.num_infer_gpus")
            faults += ranks_fit(self.model, ranks, "model")
        else:
            ranks = place.num_train_nodes * place.ranks_per_node
            faults += over_nodes(place, self.inference, self.slurm)
            faults += ranks_fit(self.model, ranks, "model", place.dp_replicate)
            if place.orchestrator_on_inference:
                text = "an SFT has no orchestrator; its evaluations stand on the first inference node"
                faults.append(("deployment.orchestrator_on_inference", text))
        rows = ranks // self.model.cp * data.micro_batch_size
        if rows and data.batch_size % rows:
            faults.append(
                ("data.batch_size", f"{data.batch_size} is not a multiple of ranks × micro_batch_size = {rows}")
            )
        if data.seq_len % self.model.cp:
            faults.append(("data.seq_len", f"{data.seq_len} is not a multiple of model.cp = {self.model.cp}"))
        if self.model.cp > 1 and data.micro_batch_size > 1:
            faults.append(("data.micro_batch_size", "must be 1 with model.cp above 1"))
        if data.type == "sft":  # fake rows need no renderer
            name = resolve_auto(self.renderer, self.tokenizer.name)
            if name is None:
                faults.append(
                    ("renderer.name", f"'auto' knows hub ids only, not '{self.tokenizer.name}': name the renderer")
                )
            elif name == "default":
                faults.append(("renderer.name", "'default' cannot tell which tokens to train: name another renderer"))
            else:
                self.renderer.name = name
        faults += standing_alone(self.inference)
        faults += completions_fit(self.inference, self.eval.source if self.eval else [])
        if self.inference is not None and self.eval is None:
            faults.append(("inference", "needs [eval]"))
        if self.eval is not None:
            faults += self._eval_faults()
        return faults

    def _eval_faults(self) -> list[tuple[str, str]]:
        faults = []
        if self.inference is None:
            faults.append(("eval", "needs [inference]: the server that the evaluated weights are loaded into"))
        if self.weight_broadcast is None:
            self.weight_broadcast = FilesystemBroadcast()
        if self.weight_broadcast.type == "nccl" and self.model.lora is not None:
            faults.append(("weight_broadcast.type", "'nccl' does not work with model.lora; use 'filesystem'"))
        return [*faults, *weights_arrive(self.inference, self.weight_broadcast)]

    def online_eval(
        self, run_dir: Path | str, base_url: str | None, engines: list[str] | None = None
    ) -> OnlineEvalProcessConfig:
        """What the online evaluation's process needs to know; `base_url` of the inference server, and the URLs of its
        engines where that is a router."""
        served = self.inference.vllm.served_model_name or self.model.name
        adapter = adapter_name(self.model.lora.rank, self.model.lora.alpha) if self.model.lora else None
        return OnlineEvalProcessConfig(
            model={
                "name": served,
                "client": {"base_url": base_url, "admin_base_url": engines},
                "lora": None if adapter is None else {"name": adapter},
            },
            tokenizer=self.tokenizer,
            renderer=self.renderer,
            eval=self.eval,
            max_steps=self.max_steps,
            resume=self.resume,
            weight_broadcast=self.weight_broadcast,
            seed=self.seed,
            log={"level": self.log.level, "json_logging": self.log.json_logging, "vf_level": self.log.vf_level},
            monitors=self.monitors,
            run=self.run,
            output_dir=str(run_dir),
            env_vars=self.env_vars,
        )

    def reclassified(self) -> dict[str, FieldClass]:
        fields = self.horizon_classes()
        if self.deterministic:
            cut = (*CUT_OF_WORK, "data.micro_batch_size", *world_fields(self.deployment))
            fields |= dict.fromkeys(cut, "semantic")
        return fields

    def placed(self, run_dir: Path | str, name: str) -> "SFTConfig":
        """A copy whose processes know the run: `output_dir` is the run directory, `run.name` its name."""
        config = self.model_copy(deep=True)
        for part in (config, config.inference):
            if part is not None:
                part.run, part.output_dir = RunConfig(name=name, dir=config.run.dir), str(run_dir)
        return config

    def auto_name(self, short_id: str) -> str:
        """A name for a run that was given none."""
        name = self.data.name if self.data.type == "sft" else "fake"
        return auto_name([name.rstrip("/").rpartition("/")[2]], self.model.name, short_id)
