"""The vLLM engine: vLLM's own server (its OpenAI routes and its metrics) with ours in front of it.

One event loop holds vLLM's client, its application and ours. `vllm_worker` is what runs inside vLLM's workers,
`vllm_versions` what differs between its versions, `vllm_start` what is said when it does not start.
"""

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake.core.errors import UserError
from rlmake.inference.engines import vllm_start, vllm_versions
from rlmake.inference.engines.base import Completion, EngineFailed, Entry, Refused, Sampling, check_prompt
from rlmake.inference.weights import Shapes, check_shapes, check_version, compare, file_digests, shapes_of
from rlmake.models import loading
from rlmake.models.text import load_tokenizer, template_text


class VllmEngine:
    """See `engines.base.Engine`."""

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, cfg: Any) -> AsyncIterator["VllmEngine"]:
        """Start vLLM. Raises `UserError` where it is missing, too old, refuses an argument or does not start."""
        vllm_versions.installed()
        folder = loading.locate(cfg.vllm.model)
        vllm_start.set_environment(cfg)
        args = vllm_versions.parse(vllm_start.arguments(cfg, folder))
        async with contextlib.AsyncExitStack() as stack:
            with vllm_start.explained():
                client = await stack.enter_async_context(vllm_versions.client(args))
                app = await vllm_versions.openai_app(client, args)
            # The scope of vLLM's application, which a mounted one does not get by itself.
            await stack.enter_async_context(app.router.lifespan_context(app))
            engine = cls(cfg, client, app, folder)
            try:
                yield engine
            finally:
                engine.close()

    def __init__(self, cfg: Any, client: Any, app: Any, folder: Path):
        self._cfg, self._client, self.openai = cfg, client, app
        self._loop = asyncio.get_running_loop()
        self.tokenizer = load_tokenizer(folder)
        if cfg.vllm.chat_template is not None:
            self.tokenizer.chat_template = template_text(cfg.vllm.chat_template)
        self.max_model_len = client.model_config.max_model_len
        self.vocab_size = client.model_config.get_vocab_size()
        self.default_stop_ids = frozenset(loading.stop_ids(folder, self.tokenizer))
        self._shapes: Shapes = shapes_of(folder)
        self._adapter: Any = None
        self.seconds: dict[str, float] = {}
        self._version, self._updates, self._paused, self._closed = 0, 0, False, False
        self._failure: str | None = None
        self._tasks: set[asyncio.Task] = set()
        self._salt_requests()

    # Called from other threads, and `submit` also from the loop's.

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, cache_salt: str | None) -> "Future[Completion]":
        check_prompt(prompt, self.max_model_len, self.vocab_size)
        self._check()
        return asyncio.run_coroutine_threadsafe(self._complete(prompt, sampling, cache_salt), self._loop)

    def pause(self) -> None:
        self._await(self._client.pause_generation(mode="keep", clear_cache=False))
        self._paused = True

    def resume(self) -> None:
        self._await(self._client.resume_generation())
        self._paused = False

    def update_weights(self, folder: Path, version: int | None, checksum: str | None = None) -> int:
        begun = time.perf_counter()
        found = check_version(folder, version, checksum)
        if self._adapter is not None:
            raise UserError("this server runs an adapter, which belongs to the weights it has; start another one")
        files = loading.weight_files(folder)
        shapes = shapes_of(folder)
        check_shapes(shapes, self._shapes, str(folder))
        checked = time.perf_counter()
        self._change(self._rpc("rlmake_load_files", [str(path) for path in files]))
        self.seconds = {"check": checked - begun, "load": time.perf_counter() - checked}
        if self._cfg.check_weights:
            self._compare(shapes, file_digests(folder, self._dtype), str(folder))
        return self._now(found, str(folder))

    def load_adapter(self, folder: Path, name: str = "adapter") -> int:
        found = check_version(folder, None, key="lora_path")
        self._adapter = self._await(vllm_versions.load_adapter(self.openai, name, str(folder)))
        return self._now(found, str(folder))

    def workers(self) -> list[dict[str, Any]]:
        """Of each worker: its rank, device and NCCL version."""
        return self._await(self._rpc("rlmake_facts"))

    def join(self, rendezvous: dict[str, Any], first: int, world: int, timeout: float) -> None:
        """Make every worker join the trainer's group, from rank `first` on. `UserError` says which did not and why."""
        answers = self._await(self._rpc("rlmake_join", rendezvous, first, world, timeout))
        for rank, failure in enumerate(answers):
            if failure is not None:
                raise UserError(f"worker {rank} did not join the group of weight transfer: {failure}")

    def receive_weights(self, version: int, plan: list[dict], dtype: str, digests: dict[str, str] | None) -> int:
        """Take a version from the group. What is half received cannot be served: the engine ends then."""
        shapes = {entry["name"]: tuple(entry["shape"]) for entry in plan}
        check_shapes(shapes, self._shapes, f"v{version}")
        self._change(self._rpc("rlmake_receive", version, plan, dtype))
        if self._cfg.check_weights and digests is not None:
            self._compare(shapes, digests, f"v{version}")
        return self._now(version, "the trainer's group")

    def metrics(self, model: str) -> str:
        """vLLM's own, and ours."""
        from prometheus_client import REGISTRY, generate_latest

        from rlmake.inference.metrics import own

        return generate_latest(REGISTRY).decode() + own(self._version, self._paused, model)

    def alive(self, timeout: float) -> bool:
        if self._failure or self._client.errored:
            return False
        if math.isinf(timeout):
            return True
        try:
            asyncio.run_coroutine_threadsafe(self._rpc("rlmake_alive"), self._loop).result(timeout)
        except Exception:  # of vLLM's making, and of any kind: what can't answer is not alive
            return False
        return True

    def close(self) -> None:
        """Requests under way fail; vLLM itself is ended by `opened`."""
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    # In the loop.

    async def _complete(self, prompt: tuple[int, ...], sampling: Sampling, cache_salt: str | None) -> Completion:
        from vllm.outputs import RequestOutput

        task = asyncio.current_task()
        self._tasks.add(task)
        last: RequestOutput | None = None
        try:
            given = {"prompt_token_ids": list(prompt)} | ({"cache_salt": cache_salt} if cache_salt else {})
            params, name = _params(sampling, len(prompt), self.max_model_len), uuid.uuid4().hex
            async for output in self._client.generate(given, params, name, lora_request=self._adapter):
                last = output
        except asyncio.CancelledError:
            if self._closed:
                raise EngineFailed("the server is closing") from None
            raise
        except ValueError as error:
            raise Refused(str(error).splitlines()[0]) from None
        except Exception as error:
            raise EngineFailed(f"the engine has failed: {type(error).__name__}: {error}") from None
        finally:
            self._tasks.discard(task)
        if last is None:
            raise EngineFailed("the engine gave no result")
        return _completion(last, sampling)

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return await self._client.collective_rpc(method, args=args)

    def _await(self, work: Coroutine) -> Any:
        """The result of work in the loop, from another thread."""
        self._check(work)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except (UserError, Refused, EngineFailed):
            raise
        except Exception as error:
            raise EngineFailed(f"the engine has failed: {_line(error)}") from error

    def _change(self, work: Coroutine) -> None:
        """Change the weights: what fails half-way leaves none that may be served."""
        try:
            self._await(work)
        except EngineFailed as error:
            self._failure = f"new weights were taken in part only: {error}"
            logger.error(self._failure)
            raise

    def _compare(self, shapes: Shapes, expected: dict[str, str], where: str) -> None:
        plan = [{"name": name, "shape": list(shape)} for name, shape in shapes.items()]
        try:
            for found in self._await(self._rpc("rlmake_digests", plan)):
                compare(found, expected, where)
        except EngineFailed as error:
            self._failure = str(error)
            logger.error(self._failure)
            raise

    @property
    def _dtype(self) -> str:
        return str(self._client.model_config.dtype).removeprefix("torch.")

    def _now(self, version: int | None, source: str) -> int:
        self._version = self._version + 1 if version is None else version
        self._updates += 1
        logger.info(f"weights v{self._version} from {source}")
        return self._version

    def _salt_requests(self) -> None:
        """Requests without a salt get one of the weights they meet: no prefix outlives the weights it was made with."""
        plain = self._client.generate

        def generate(prompt: Any, *args: Any, **kwargs: Any) -> Any:
            if self._updates and isinstance(prompt, dict) and not prompt.get("cache_salt"):
                prompt["cache_salt"] = f"update {self._updates}"
            return plain(prompt, *args, **kwargs)

        self._client.generate = generate

    def _check(self, work: Coroutine | None = None) -> None:
        reason = self._failure or ("the server is closing" if self._closed else None)
        if reason is None and self._client.errored:
            reason = "the engine has failed; see the log"
        if reason is not None:
            if work is not None:
                work.close()
            raise EngineFailed(reason)


def _params(sampling: Sampling, prompt: int, max_model_len: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=min(sampling.max_tokens, max_model_len - prompt),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=sorted(sampling.stop_ids),
        ignore_eos=True,  # the model's own ends are among the stop ids, unless they were not wanted
        logprobs=sampling.top_logprobs,  # 0: of the sampled token alone
        prompt_logprobs=sampling.prompt_logprobs,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,  # or each token is a dict with an object in it, which Python's collector walks through
    )


def _completion(output: Any, sampling: Sampling) -> Completion:
    one = output.outputs[0]
    ids, logprobs, top = list(one.token_ids), [], []
    for token, row in zip(ids, one.logprobs, strict=True):
        logprobs.append(float(row[token].logprob))
        if sampling.top_logprobs:
            likely = sorted(_entries(row), key=lambda entry: entry.rank)
            top.append(likely[: sampling.top_logprobs])
    if not all(map(math.isfinite, logprobs)):
        raise EngineFailed("the model gave a logprob that is not finite")
    if one.finish_reason not in ("stop", "length"):
        raise EngineFailed(f"the engine ended the request: {one.finish_reason}")
    done = Completion(ids, logprobs, top, one.finish_reason, one.text if sampling.stop else None)
    if sampling.prompt_logprobs is not None:
        done.prompt_logprobs = [
            None if not row else _given_first(row, token, sampling.prompt_logprobs)
            for token, row in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        ]
    return done


def _entries(row: dict[int, Any]) -> list[Entry]:
    return [Entry(token, float(found.logprob), int(found.rank)) for token, found in row.items()]


def _given_first(row: dict[int, Any], token: int, top: int) -> list[Entry]:
    entries = _entries(row)
    likely = sorted((e for e in entries if e.rank <= top and e.token != token), key=lambda entry: entry.rank)
    return [next(entry for entry in entries if entry.token == token), *likely]


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
