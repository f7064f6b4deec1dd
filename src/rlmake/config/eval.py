"""Configuration of an evaluation. A suite file of the build is one without a model."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, model_validator

from rlmake.config.deployment import EvalDeployment
from rlmake.config.fields import Config, FieldClass, dump, group, runtime, semantic
from rlmake.config.inference import InferenceConfig
from rlmake.config.names import auto_name
from rlmake.config.refused import Refused, require_step
from rlmake.config.renderer import RendererConfig
from rlmake.config.rl_checks import completions_fit, engines_fit, same_port, standing_alone
from rlmake.config.sampling import EvalSamplingConfig
from rlmake.config.shared import (
    ClientConfig,
    ComponentLogConfig,
    ConcurrencyConfig,
    EnvVars,
    MonitorsConfig,
    RunConfig,
    SlurmConfig,
    TokenizerConfig,
    check_env_vars,
    default_output_dir,
)
from rlmake.config.sources import EvalSource, SelectConfig, inherit, name_faults
from rlmake.config.spread import SharingConfig, Spreader, as_int, get, is_null, put_device, put_server


class EvalConcurrencyConfig(ConcurrencyConfig):
    """Bounds of the number of episodes in flight; equal bounds pin it."""

    min_inflight: int | None = runtime(None, "Fewest episodes in flight; max_inflight when absent: pinned.", ge=1)
    max_inflight: int | None = runtime(128, "Most episodes in flight; no bound when None.", ge=1)

    @model_validator(mode="after")
    def _pin(self):
        if self.min_inflight is None:
            self.min_inflight = self.max_inflight or 1
        return self


class EvalCkptConfig(Config):
    """Cursor checkpoints of an evaluation."""

    interval: int = runtime(1, "Groups (a task's samples) between checkpoints.", ge=1)
    keep_last: int | None = runtime(1, "How many of the newest to keep; all when None.", ge=1)


class EvalResumeConfig(Config):
    """Resuming an evaluation; an empty table keeps all that has ended well."""

    step: int | None = runtime(None, "Checkpoint to go back to; all that has ended when absent.", ge=1)
    dir: str | None = runtime(None, "Another evaluation's `…/checkpoints/step_<n>` to go on from.")
    skip_checks: bool = runtime(False, "Go on although what is evaluated differs.")

    @model_validator(mode="after")
    def _one(self):
        if self.step is not None and self.dir is not None:
            raise Refused([("step", "give either step or dir, not both")])
        require_step("dir", self.dir)
        return self


class EvalConfig(SharingConfig):
    """An evaluation (`eval`)."""

    entry: ClassVar[str | None] = "eval"

    model: str | None = semantic(
        None,
        "Hub id, directory, target, or the name under which the server knows it; absent in a suite.",
        validation_alias=AliasChoices("model", "m"),
    )
    tokenizer: TokenizerConfig = group(TokenizerConfig, "Tokenizer.")
    renderer: RendererConfig = group(RendererConfig(), "Renderer of messages.")
    sampling: EvalSamplingConfig = semantic(EvalSamplingConfig, "Sampling.", shared=True)
    select: SelectConfig = semantic(SelectConfig, "Which tasks of each source.", shared=True)
    group_size: int = semantic(
        1, "Episodes per task.", ge=1, shared=True, validation_alias=AliasChoices("group_size", "r")
    )
    source: list[EvalSource] = semantic(list, "Environments to evaluate on.")
    concurrency: EvalConcurrencyConfig = group(EvalConcurrencyConfig, "Episodes in flight.")
    inference: InferenceConfig | None = semantic(None, "Start a server for the model; without it client.base_url.")
    deployment: EvalDeployment = group(EvalDeployment, "Placement of the started server.")
    client: ClientConfig = group(ClientConfig, "How to reach the server.")
    seed: int = semantic(0, "Seed of everything random.", ge=0)
    deterministic: bool | Literal["auto"] = semantic("auto", "Same configuration, same bytes; auto: on the CPU.")
    log: ComponentLogConfig = group(ComponentLogConfig, "Logging.")
    monitors: MonitorsConfig = group(MonitorsConfig, "Monitors.")
    run: RunConfig = group(RunConfig, "Name and directory.")
    output_dir: str = runtime(default_output_dir, "Folder of runs.", validation_alias=AliasChoices("output_dir", "o"))
    ckpt: EvalCkptConfig | None = runtime(EvalCkptConfig(), "Cursor checkpoints; on by default.")
    resume: EvalResumeConfig | None = runtime(None, "Go on with an evaluation that was stopped or had failures.")
    clean: bool = runtime(False, "Wipe the run directory before the start.")
    dashboard: bool = runtime(True, "From a terminal: start the user's dashboard if none runs, and say where it is.")
    dry_run: bool = runtime(False, "Validate, write the resolved configuration, start nothing.")
    slurm: SlurmConfig | None = runtime(None, "Submit to SLURM.")
    env_vars: EnvVars = runtime(dict, "Environment variables of all processes.")

    @classmethod
    def spread(cls, data: dict[str, Any]) -> Spreader:
        """Fill the inference server's raw table."""
        spreader = Spreader(data)
        managed = isinstance(data.get("inference"), dict)
        if data.get("deterministic", "auto") == "auto":
            infer_gpus = as_int(get(data, "deployment.num_infer_gpus"), 1)
            given = get(data, "inference.deterministic", "auto")
            data["deterministic"] = given if given != "auto" else managed and infer_gpus == 0
        if managed:
            model = next((data[key] for key in ("model", "m") if not is_null(data.get(key))), None)
            if model is not None:
                spreader.put("inference.vllm.model", model, "model")
            data.setdefault("seed", get(data, "inference.seed", 0))
            for key in ("seed", "deterministic", "env_vars"):
                spreader.share(key, f"inference.{key}")
            spreader.share("tokenizer.chat_template", "inference.vllm.chat_template")
            put_device(spreader, "inference", "num_infer_gpus")
            put_server(spreader, "client")
        return spreader

    @model_validator(mode="after")
    def _resolve(self):
        if not self.source:
            raise Refused(("source", "needs at least one source"))
        for source in self.source:
            inherit(source, {key: getattr(self, key) for key in ("sampling", "select", "group_size")})
        if self.tokenizer.name is None:
            self.tokenizer.name = self.model
        faults = [*name_faults(self.source), *standing_alone(self.inference)]
        faults += engines_fit(self.inference, self.deployment.num_infer_gpus, "deployment.num_infer_gpus")
        faults += same_port(self.inference, self.client.base_url, "client.base_url")
        if faults := [*faults, *completions_fit(self.inference, self.source)]:
            raise Refused(faults)
        check_env_vars(self.env_vars)
        return self

    def reclassified(self) -> dict[str, FieldClass]:
        return {"deployment.cpu_threads": "semantic"} if self.deterministic else {}

    def with_model(self, model: str) -> "EvalConfig":
        """A suite applied to a model: hub id, directory, or the name under which a server elsewhere knows it."""
        data = dump(self)
        data["model"] = model
        data["tokenizer"]["name"] = data["tokenizer"]["name"] or model
        if data["inference"] is not None:
            del data["inference"]["vllm"]["model"]
        return EvalConfig.model_validate(data)

    def placed(self, run_dir: Path | str, name: str) -> "EvalConfig":
        """A copy whose processes know the run: `output_dir` is the run directory, `run.name` its name."""
        config = self.model_copy(deep=True)
        for part in (config, config.inference):
            if part is not None:
                part.run, part.output_dir = RunConfig(name=name, dir=config.run.dir), str(run_dir)
        return config

    def auto_name(self, short_id: str) -> str:
        """A name for an evaluation that was given none."""
        return auto_name([source.taskset_id for source in self.source], self.model, short_id)


def ks(group_size: int) -> list[int]:
    """The k for which pass@k is given: powers of two up to the group size, and the group size."""
    return sorted({2**n for n in range(group_size.bit_length()) if 2**n <= group_size} | {group_size})


def numbers(group_size: int) -> list[str]:
    """The numbers of an environment in report.json by which checkpoints can be compared; `reward` is its mean."""
    k = ks(group_size)
    scores = [f"avg@{group_size}", *(f"pass@{n}" for n in k), *(f"pass^{n}" for n in k)]
    return ["reward", *scores, "truncated", "failed", "timeouts", "output_tokens"]
