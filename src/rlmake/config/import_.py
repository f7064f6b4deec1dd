"""Configuration of a model brought in from elsewhere (kind `import`)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlmake.config.fields import Config, group, runtime, semantic


class HubSource(Config):
    """A Hugging Face model at a pinned revision."""

    type: Literal["hub"] = semantic("hub", "Source.")
    id: str = semantic(..., "Hub id, `owner/name`.", pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str = semantic(..., "Commit, 40 hex digits.", pattern=r"^[0-9a-f]{40}$")


class LocalSource(Config):
    """A directory in Hugging Face layout."""

    type: Literal["local"] = semantic("local", "Source.")
    path: str = semantic(..., "Directory, or target of the build.")


class GgufSource(Config):
    """A GGUF file, dequantised."""

    type: Literal["gguf"] = semantic("gguf", "Source.")
    path: str = semantic(..., "File.")
    blake3: str | None = runtime(
        None,
        "Hash of the file, 64 hex digits. With it the file need not be there to plan, and is checked.",
        pattern=r"^[0-9a-f]{64}$",
    )


class Fp8Source(Config):
    """A blockwise FP8 release, dequantised."""

    type: Literal["fp8"] = semantic("fp8", "Source.")
    path: str = semantic(..., "Directory, or target of the build.")


class ImportConfig(Config):
    """A model brought in as bf16 weights (kind `import`)."""

    entry: ClassVar[str | None] = "import"

    source: Annotated[HubSource | LocalSource | GgufSource | Fp8Source, Field(discriminator="type")] = group(
        ..., "Where it comes from."
    )
