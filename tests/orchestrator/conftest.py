"""A whole run in one process: a scripted engine behind real HTTP, a scripted environment, a trainer that only hashes.

Everything that could make two runs differ is in it on purpose: answers arrive after random delays, tokens depend on
the weights that the engine has loaded, and the weights on every byte of every batch. So equal final weights mean that
everything before was equal.
"""

import asyncio
import json
import random
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import verifiers.v1 as vf
from aiohttp import web
from blake3 import blake3

from rlmake import checkpoint
from rlmake.config import OrchestratorConfig, parse
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.rundir import RunContext, step_dir
from rlmake.envs.client import EnvHandle, EnvTask
from rlmake.orchestrator.orchestrator import Orchestrator
from rlmake.transport import WeightSender, ask_half, broadcast, open_receiver
from rlmake.transport.types import encode_any

MODEL = "toy"


class Engine:
    """`/inference/v1/generate` gives 1–6 tokens that are a function of (weights, seed, prompt)."""

    def __init__(self, delay=0.004, run_id="run"):
        self.delay, self.run_id = delay, run_id
        self.weights, self.loaded, self.paused, self.requests, self.busy_updates = b"", [], False, [], 0
        self.running = self.preempted = 0

    async def start(self):
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/broadcaster", self.broadcaster)
        app.router.add_post("/pause", self.pause)
        app.router.add_post("/resume", self.resume)
        app.router.add_post("/update_weights", self.update)
        app.router.add_post("/inference/v1/generate", self.generate)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"

    async def health(self, _):
        return web.Response()

    async def models(self, _):
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 64}], "run_id": self.run_id})

    async def metrics(self, _):
        label, usage = f'{{model_name="{MODEL}"}}', min(1.0, self.running / 64)
        lines = [f"vllm:num_requests_running{label} {self.running}", f"vllm:num_requests_waiting{label} 0"]
        lines += [f"vllm:kv_cache_usage_perc{label} {usage}", f"vllm:num_preemptions_total{label} {self.preempted}"]
        lines += [f"vllm:{kind}_tokens_total{label} {len(self.requests) * 4}" for kind in ("prompt", "generation")]
        lines += ['vllm:cache_config_info{block_size="16",num_gpu_blocks="256"} 1']
        return web.Response(text="\n".join(lines))

    async def broadcaster(self, _):
        return web.json_response({"workers": [{"rank": 0, "device": "cuda:0", "nccl": "2.28.9"}]})

    async def pause(self, _):
        self.paused = True
        return web.json_response({})

    async def resume(self, _):
        self.paused = False
        return web.json_response({})

    async def update(self, request):
        body = await request.json()
        assert self.paused
        self.busy_updates += self.running > 0
        self.weights = (Path(body["weight_dir"]) / "model.safetensors").read_bytes()
        self.loaded.append(body["version"])
        return web.json_response({})

    async def generate(self, request):
        body = await request.json()
        sampling = body["sampling_params"]
        self.requests.append({"salt": body.get("cache_salt"), "version": self.loaded[-1], **sampling})
        self.running += 1
        await asyncio.sleep(random.random() * self.delay)
        seed = sampling.get("seed", f"request {len(self.requests)}")
        rng = random.Random(blake3(self.weights + json.dumps([seed, body["token_ids"]]).encode()).digest())
        ids = [rng.randrange(100) for _ in range(rng.randint(1, 6))]
        self.running -= 1
        return web.json_response({"ids": ids, "logprobs": [-rng.random() for _ in ids]})


class Env(EnvHandle):
    """Tasks are numbers; a rollout is one request. `reward(task, ids)`; None fails the episode. `shape` makes one."""

    def __init__(self, name, tasks, reward, shape=None):
        self.name, self.tasks, self.reward, self.shape = name, tasks, reward, shape or _episode
        self.client = aiohttp.ClientSession()

    def num_tasks(self):
        return self.tasks

    def task(self, index):
        return EnvTask(index, f"{self.name}-{index}", "", "Toy", {"idx": index, "prompt": str(index)})

    async def run(self, task, client, model, sampling, on_delta=None):
        sampling = vf.SamplingConfig.model_validate(sampling)
        body = {
            "model": model,
            "token_ids": [1, 2, task.index],
            "sampling_params": sampling.model_dump(exclude_none=True),
        }
        body["cache_salt"] = body["sampling_params"].pop("cache_salt", None)
        url = client.base_url.removesuffix("/v1") + "/inference/v1/generate"
        async with self.client.post(url, json=body) as answer:
            reply = await answer.json()
        reward = self.reward(task.index, reply["ids"])
        if reward is None:
            return self.failed(task, "ProviderError", "scripted")
        return self.shape(self.name, task, reply, reward)

    async def close(self):
        await self.client.close()


def _episode(name, task, reply, reward):
    ids, data = reply["ids"], {"type": "Toy", "data": {"idx": task.index, "prompt": "p"}}
    nodes = [
        {"message": {"role": "user", "content": "p"}, "token_ids": [1, 2, task.index], "mask": [False] * 3},
        {
            "parent": 0, "message": {"role": "assistant", "content": "a"}, "sampled": True, "token_ids": [3, *ids],
            "mask": [False] + [True] * len(ids), "logprobs": reply["logprobs"],
        },
    ]  # fmt: skip
    trace = {
        "task": data, "agent": {"config": {}, "name": "agent"}, "nodes": nodes, "rewards": {"r": {"score": reward}},
        "calls": [{"node": 1, "usage": {"prompt_tokens": 4, "completion_tokens": len(ids)}, "finish_reason": "stop"}],
        "ok": True, "is_completed": True, "stop_condition": "agent_completed",
    }  # fmt: skip
    return vf.WireEpisode.model_validate({"task": data, "ok": True, "traces": [trace], "env": {"name": name}})


class Sender(WeightSender):
    """Gives up at once when its trainer is killed."""

    def wait_receiver(self, timeout):
        while not (self.folder / ".receiver_ready").exists():
            if self.stop.wait(0.005):
                raise UserError("killed")


class Trainer:
    """Hashes batches into weights on a thread; checkpoints with its own half and COMPLETE, as the real one does."""

    def __init__(self, run, ctx, start, until, interval, ask_at=None):
        self.run, self.ctx, self.step, self.until, self.interval, self.ask_at = run, ctx, start, until, interval, ask_at
        self.stop, self.error, self.batches = threading.Event(), None, {}
        self.weights = b"base"
        if start:
            self.weights = (step_dir(ctx.run_dir, start) / "trainer" / "weights").read_bytes()
        self.thread = threading.Thread(target=self._guarded, daemon=True)

    def _guarded(self):
        try:
            self._train()
        except Exception as error:
            if not self.stop.is_set():
                self.error = error

    def _alive(self, action):
        if self.stop.is_set():
            raise UserError("killed")
        action()

    def _train(self):
        sender = Sender(self.ctx.run_dir, self.ctx)
        sender.stop = self.stop
        receivers = [open_receiver(self.run.config.rollout_transport, self.ctx, rank, 2) for rank in (0, 1)]
        self._send(sender)
        while self.step < self.until:
            while not (self.ctx.run_dir / "batches" / f"step_{self.step + 1}" / "rank_1.bin").exists():
                if self.stop.wait(0.005):
                    raise UserError("killed")
            batches = [receiver.receive(self.step + 1, timeout=20) for receiver in receivers]
            self.step += 1
            self.batches[self.step] = batches
            content = encode_any([[b.step, b.counts, b.sample_ids, b.micro_batches] for b in batches])
            self.weights = blake3(self.weights + content).hexdigest().encode()
            self._send(sender)
            if self.ask_at == self.step:
                ask_half(self.ctx.run_dir, self.step)
            if self.step % self.interval == 0 or self.step == self.until or self.ask_at == self.step:
                self._save()

    def _send(self, sender):
        def write(folder):
            (folder / "model.safetensors").write_bytes(self.weights)

        broadcast(sender, self.step, write, self._alive, timeout=20)

    def _save(self):
        folder = step_dir(self.ctx.run_dir, self.step)
        with checkpoint.writing(folder, "trainer") as half:
            (half / "weights").write_bytes(self.weights)
        while not (folder / "COMPLETE").exists():
            try:
                checkpoint.publish(
                    self.ctx.run_dir, self.step, policy_version=self.step, world_size=2, ledger=None, ctx=self.ctx,
                    timeout=0.1, poll=0.01,
                )  # fmt: skip
            except RunFailed:
                if self.stop.is_set():
                    raise


def mixed(task, ids):
    """Some groups have equal rewards, some rollouts fail."""
    if ids[0] == 13:
        return None
    return 0.0 if task % 3 == 0 else float(ids[0] % 2)


class Run:
    """A run directory and its configuration; `start` makes one attempt."""

    def __init__(self, folder, max_steps=4, interval=2, rewards=None, **overrides):
        self.folder, self.max_steps, self.interval = folder, max_steps, interval
        self.rewards = rewards or {"toy": (7, mixed)}
        raw = {
            "model": {"name": MODEL}, "renderer": {"name": "qwen3"}, "batch_size": 12, "seq_len": 16,
            "max_steps": max_steps, "deterministic": True, "seed": 3, "num_train_workers": 2, "output_dir": str(folder),
            "ckpt": {"interval": interval}, "concurrency": {"max_inflight": 16},
            "train": {"group_size": 4, "source": [self.source(name) for name in self.rewards]},
        }  # fmt: skip
        for key, value in overrides.items():
            raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) else value
        self.raw = raw
        self.config = parse(OrchestratorConfig, raw)

    @staticmethod
    def source(name, **more):
        return {"name": name, "env": {"taskset": {"id": name}}, **more}

    @asynccontextmanager
    async def attempt(self, number=1, resume=None, engine=None, ask_at=None, until=None):
        """Engine, trainer and orchestrator of one attempt, running; yields (orchestrator task, trainer, engine)."""
        ctx = RunContext(
            self.folder, "run", "run", number, None, self.folder / f"configs/attempt_{number}", self.folder / "logs"
        )
        checkpoint.prune_future(self.folder, resume or 0, explicit=True)
        engine = engine or Engine()
        await engine.start()
        raw = {**self.raw, "model": {"name": MODEL, "client": {"base_url": engine.url}}}
        config = parse(OrchestratorConfig, raw | ({"resume": {"step": resume}} if resume else {}))
        trainer = Trainer(self, ctx, resume or 0, until or self.max_steps, self.interval, ask_at)
        orchestrator = Orchestrator(config, ctx)

        async def connect(split, sources):
            return {source.name: Env(source.name, *self.rewards[source.name]) for source in sources}

        orchestrator._connect = connect
        trainer.thread.start()
        task = asyncio.create_task(orchestrator.run())
        try:
            yield task, trainer, engine, orchestrator
        finally:
            trainer.stop.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(trainer.thread.join, 20)
            await engine.runner.cleanup()

    async def finish(self, **kwargs):
        """One attempt to its end; (final weights, trainer, engine, orchestrator)."""
        async with self.attempt(**kwargs) as (task, trainer, engine, orchestrator):
            await asyncio.wait_for(task, 240)
            await asyncio.to_thread(trainer.thread.join, 20)
            assert trainer.error is None, trainer.error
        return trainer.weights, trainer, engine, orchestrator

    def rows(self):
        path = self.folder / "monitors/file/metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def make_run(tmp_path):
    count = iter(range(100))
    return lambda **kwargs: Run(tmp_path / f"run{next(count)}", **kwargs)


@pytest.fixture
def slow_engine():
    return Engine
