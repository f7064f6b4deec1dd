"""The routes of the inference server over an engine."""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from rlmake.core.errors import UserError, nearest
from rlmake.core.seeds import derive
from rlmake.inference import protocol, replies
from rlmake.inference.engines.base import Completion, Engine, EngineFailed, Refused, Sampling
from rlmake.inference.protocol import parse

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
KINDS = {400: "BadRequestError", 404: "NotFoundError", 501: "NotImplementedError", 503: "ServiceUnavailableError"}


def make_app(
    engine: Engine,
    model: str,
    run_id: str | None,
    liveness_timeout: float,
    lifespan: Any = None,
    adapters: bool = False,
) -> FastAPI:
    """`model`: the name served; `run_id` lets a client tell its own server from a stranger's. `adapters`: taken."""
    app = FastAPI(title="rlmake inference", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(engine, model)
    created = int(time.time())

    for error, status in ((Refused, 400), (UserError, 400), (EngineFailed, 503)):
        app.exception_handler(error)(_handler(status))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return _json(
            replies.error(text, error.status_code, KINDS.get(error.status_code, "HTTPError")), error.status_code
        )

    @app.get("/health")
    async def health() -> Response:
        """The engine's thread lives."""
        return Response(status_code=200 if engine.alive(float("inf")) else 503)

    @app.get("/liveness")
    async def liveness() -> Response:
        """The engine has answered lately: it does so between passes, and every second when idle or paused."""
        return Response(status_code=200 if await asyncio.to_thread(engine.alive, liveness_timeout) else 503)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return PlainTextResponse(engine.metrics(model), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        card = {
            "id": model, "object": "model", "created": created, "owned_by": "rlmake", "root": model,
            "max_model_len": engine.max_model_len, "run_id": run_id,
        }  # fmt: skip
        cards = [card]
        if server.adapter is not None:
            cards.append({**card, "id": server.adapter, "root": server.adapter, "parent": model})
        return _json({"object": "list", "data": cards, "run_id": run_id})

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        return await server.generate(request)

    if engine.openai is None:

        @app.get("/version")
        async def version() -> Response:
            return _json({"version": importlib.metadata.version("transformers")})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await server.chat(request)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await server.completions(request)

    @app.post("/pause")
    async def pause(request: Request) -> Response:
        said = await _body(request, {})
        asked = parse(protocol.PauseRequest, {**request.query_params, **said} if isinstance(said, dict) else said)
        if asked.mode != "keep":
            raise Refused(f"mode: this engine pauses with 'keep' only, not '{asked.mode}'")
        await asyncio.to_thread(engine.pause)
        return _json({"status": "paused"})

    @app.post("/resume")
    async def resume(request: Request) -> Response:
        await _body(request, {})
        await asyncio.to_thread(engine.resume)
        return _json({"status": "resumed"})

    @app.post("/update_weights")
    async def update_weights(request: Request) -> Response:
        asked = parse(protocol.UpdateRequest, await _body(request))
        if asked.weight_dir is None:
            plan = [{"name": entry.name, "shape": entry.shape} for entry in asked.plan]
            work = (engine.receive_weights, asked.version, plan, asked.dtype, asked.digests)
        else:
            work = (engine.update_weights, Path(asked.weight_dir), asked.version, asked.checksum)
        version = await asyncio.to_thread(*work)
        return _json({"status": "updated", "version": version, "seconds": engine.seconds})

    @app.post("/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        asked = parse(protocol.LoadAdapterRequest, await _body(request))
        if not adapters:
            raise Refused("this server takes no adapters; set inference.vllm.enable_lora = true")
        server.check_adapter(asked)
        version = await asyncio.to_thread(engine.load_adapter, Path(asked.lora_path), asked.lora_name)
        server.adapter = server.replies.model = asked.lora_name
        return _json({"status": "loaded", "lora_name": asked.lora_name, "version": version})

    @app.post("/init_broadcaster")
    async def init_broadcaster(request: Request) -> Response:
        asked = parse(protocol.InitBroadcasterRequest, await _body(request))
        rendezvous = {
            "host": asked.host, "port": asked.port, "session": asked.session_id, "backend": asked.backend,
            "nccl": asked.nccl_version,
        }  # fmt: skip
        world = asked.inference_world_size + 1
        await asyncio.to_thread(engine.join, rendezvous, asked.rank_offset, world, asked.timeout)
        return _json({"status": "joined"})

    @app.get("/broadcaster")
    async def broadcaster() -> Response:
        """What the trainer's side must know before a group is made."""
        return _json({"workers": await asyncio.to_thread(engine.workers)})

    if engine.openai is not None:
        app.mount("/", engine.openai)  # whatever has no route above
    return app


class _Server:
    """Requests into completions, completions into replies."""

    def __init__(self, engine: Engine, model: str):
        self.engine, self.model = engine, model
        self.adapter: str | None = None  # name of the adapter that is loaded
        self.replies = replies.Replies(engine.tokenizer, model)

    async def generate(self, request: Request) -> Response:
        asked = parse(protocol.GenerateRequest, await _body(request))
        self._check_model(asked.model)
        params = asked.sampling_params
        entries = params.logprobs if params.logprobs and params.logprobs > 1 else 0
        entries = self.engine.vocab_size if params.logprobs == -1 else entries
        sampling = self._sampling(params, len(asked.token_ids), params.max_tokens, entries)
        done = await self._run(request, [asked.token_ids], params.n, sampling, asked.cache_salt)
        scored = params.prompt_logprobs is not None
        return _json(self.replies.generate(asked.token_ids, done, params.logprobs, scored))

    async def chat(self, request: Request) -> Response:
        asked = parse(protocol.ChatRequest, await _body(request))
        self._check_model(asked.model)
        prompt = await asyncio.to_thread(self._render, asked)
        limit = asked.max_completion_tokens or asked.max_tokens
        sampling = self._sampling(asked, len(prompt), limit, asked.top_logprobs if asked.logprobs else 0)
        done = await self._run(request, [prompt], asked.n, sampling, asked.cache_salt)
        return _json(self.replies.chat(prompt, done, asked))

    async def completions(self, request: Request) -> Response:
        asked = parse(protocol.CompletionRequest, await _body(request))
        self._check_model(asked.model)
        prompts = [self._encode(prompt) for prompt in _prompts(asked.prompt)]
        longest = max(map(len, prompts), default=0)
        sampling = self._sampling(asked, longest, asked.max_tokens or COMPLETION_TOKENS, asked.logprobs or 0)
        done = await self._run(request, prompts, asked.n, sampling, asked.cache_salt)
        return _json(self.replies.completions(prompts, done, asked))

    def _check_model(self, name: str | None) -> None:
        if self.adapter is not None and name == self.model:
            raise Refused(f"this server runs the adapter '{self.adapter}' and cannot run '{name}' without it as well")
        served = self.adapter or self.model
        if name is not None and name != served:
            raise HTTPException(404, f"the model '{name}' is not served here{nearest(name, [served])}")

    def check_adapter(self, asked: protocol.LoadAdapterRequest) -> None:
        """One adapter at a time, replaced only where that is asked for."""
        if self.adapter not in (None, asked.lora_name):
            raise Refused(f"this server runs the adapter '{self.adapter}', and one at a time")
        if self.adapter == asked.lora_name and not asked.load_inplace:
            raise Refused(f"the adapter '{asked.lora_name}' is loaded already; load_inplace = true replaces it")

    def _render(self, asked: protocol.ChatRequest) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer.chat_template is None:
            raise Refused("the tokenizer has no chat template; set inference.vllm.chat_template")
        try:
            text = tokenizer.apply_chat_template(
                asked.messages,
                tools=asked.tools,
                tokenize=False,
                add_generation_prompt=asked.add_generation_prompt,
                **(asked.chat_template_kwargs or {}),
            )
        except Exception as error:  # whatever a template does with what it is given
            raise Refused(f"messages: the chat template fails: {error}") from None
        return self._encode(text)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt, add_special_tokens=False)
        return prompt

    def _sampling(self, fields: Any, prompt: int, max_tokens: int | None, top: int) -> Sampling:
        limit = self.engine.max_model_len - prompt
        stops = frozenset(fields.stop_token_ids or ())
        if not fields.ignore_eos:
            stops |= self.engine.default_stop_ids
        if any(not 0 <= token < self.engine.vocab_size for token in stops):
            raise Refused(f"stop_token_ids: a token is outside of the vocabulary of {self.engine.vocab_size}")
        return Sampling(
            max_tokens=max(1, limit if max_tokens is None else min(max_tokens, limit)),
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=min(max(fields.top_k, 0), self.engine.vocab_size),
            min_p=fields.min_p,
            min_tokens=fields.min_tokens,
            seed=fields.seed,
            stop_ids=stops,
            stop=fields.stops,
            top_logprobs=top,
            prompt_logprobs=fields.prompt_logprobs,
        )

    async def _run(
        self, request: Request, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, salt: str | None
    ) -> list[Completion]:
        """`n` completions of each prompt; all are dropped when the client leaves or one of them fails."""
        futures = []
        try:
            for prompt in map(tuple, prompts):
                for index in range(n):
                    seed = sampling.seed if index == 0 or sampling.seed is None else derive(sampling.seed, "n", index)
                    one = dataclasses.replace(sampling, seed=seed)
                    futures.append(asyncio.wrap_future(self.engine.submit(prompt, one, salt)))
            return await _unless_gone(request, asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()


async def _unless_gone(request: Request, work: asyncio.Future) -> Any:
    """The result of `work`; it is cancelled when the client hangs up."""
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is left to hear it
            raise HTTPException(499, "the client has left")
        return await work
    finally:
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, default: Any = None) -> Any:
    """The request's JSON; `default` where the body is empty and there is one."""
    raw = await request.body()
    if not raw and default is not None:
        return default
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _handler(status: int) -> Callable:
    async def handle(request: Request, error: Exception) -> Response:
        return _json(replies.error(str(error), status, KINDS[status]), status)

    return handle


@contextlib.asynccontextmanager
async def watching(engine: Engine, on_death: Callable[[], None], poll: float = 0.5) -> AsyncIterator[None]:
    """Call `on_death` when the engine's thread ends while the server runs."""

    async def watch() -> None:
        while engine.alive(float("inf")):
            await asyncio.sleep(poll)
        on_death()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
