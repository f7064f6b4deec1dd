"""A fake engine on loopback: answers /v1/models, /inference/v1/generate and /v1/chat/completions, records requests."""

import asyncio
import contextlib
import threading

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


class FakeEngine:
    """`reply(prompt_text) -> text` decides; `requests` are the bodies received, in order of arrival."""

    def __init__(self, tokenizer, reply, max_model_len=512):
        self.tokenizer, self.reply, self.max_model_len = tokenizer, reply, max_model_len
        self.requests: list[dict] = []
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/inference/v1/generate")(self.generate)
        self.app.post("/v1/chat/completions")(self.chat)

    async def models(self):
        return {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": self.max_model_len}]}

    def logprob(self, position: int) -> float:
        """A float32 that four decimals would spoil."""
        return -0.123456789 - position * 1e-5

    async def _answer(self, text: str):
        reply = self.reply(text)
        if asyncio.iscoroutine(reply):
            reply = await reply
        return reply

    async def generate(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        prompt = self.tokenizer.decode(body["token_ids"])
        try:
            text = await self._answer(prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0])
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=500)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        limit = body["sampling_params"].get("max_tokens") or len(ids)
        finish, ids = ("stop", ids) if len(ids) <= limit else ("length", ids[:limit])
        content = [
            {"token": f"token_id:{t}", "logprob": self.logprob(i), "top_logprobs": []} for i, t in enumerate(ids)
        ]
        choice = {"index": 0, "token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}
        return {"request_id": "r", "choices": [choice]}

    async def chat(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        text = await self._answer(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return {
            "id": "c", "object": "chat.completion", "created": 1, "model": body["model"],
            "choices": [choice], "usage": usage,
        }  # fmt: skip


@contextlib.contextmanager
def serving(engine: FakeEngine):
    """Run the engine on a port of the system's choice; yields its base URL (ending in /v1)."""
    server = uvicorn.Server(uvicorn.Config(engine.app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the fake engine did not start")
        threading.Event().wait(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)
