"""What stands around the orchestrator in `bench_rl.py`, in a process of its own: an engine's admin routes, an env
server that speaks verifiers' protocol, and a trainer that hashes batches. Episodes take as long as drawn.

    python benchmarks/rl_stand_in.py RUN_DIR '{"tokens": 4096, "latency": [1.0, 0.0], "steps": 8, "train_s": 0.1}'

Latency is log-normal: median and sigma. Prints the engine's URL and the env server's address as one JSON line.
"""

import asyncio
import json
import math
import random
import sys
import threading
import time
from pathlib import Path

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web
from blake3 import blake3

from rlmake.config.shared import FilesystemTransport
from rlmake.core.rundir import RunContext
from rlmake.transport import WeightSender, broadcast, open_receiver
from rlmake.transport.types import encode_any

PROMPT = 256


def pack(value) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


class EnvServer:
    """One address; each episode is two deltas (prompt, reply with score) and a reply, as a real one-turn episode."""

    def __init__(self, tokens: int, latency: tuple[float, float]):
        self.tokens, self.latency, self.random = tokens, latency, random.Random(0)
        self.socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self.socket.setsockopt(option, 0)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.running: dict[bytes, asyncio.Task] = {}
        self.count = 0
        ids = [self.random.randrange(150_000) for _ in range(tokens)]
        prompt = {
            "message": {"role": "user", "content": "p" * PROMPT},
            "token_ids": ids[:PROMPT],
            "mask": [False] * PROMPT,
        }
        count = tokens - PROMPT
        reply = {
            "parent": 0, "message": {"role": "assistant", "content": "word " * count}, "sampled": True,
            "token_ids": ids[PROMPT:], "mask": [True] * count, "is_content": [True] * count,
            "logprobs": [-self.random.random() for _ in range(count)],
        }  # fmt: skip
        self.prompt, self.reply = pack(prompt), pack(reply)

    async def serve(self) -> None:
        while True:
            client, identity, method, payload = await self.socket.recv_multipart()
            if method == b"health":
                await self.socket.send_multipart([client, identity, b"reply", pack({"success": True})])
            elif method == b"run":
                task = asyncio.create_task(self.episode(client, identity, msgpack.unpackb(payload)))
                self.running[identity] = task
                task.add_done_callback(lambda _, identity=identity: self.running.pop(identity, None))
            elif method == b"cancel":
                if task := self.running.get(msgpack.unpackb(payload)["request_id"].encode()):
                    task.cancel()
                await self.socket.send_multipart(
                    [client, identity, b"reply", pack({"success": True, "cancelled": True})]
                )

    async def episode(self, client: bytes, identity: bytes, request: dict) -> None:
        self.count += 1
        number, data = self.count, {"type": "Task", "data": request["task_data"]}
        median, sigma = self.latency
        trace = f"t{number}"
        opened = {"trace": trace, "open": {"id": trace, "task": data}, "nodes": [msgpack.unpackb(self.prompt)]}
        opened["set"] = {"agent": {"config": {}, "name": "agent"}}
        await self.socket.send_multipart([client, identity, b"delta", pack(opened)])
        await asyncio.sleep(median * math.exp(sigma * self.random.gauss(0.0, 1.0)))
        usage = {"prompt_tokens": PROMPT, "completion_tokens": self.tokens - PROMPT}
        scored = {
            "trace": trace, "nodes": [msgpack.unpackb(self.reply)],
            "calls": [{"node": 1, "usage": usage, "finish_reason": "stop"}],
            "set": {
                "rewards": {"score": {"score": float(self.random.random() < 0.5), "weight": 1.0}}, "ok": True,
                "is_completed": True, "stop_condition": "agent_completed",
            },
        }  # fmt: skip
        await self.socket.send_multipart([client, identity, b"delta", pack(scored)])
        head = {"id": f"e{number}", "task": data, "ok": True, "env": {"id": "toy", "name": "toy"}}
        reply = {"success": True, "error": None, "head": head, "traces": [{"id": trace, "nodes": 2, "calls": 1}]}
        await self.socket.send_multipart([client, identity, b"reply", pack(reply)])


async def engine(env: EnvServer) -> str:
    """Health, models, metrics, pause, update, resume."""

    async def ok(_):
        return web.json_response({})

    async def models(_):
        return web.json_response({"data": [{"id": "toy", "max_model_len": env.tokens}]})

    async def metrics(_):
        rows = [f"vllm:num_requests_running {len(env.running)}", "vllm:num_requests_waiting 0"]
        return web.Response(text="\n".join([*rows, "vllm:kv_cache_usage_perc 0.1"]))

    app = web.Application()
    for path, handler in (("/health", ok), ("/v1/models", models), ("/metrics", metrics)):
        app.router.add_get(path, handler)
    for path in ("/pause", "/resume", "/update_weights"):
        app.router.add_post(path, ok)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"


def trainer(run_dir: Path, steps: int, train_s: float) -> None:
    """Takes each batch, waits as long as a step takes, offers the next version."""
    ctx = RunContext(run_dir, "run", "run", 1, None, run_dir / "configs/attempt_1", run_dir / "logs")
    sender, weights = WeightSender(run_dir, ctx), b"base"
    receiver = open_receiver(FilesystemTransport(), ctx, 0, 1)
    for step in range(steps + 1):
        if step:
            batch = receiver.receive(step, timeout=600)
            time.sleep(train_s)
            weights = blake3(weights + encode_any(batch.sample_ids)).digest()

        def write(folder: Path, content: bytes = weights) -> None:
            (folder / "model.safetensors").write_bytes(content)

        broadcast(sender, step, write, lambda action: action(), timeout=600)


async def main() -> None:
    run_dir, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    env = EnvServer(given["tokens"], tuple(given["latency"]))
    print(json.dumps({"url": await engine(env), "address": env.address}), flush=True)
    threading.Thread(target=trainer, args=(run_dir, given["steps"], given["train_s"]), daemon=True).start()
    await env.serve()


if __name__ == "__main__":
    asyncio.run(main())
