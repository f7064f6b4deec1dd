"""Configuration of the orchestrator."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from rlmake.config.algo import Algo, FrozenModel, GRPOConfig
from rlmake.config.fields import OFFSETS, Config, FieldClass, group, horizon, runtime, semantic
from rlmake.config.refused import Refused
from rlmake.config.renderer import RendererConfig, resolve_auto
from rlmake.config.sampling import EvalSamplingConfig, TrainSamplingConfig, training_faults
from rlmake.config.shared import (
    ClientConfig,
    ComponentLogConfig,
    ConcurrencyConfig,
    EnvVars,
    FilesystemBroadcast,
    FilesystemTransport,
    MonitorsConfig,
    OrchestratorCkptConfig,
    ResumeConfig,
    RolloutTransport,
    RunConfig,
    TokenizerConfig,
    WeightBroadcast,
    check_env_vars,
)
from rlmake.config.sources import OnlineEvalSource, SelectConfig, TrainSource, inherit, name_faults
from rlmake.config.spread import get

DEFAULT_BATCH_SIZE = 128


class AdapterConfig(Config):
    """The adapter that is sampled from, as the trainer sends it."""

    name: str = runtime(..., "Its name at the inference server.")


class OrchestratorModelConfig(Config):
    """The policy, as the inference server serves it."""

    name: str = semantic("Qwen/Qwen3-0.6B", "Hub id, directory, or target of the build.")
    client: ClientConfig = group(ClientConfig, "How to reach the server.")
    lora: AdapterConfig | None = runtime(None, "The trainer trains an adapter; derived from trainer.model.lora.")


class TrainConfig(Config):
    """Sources of training rollouts, and what they share."""

    group_size: int = semantic(1, "Rollouts per task.", ge=1, shared=True)
    sampling: TrainSamplingConfig = semantic(TrainSamplingConfig, "Sampling.", shared=True)
    algo: Algo = semantic(GRPOConfig(), "Algorithm.", shared=True)
    source: list[TrainSource] = semantic(list, "Environments to train on.")

    @model_validator(mode="before")
    @classmethod
    def _algo_type(cls, data: Any) -> Any:
        """A source's `algo` without a `type` changes options of the shared algorithm."""
        if isinstance(data, dict) and isinstance(data.get("source"), list):
            kind = get(data, "algo.type", "grpo")
            for source in data["source"]:
                if isinstance(source, dict) and isinstance(source.get("algo"), dict):
                    source["algo"].setdefault("type", kind)
        return data

    @model_validator(mode="after")
    def _share(self):
        own = [s.sampling is not None and "extra_body" in s.sampling.model_fields_set for s in self.source]
        for source in self.source:
            inherit(source, {"group_size": self.group_size, "algo": self.algo, "sampling": self.sampling})
        faults = name_faults(self.source)
        for index, source in enumerate(self.source):
            place = f"source.{index}.sampling.extra_body" if own[index] else "sampling.extra_body"
            tables = {place: source.sampling.extra_body, f"source.{index}.env.agent.sampling": source.agent_sampling()}
            for key, table in tables.items():
                found = training_faults(table, policy=source.algo.signal != "ce")
                faults += [fault for name, text in found if (fault := (f"{key}.{name}", text)) not in faults]
        # Algorithms of the rl component without the option weigh every token alike.
        aggregations = {
            getattr(source.algo, "loss_aggregation", "token") for source in self.source if source.algo.signal == "rl"
        }
        if len(aggregations) > 1:
            faults.append(("source", "all sources must share algo.loss_aggregation"))
        if faults:
            raise Refused(faults)
        return self


class OnlineEvalConfig(Config):
    """Evaluations while the run goes on."""

    sampling: EvalSamplingConfig = semantic(EvalSamplingConfig, "Sampling.", shared=True)
    select: SelectConfig = semantic(SelectConfig, "Which tasks of each source.", shared=True)
    group_size: int = semantic(1, "Episodes per task.", ge=1, shared=True)
    interval: int = semantic(100, "Steps between evaluations.", ge=1, shared=True)
    skip_first_step: bool = semantic(False, "Do not evaluate before the first step.")
    retrigger_on_resume: bool = runtime(False, "Evaluate the version that a resume starts from.")
    source: list[OnlineEvalSource] = semantic(list, "Environments to evaluate on.")

    @model_validator(mode="after")
    def _share(self):
        if not self.source:
            raise Refused(("source", 'needs at least one source; eval = "None" in its table does without evaluation'))
        shared = ("sampling", "select", "group_size", "interval")
        for source in self.source:
            inherit(source, {key: getattr(self, key) for key in shared})
        if faults := name_faults(self.source):
            raise Refused(faults)
        return self


class OrchestratorConfig(Config):
    """The orchestrator (`orchestrator`)."""

    entry: ClassVar[str | None] = "orchestrator"

    model: OrchestratorModelConfig = group(OrchestratorModelConfig, "The policy.")
    tokenizer: TokenizerConfig = group(TokenizerConfig, "Tokenizer.")
    renderer: RendererConfig = group(RendererConfig(), "Renderer of messages.")
    train: TrainConfig = group(TrainConfig, "Training rollouts.")
    eval: OnlineEvalConfig | None = semantic(None, "Evaluations while the run goes on.")
    batch_size: int | None = semantic(None, "Rollouts per step; 128 when token_batch_size is absent too.", ge=1)
    token_batch_size: int | None = semantic(None, "Tokens per step, in place of batch_size.", ge=1)
    seq_len: int = semantic(2048, "Longest rollout in tokens.", ge=2, le=OFFSETS)
    max_steps: int | None = horizon(None, "Last step; endless when absent.", ge=1)
    max_off_policy_steps: int = semantic(8, "Versions by which a trained rollout may be older than the policy.", ge=0)
    lag: int = semantic(0, "Deterministic mode: versions by which collection runs behind training.", ge=0)
    constant_trainer_batch_size: bool = semantic(True, "Replace rollouts without a training signal.")
    num_train_workers: int = runtime(1, "Data-parallel ranks of the trainer.", ge=1)
    pad_to_multiple_of: int = runtime(1, "Rows are padded to a multiple of this.", ge=1)
    tasks_per_minute: int | None = runtime(None, "Most tasks started per minute.", ge=1)
    concurrency: ConcurrencyConfig = group(ConcurrencyConfig, "Episodes in flight.")
    collect_inference_metrics: bool = runtime(True, "Read the engines' own metrics.")
    ckpt: OrchestratorCkptConfig | None = horizon(None, "Save checkpoints.")
    resume: ResumeConfig | None = runtime(None, "Resume.")
    weight_broadcast: WeightBroadcast = group(FilesystemBroadcast(), "How new weights reach the engines.")
    rollout_transport: RolloutTransport = group(FilesystemTransport(), "How batches reach the trainer.")
    seed: int = semantic(0, "Seed of everything random.", ge=0)
    deterministic: bool | Literal["auto"] = semantic("auto", "Same configuration, same bytes; auto: false.")
    log: ComponentLogConfig = group(ComponentLogConfig, "Logging.")
    monitors: MonitorsConfig = group(MonitorsConfig, "Monitors.")
    run: RunConfig = group(RunConfig, "Name and directory.")
    output_dir: str | None = runtime(None, "Run directory.")
    env_vars: EnvVars = runtime(dict, "Environment variables of the process.")

    @model_validator(mode="after")
    def _resolve(self):
        if self.deterministic == "auto":
            self.deterministic = False
        if self.tokenizer.name is None:
            self.tokenizer.name = self.model.name
        if self.batch_size is None and self.token_batch_size is None:
            self.batch_size = DEFAULT_BATCH_SIZE
        check_env_vars(self.env_vars)
        faults = self._faults()
        name = resolve_auto(self.renderer, self.tokenizer.name)
        if name is None:
            faults.append(
                ("renderer.name", f"'auto' knows hub ids only, not '{self.tokenizer.name}': name the renderer")
            )
        else:
            self.renderer.name = name
        if faults:
            raise Refused(faults)
        return self

    def _faults(self) -> list[tuple[str, str]]:
        faults = []
        sizes = {source.name: source.group_size for source in self.train.source} or {"": self.train.group_size}
        if self.batch_size is not None and self.token_batch_size is not None:
            faults.append(("batch_size", "give either batch_size or token_batch_size, not both"))
        elif self.batch_size is not None:
            bad = [size for size in sorted(set(sizes.values())) if self.batch_size % size]
            faults += [("batch_size", f"{self.batch_size} is not a multiple of group_size = {size}") for size in bad]
        if self.deterministic and self.lag > self.max_off_policy_steps:
            bound = f"max_off_policy_steps = {self.max_off_policy_steps}"
            faults.append(("lag", f"{self.lag} is beyond {bound}: every rollout would be too old to train"))
        largest = max(sizes.values())
        for key in ("max_inflight", "initial_inflight"):
            value = getattr(self.concurrency, key)
            if value is not None and value < largest:
                faults.append((f"concurrency.{key}", f"{value} is below the largest group_size = {largest}"))
        return faults

    def frozen_models(self) -> list[tuple[str, FrozenModel]]:
        """`(key, model)` of the frozen models that the sources use, keys relative to this table."""
        tables = [(f"train.source.{index}.algo", source.algo) for index, source in enumerate(self.train.source)]
        tables.insert(0, ("train.algo", self.train.algo))
        found = []
        for key, algo in tables:
            for part, model in (("sampling.source", algo.sampling.source), ("teacher", getattr(algo, "teacher", None))):
                if isinstance(model, FrozenModel):
                    found.append((f"{key}.{part}", model))
        return found

    def warnings(self) -> list[str]:
        """What is allowed, and hardly meant."""
        compared = [s for s in self.train.source if s.group_size == 1 and s.algo.type in ("grpo", "max_rl")]
        idle = [f"orchestrator.lag = {self.lag} counts with orchestrator.deterministic = true alone"]
        return (
            (idle if self.lag and not self.deterministic else [])
            + [
                f"orchestrator.train: source '{source.name}' has group_size = 1, and '{source.algo.type}' compares the "
                "rollouts of a group: every advantage is zero, nothing will be trained"
                for source in compared
            ]
            + [
                f"orchestrator.train: source '{source.name}' has curriculum.gates, and '{source.algo.type}' gives no "
                "advantage to reject: they admit every group"
                for source in self.train.source
                if source.curriculum.gates and source.algo.signal != "rl"
            ]
        )

    def reclassified(self) -> dict[str, FieldClass]:
        """`lag` counts in deterministic mode alone, which leaves no place for the staleness bound and other pacing."""
        if self.deterministic:
            return {"num_train_workers": "semantic", "pad_to_multiple_of": "semantic"}
        return {"lag": "runtime"}
