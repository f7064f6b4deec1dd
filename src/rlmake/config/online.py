"""Configuration of SFT's online evaluation: the `[eval]` table, and the process that carries it out."""

from typing import ClassVar

from rlmake.config.fields import Config, group, horizon, runtime, semantic
from rlmake.config.orchestrator import OnlineEvalConfig, OrchestratorModelConfig
from rlmake.config.renderer import RendererConfig
from rlmake.config.shared import (
    ComponentLogConfig,
    ConcurrencyConfig,
    EnvVars,
    FilesystemBroadcast,
    MonitorsConfig,
    ResumeConfig,
    RunConfig,
    TokenizerConfig,
    WeightBroadcast,
)


class SFTEvalConfig(OnlineEvalConfig):
    """Evaluations while SFT goes on; as `orchestrator.eval`, and how its own process behaves."""

    concurrency: ConcurrencyConfig = group(ConcurrencyConfig, "Episodes in flight.")
    cancel_on_new_checkpoint: bool = runtime(
        True, "Give up episodes in flight when newer weights are ready; false: the trainer waits for them."
    )


class OnlineEvalProcessConfig(Config):
    """The online evaluation's process, beside an SFT trainer; written by the launcher."""

    entry: ClassVar[str | None] = "online-eval"

    model: OrchestratorModelConfig = group(OrchestratorModelConfig, "The policy.")
    tokenizer: TokenizerConfig = group(TokenizerConfig, "Tokenizer.")
    renderer: RendererConfig = group(RendererConfig(), "Renderer of messages.")
    eval: SFTEvalConfig = semantic(..., "Evaluations while training.")
    max_steps: int | None = horizon(None, "Last step; endless when absent.", ge=1)
    resume: ResumeConfig | None = runtime(None, "Resume.")
    weight_broadcast: WeightBroadcast = group(FilesystemBroadcast(), "How new weights reach the engines.")
    seed: int = semantic(0, "Seed of everything random.", ge=0)
    log: ComponentLogConfig = group(ComponentLogConfig, "Logging.")
    monitors: MonitorsConfig = group(MonitorsConfig, "Monitors.")
    run: RunConfig = group(RunConfig, "Name and directory.")
    output_dir: str | None = runtime(None, "Run directory.")
    env_vars: EnvVars = runtime(dict, "Environment variables of the process.")
