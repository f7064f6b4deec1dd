"""A fake engine on loopback (/v1/models, /inference/v1/generate, /v1/chat/completions) and a toy tokenizer."""

import asyncio
import contextlib
import json
import threading

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


class FakeEngine:
    """`reply(prompt_text) -> text` decides; `requests` are the bodies received, in order of arrival."""

    def __init__(self, tokenizer, reply, max_model_len=512):
        self.tokenizer, self.reply, self.max_model_len = tokenizer, reply, max_model_len
        self.requests: list[dict] = []
        self.app = FastAPI()
        self.app.add_exception_handler(ValueError, self.failure)
        self.app.get("/v1/models")(self.models)
        self.app.post("/inference/v1/generate")(self.generate)
        self.app.post("/v1/chat/completions")(self.chat)

    async def models(self):
        card = {"id": "m", "object": "model", "max_model_len": self.max_model_len, "run_id": "run-1"}
        return {"object": "list", "data": [card]}

    def logprob(self, position: int) -> float:
        """A float32 that four decimals would spoil."""
        return -0.123456789 - position * 1e-5

    async def _answer(self, text: str):
        """What `reply` says; a ValueError that it raises is the engine's failure."""
        reply = self.reply(text)
        return await reply if asyncio.iscoroutine(reply) else reply

    async def failure(self, request, error):
        return JSONResponse({"error": {"message": str(error)}}, status_code=500)

    async def generate(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        prompt = self.tokenizer.decode(body["token_ids"])
        text = await self._answer(prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0])
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
    # Clients keep idle connections for 5 s: a server that closes its own just then would fail their next request.
    config = uvicorn.Config(engine.app, host="127.0.0.1", port=0, log_level="warning", timeout_keep_alive=75)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the fake engine did not start")
        threading.Event().wait(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = server.force_exit = True  # an answer that hangs is not waited for
        thread.join(10)


def save_tokenizer(folder):
    """Write tokenizer.json and tokenizer_config.json into `folder`; returns the folder as text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["write the words of the phrase backwards user assistant system"] * 8, trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    return str(folder)


def load_tokenizer(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)
