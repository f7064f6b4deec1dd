"""Algorithms: where rollouts come from and which signal their tokens get; `type` names the algorithm."""

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import Field, create_model, model_validator

from rlmake.config.fields import Config, group, runtime, semantic
from rlmake.config.refused import Refused, require_url
from rlmake.config.renderer import RendererConfig


class FrozenModel(Config):
    """A model that does not train. Without `base_url` the launcher serves it beside an embedded policy."""

    name: str = semantic(..., "Name under which its server knows it; without base_url a directory or target.")
    base_url: str | None = runtime(None, "URL of its server, with /v1; absent: served by the launcher, on the CPU.")
    api_key_var: str = runtime("VLLM_API_KEY", "Environment variable that holds the key.")

    @model_validator(mode="after")
    def _url(self):
        require_url("base_url", self.base_url)
        return self


class AlgoSampling(Config):
    """Who generates the rollouts."""

    source: Literal["policy"] | FrozenModel = semantic("policy", "'policy', or a table that names a frozen model.")


class _Algo(Config):
    signal: ClassVar[Literal["rl", "ce", "ref_kl"]] = "rl"
    sampling: AlgoSampling = group(AlgoSampling, "Who generates the rollouts.")

    @model_validator(mode="after")
    def _source(self):
        frozen = isinstance(self.sampling.source, FrozenModel)
        if self.signal in ("rl", "ref_kl") and frozen:
            raise Refused(("sampling.source", f"'{self.type}' must sample from the live policy"))
        if self.signal == "ce" and not frozen:
            raise Refused(("sampling.source", f"'{self.type}' needs a frozen model: a table with name and base_url"))
        return self


class LengthPenalty(Config):
    """Linear penalty on output tokens, input tokens and turns, each relative to the group's largest."""

    type: Literal["linear"] = semantic("linear", "Kind of penalty.")
    num_output_tokens_weight: float = semantic(0.25, "Weight of generated tokens.", ge=0)
    num_input_tokens_weight: float = semantic(0.1, "Weight of all other tokens.", ge=0)
    num_turns_weight: float = semantic(0.1, "Weight of turns.", ge=0)


class GRPOConfig(_Algo):
    """Reward minus the mean of its group."""

    type: Literal["grpo"] = semantic("grpo", "Algorithm.")
    length_penalty: LengthPenalty | None = semantic(None, "Penalty on length.")
    length_weighted_baseline: bool = semantic(False, "Weight the baseline by trainable tokens.")
    loss_aggregation: Literal["token", "prompt"] = semantic("token", "Weigh every token alike, or every group alike.")


def without_options(name: str, doc: str, signal: Literal["rl", "ce", "ref_kl"] = "rl") -> type[_Algo]:
    """The table of an algorithm that has no options of its own. `signal`: where its sampled tokens go."""
    kind = (Literal[name], semantic(name, "Algorithm."))  # type: ignore[valid-type]
    table = create_model(f"{name.title().replace('_', '')}Config", __base__=_Algo, __doc__=doc, type=kind)
    table.signal = signal
    return table


MaxRLConfig = without_options("max_rl", "Reward minus the mean of its group, divided by that mean.")


class RAEConfig(_Algo):
    """Reward minus a running baseline for each agent of an environment."""

    type: Literal["rae"] = semantic("rae", "Algorithm.")
    decay: float = semantic(0.95, "Decay of the baseline.", ge=0, lt=1)


class HierarchicalGRPOConfig(_Algo):
    """GRPO for proposer–solver environments: solvers compare with attempts at the same proposal."""

    type: Literal["hierarchical_grpo"] = semantic("hierarchical_grpo", "Algorithm.")
    episode_agents: list[str] = semantic(..., "Agents that compare within their own episode.", min_length=1)


class EchoRole(Config):
    """Weight of one role's observation tokens."""

    alpha: float = semantic(..., "Cross-entropy weight of the role's tokens.", gt=0)


class CustomFunction(Config):
    """A function of the user's."""

    import_path: str = semantic(..., "`package.module.function` or `file.py:function`.")
    kwargs: dict[str, Any] = semantic(dict, "Keyword arguments of the function.")


class EchoConfig(_Algo):
    """GRPO, plus cross-entropy on tokens that the environment wrote."""

    type: Literal["echo"] = semantic("echo", "Algorithm.")
    length_penalty: LengthPenalty | None = semantic(None, "Penalty on length.")
    length_weighted_baseline: bool = semantic(False, "Weight the baseline by trainable tokens.")
    loss_aggregation: Literal["token", "prompt"] = semantic("token", "Weigh every token alike, or every group alike.")
    roles: dict[Literal["system", "user", "assistant", "tool"], EchoRole] = semantic(
        lambda: {"tool": EchoRole(alpha=0.1)}, "Weight by role; giving any role replaces the table."
    )
    filter: CustomFunction | None = semantic(None, "Narrows which observation tokens train.")


class OPDConfig(_Algo):
    """On-policy distillation: reverse KL to a frozen teacher on the policy's own rollouts."""

    signal: ClassVar = "ref_kl"
    type: Literal["opd"] = semantic("opd", "Algorithm.")
    teacher: FrozenModel = group(..., "The frozen model to distil.")


class OPSDConfig(_Algo):
    """Self-distillation: reverse KL to the live policy that sees a demonstration."""

    signal: ClassVar = "ref_kl"
    type: Literal["opsd"] = semantic("opsd", "Algorithm.")
    demo_key: str = semantic("demonstration", "Field of the task that holds the demonstration.")
    template: str = semantic(
        "Here is a worked example of a good answer.\n<demonstration>\n{demonstration}\n</demonstration>",
        "System message that shows the demonstration.",
    )
    renderer: RendererConfig = group(RendererConfig(), "Renderer of the hint.")

    @model_validator(mode="after")
    def _shows_it(self):
        if "{demonstration}" not in self.template:
            raise Refused(("template", "has no place for the demonstration: write {demonstration} where it belongs"))
        return self


class SFTAlgoConfig(_Algo):
    """Hard distillation: cross-entropy on the tokens of a frozen model."""

    signal: ClassVar = "ce"
    type: Literal["sft"] = semantic("sft", "Algorithm.")


# The registry. `type` also names the algorithm's module in rlmake.algorithms. One without options is a line of its own:
# `without_options("name", "What it does.")`.
ALGORITHMS = (
    GRPOConfig,
    MaxRLConfig,
    RAEConfig,
    HierarchicalGRPOConfig,
    EchoConfig,
    OPDConfig,
    OPSDConfig,
    SFTAlgoConfig,
)
Algo = Annotated[Union[ALGORITHMS], Field(discriminator="type")]  # noqa: UP007 - a union of what stands in the registry
