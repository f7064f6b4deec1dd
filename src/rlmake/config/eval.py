"""Configuration of an evaluation. A suite file of the build is one without a model."""

from typing import ClassVar, Literal

from pydantic import AliasChoices, model_validator

from rlmake.config.deployment import EvalDeployment
from rlmake.config.fields import Config, FieldClass, group, runtime, semantic
from rlmake.config.inference import InferenceConfig
from rlmake.config.refused import Refused
from rlmake.config.renderer import RendererConfig
from rlmake.config.sampling import EvalSamplingConfig
from rlmake.config.shared import (
    ClientConfig,
    ComponentLogConfig,
    ConcurrencyConfig,
    EnvVars,
    MonitorsConfig,
    RunConfig,
    TokenizerConfig,
    check_env_vars,
    default_output_dir,
)
from rlmake.config.sources import EvalSource, SelectConfig, inherit, name_faults


class EvalCkptConfig(Config):
    """How often finished groups are recorded."""

    interval: int = runtime(1, "Finished groups between records.", ge=1)
    keep_last: int | None = runtime(1, "Records to keep; all when None.", ge=1)


class EvalResumeConfig(Config):
    """Resuming an evaluation."""

    skip_checks: bool = runtime(False, "Resume although the configuration differs.")


class EvalConfig(Config):
    """An evaluation (`eval`)."""

    entry: ClassVar[str | None] = "eval"

    model: str | None = semantic(
        None,
        "Hub id, directory, target, or the name under which the server knows it; absent in a suite.",
        validation_alias=AliasChoices("model", "m"),
    )
    tokenizer: TokenizerConfig = group(TokenizerConfig, "Tokenizer.")
    renderer: RendererConfig = group(RendererConfig(), "Renderer of messages.")
    source: list[EvalSource] = semantic(list, "Environments to evaluate on.")
    sampling: EvalSamplingConfig = semantic(EvalSamplingConfig, "Sampling.", shared=True)
    select: SelectConfig = semantic(SelectConfig, "Which tasks of each source.", shared=True)
    group_size: int = semantic(
        1, "Episodes per task.", ge=1, shared=True, validation_alias=AliasChoices("group_size", "r")
    )
    concurrency: ConcurrencyConfig = group(ConcurrencyConfig(min_inflight=1, max_inflight=128), "Episodes in flight.")
    inference: InferenceConfig | None = semantic(None, "Start a server for the model; without it client.base_url.")
    deployment: EvalDeployment = group(EvalDeployment, "Placement of the started server.")
    client: ClientConfig = group(ClientConfig, "How to reach the server.")
    seed: int = semantic(0, "Seed of everything random.", ge=0)
    deterministic: bool | Literal["auto"] = semantic("auto", "Same configuration, same bytes; auto: on the CPU.")
    ckpt: EvalCkptConfig = group(EvalCkptConfig, "Records for resuming.")
    resume: EvalResumeConfig | None = runtime(None, "Resume.")
    log: ComponentLogConfig = group(ComponentLogConfig, "Logging.")
    monitors: MonitorsConfig = group(MonitorsConfig, "Monitors.")
    run: RunConfig = group(RunConfig, "Name and directory.")
    output_dir: str = runtime(default_output_dir, "Folder of runs.", validation_alias=AliasChoices("output_dir", "o"))
    clean: bool = runtime(False, "Wipe the run directory before the start.")
    dashboard: bool = runtime(True, "Show the run in the dashboard.")
    dry_run: bool = runtime(False, "Validate, write the resolved configuration, start nothing.")
    env_vars: EnvVars = runtime(dict, "Environment variables of all processes.")

    @model_validator(mode="after")
    def _resolve(self):
        on_cpu = self.inference is not None and self.deployment.num_infer_gpus == 0
        if self.deterministic == "auto":
            self.deterministic = on_cpu
        if not self.source:
            raise Refused(("source", "needs at least one source"))
        for source in self.source:
            inherit(source, {key: getattr(self, key) for key in ("sampling", "select", "group_size")})
        if self.tokenizer.name is None:
            self.tokenizer.name = self.model
        if faults := name_faults(self.source):
            raise Refused(faults)
        check_env_vars(self.env_vars)
        return self

    def reclassified(self) -> dict[str, FieldClass]:
        return {"deployment.cpu_threads": "semantic"} if self.deterministic else {}
