"""Configuration of a model made from nothing (kind `init`)."""

from typing import ClassVar, Literal

from pydantic import model_validator

from rlmake.config.fields import Config, group, semantic
from rlmake.config.refused import Refused


class ArchitectureConfig(Config):
    """The architecture, by the names of its Hugging Face configuration."""

    model_type: Literal["qwen3"] = semantic("qwen3", "Architecture.")
    hidden_size: int = semantic(128, "Width.", ge=1)
    num_hidden_layers: int = semantic(2, "Layers.", ge=1)
    num_attention_heads: int = semantic(4, "Query heads.", ge=1)
    num_key_value_heads: int = semantic(2, "Key and value heads.", ge=1)
    head_dim: int = semantic(32, "Width of a head.", ge=2)
    intermediate_size: int = semantic(384, "Width of the MLP.", ge=1)
    max_position_embeddings: int = semantic(2048, "Longest sequence.", ge=2)
    tie_word_embeddings: bool = semantic(True, "One matrix for embedding and head.")
    rope_theta: float = semantic(10000.0, "Base of the rotary embedding.", gt=0)
    rms_norm_eps: float = semantic(1e-6, "Added to the mean square in the norms.", gt=0)
    initializer_range: float = semantic(0.02, "Standard deviation of the first weights.", gt=0)

    @model_validator(mode="after")
    def _heads(self):
        faults = []
        if self.num_attention_heads % self.num_key_value_heads:
            faults.append(
                (
                    "num_attention_heads",
                    f"{self.num_attention_heads} is not a multiple of num_key_value_heads = {self.num_key_value_heads}",
                )
            )
        if self.head_dim % 2:
            faults.append(("head_dim", f"must be even, not {self.head_dim}"))
        if faults:
            raise Refused(faults)
        return self


class InitTokenizerConfig(Config):
    """A byte-level BPE tokenizer with the ChatML markers, trained on text."""

    vocab_size: int = semantic(1024, "Size of the vocabulary, markers included.", ge=265)
    text: str | list[str] = semantic(..., "What it is trained on: files or a data target.")


class InitConfig(Config):
    """A model with random weights (kind `init`)."""

    entry: ClassVar[str | None] = "init"

    architecture: ArchitectureConfig = group(ArchitectureConfig, "The architecture.")
    tokenizer: InitTokenizerConfig = group(..., "The tokenizer.")
    dtype: Literal["float32", "bfloat16"] = semantic("bfloat16", "Type of the saved weights.")
    seed: int = semantic(0, "Seed of the weights.", ge=0)
