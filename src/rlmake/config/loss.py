"""The rl component of the loss. The ce and ref_kl components are fixed."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlmake.config.fields import Config, semantic
from rlmake.config.refused import Refused


class IPOConfig(Config):
    """Importance-weighted policy gradient in a trust region: tokens with |π − μ| > eps are masked."""

    type: Literal["ipo"] = semantic("ipo", "Loss.")
    eps: float = semantic(0.3, "Largest difference of probability that still trains.", gt=0, le=1)
    adv_tau: float = semantic(1.0, "Factor on the advantage.", gt=0)
    max_importance_ratio: float = semantic(1e4, "Cap on the importance ratio's value; its gradient stays.", gt=0)
    kl_tau: float = semantic(0.0, "Weight of the squared log ratio on all tokens.", ge=0)


class IcePopConfig(Config):
    """Only tokens whose importance ratio lies inside the band train."""

    type: Literal["icepop"] = semantic("icepop", "Loss.")
    ratio_low: float = semantic(0.2, "Lower end of the band.", gt=0)
    ratio_high: float = semantic(5.0, "Upper end of the band.", gt=0)
    adv_tau: float = semantic(1.0, "Factor on the advantage.", gt=0)

    @model_validator(mode="after")
    def _ordered(self):
        if self.ratio_low >= self.ratio_high:
            raise Refused(("ratio_low", f"must be below ratio_high = {self.ratio_high}, not {self.ratio_low}"))
        return self


class PPOConfig(Config):
    """Clipped surrogate of PPO."""

    type: Literal["ppo"] = semantic("ppo", "Loss.")
    clip_low: float = semantic(0.2, "The ratio is clipped from below at 1 − clip_low.", ge=0, le=1)
    clip_high: float = semantic(0.2, "The ratio is clipped from above at 1 + clip_high.", ge=0)
    adv_tau: float = semantic(1.0, "Factor on the advantage.", gt=0)
    max_importance_ratio: float = semantic(1e4, "Cap on the importance ratio.", gt=0)


class CISPOConfig(Config):
    """Clipped importance weight on the log-likelihood gradient; no token is dropped."""

    type: Literal["cispo"] = semantic("cispo", "Loss.")
    ratio_low: float = semantic(0.0, "Lower clip of the weight; 0: off.", ge=0)
    ratio_high: float = semantic(5.0, "Upper clip of the weight.", gt=0)
    adv_tau: float = semantic(1.0, "Factor on the advantage.", gt=0)


class CustomLossConfig(Config):
    """A function of the user's: `fn(LossInputs, **kwargs) -> LossOutputs`."""

    type: Literal["custom"] = semantic("custom", "Loss.")
    import_path: str = semantic(..., "`package.module.function` or `file.py:function`.")
    kwargs: dict[str, Any] = semantic(dict, "Keyword arguments of the function.")


Loss = Annotated[IPOConfig | IcePopConfig | PPOConfig | CISPOConfig | CustomLossConfig, Field(discriminator="type")]
