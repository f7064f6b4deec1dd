"""Requests of the HTTP contract: OpenAI's fields and vLLM's, checked. What the engine can't do is refused."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from rlmake.core.errors import nearest
from rlmake.inference.engines.base import Refused

MAX_STOPS = 16
# Labels, hints and wishes about the reply's form: they change nothing here.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options", "priority",
    "request_id", "parallel_tool_calls", "reasoning_effort", "include_reasoning", "verbosity", "detokenize",
    "spaces_between_special_tokens", "routed_experts_prompt_start", "return_token_ids", "return_tokens_as_token_ids",
    "output_kind",
}  # fmt: skip
# Options that the embedded engine does not have, with the values at which they mean nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "logit_bias": ({},), "best_of": (1,), "use_beam_search": (False,), "echo": (False,), "suffix": ("",),
    "stream": (False,), "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},), "bad_words": ([],),
    "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (), "features": (), "modalities": (["text"],),
    "continue_final_message": (False,), "add_special_tokens": (False,), "functions": ([],), "audio": (),
    "allowed_token_ids": (), "structured_outputs": (), "kv_transfer_params": (), "content_parts": (),
}  # fmt: skip


class Fields(BaseModel):
    """Base of all requests. A key that is not known is refused with the nearest known one."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    @model_validator(mode="after")
    def _known(self):
        names = {info.alias or name for name, info in type(self).model_fields.items()}
        for key, value in (self.model_extra or {}).items():
            if key in IGNORED or value is None:
                continue
            if key not in NEUTRAL:
                raise ValueError(f"unknown parameter '{key}'{nearest(key, names | IGNORED | set(NEUTRAL))}")
            if value not in NEUTRAL[key]:
                raise ValueError(f"'{key}' = {value!r} is not supported by this engine")
        return self


class SamplingFields(Fields):
    """What all endpoints share."""

    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=1024)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=100)

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _stops(self):
        if len(self.stops) > MAX_STOPS or any(not text for text in self.stops):
            raise ValueError(f"'stop' takes up to {MAX_STOPS} texts that are not empty")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerateSampling(SamplingFields):
    """`sampling_params` of `/inference/v1/generate`. `logprobs`: None for none; from 2 on, so many likely ones too; -1,
    as with vLLM: of the whole vocabulary."""

    logprobs: int | None = Field(None, ge=-1, le=100)


class GenerateRequest(Fields):
    """`POST /inference/v1/generate`: token ids in, token ids out."""

    token_ids: list[StrictInt]
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    model: str | None = None
    cache_salt: str | None = None


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=100)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _text_only(self):
        for index, message in enumerate(self.messages):
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                if kind != "text":
                    raise ValueError(f"messages.{index}.content: a part of type '{kind}'; this engine reads text only")
        return self


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`; a prompt is text or token ids, or a list of either."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    model: str | None = None
    logprobs: int | None = Field(None, ge=0, le=100)
    cache_salt: str | None = None


class PlannedTensor(Fields):
    name: str
    shape: list[int]


class UpdateRequest(Fields):
    """`POST /update_weights`: from a directory, or (null) from the trainer's group what `plan` announces."""

    weight_dir: str | None
    version: int | None = Field(None, ge=0)
    checksum: str | None = None  # of the record that must lie there
    plan: list[PlannedTensor] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    digests: dict[str, str] | None = None

    @model_validator(mode="after")
    def _complete(self):
        if self.weight_dir is None and (self.version is None or not self.plan):
            raise ValueError("without 'weight_dir', 'version' and 'plan' are needed")
        return self


class InitBroadcasterRequest(Fields):
    """`POST /init_broadcaster`: where the trainer's group meets; this server's workers are ranks from `rank_offset`
    on, of `inference_world_size` workers in all."""

    host: str
    port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    inference_world_size: int = Field(ge=1)
    timeout: float = Field(gt=0)
    session_id: str
    backend: Literal["nccl", "gloo"] = "nccl"
    nccl_version: str | None = None
    quantize_in_weight_transfer: Literal[False] = False


class LoadAdapterRequest(Fields):
    """`POST /load_lora_adapter`: the adapter of a folder in PEFT's layout, under a name. `load_inplace`: replace it."""

    lora_name: str = Field(min_length=1)
    lora_path: str
    load_inplace: bool = False


class PauseRequest(Fields):
    """`POST /pause`: running requests are kept where they are."""

    mode: str = "keep"
    clear_cache: bool = False


def parse(cls: type, data: Any) -> Any:
    """A request from JSON; `Refused` in one line that names the key."""
    if not isinstance(data, dict):
        raise Refused("the body must be a JSON object")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise Refused(f"{where}: {message}" if where else message) from None
