"""The HTTP contract, against the real server process; the same tests for every engine."""

import asyncio
import math
import time

import httpx
import pytest
from contract import PROMPT, flat, scored
from openai import AsyncOpenAI, OpenAI

from rlmake.config.renderer import RendererConfig
from rlmake.models import exact, loading
from rlmake.models.renderer import CHATML, load_tokenizer, make_renderer


def test_state_endpoints(server):
    models = server.client.get("/v1/models").json()
    assert models["data"][0]["id"] == "policy" and models["data"][0]["max_model_len"] == 320
    assert models["run_id"] == models["data"][0]["run_id"] == "run-7"
    assert server.client.get("/health").status_code == server.client.get("/liveness").status_code == 200
    before = server.metric("vllm:generation_tokens_total")
    server.generate(PROMPT, max_tokens=7)
    assert server.metric("vllm:generation_tokens_total") == before + 7
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"):
        assert server.metric(gauge) == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0 and server.metric("rlmake:policy_version") == 0


def test_generate(server):
    reply = server.generate(PROMPT, max_tokens=9, logprobs=1, seed=5, skip_special_tokens=False)
    ids, values = flat(reply)
    assert len(ids) == 9 and reply["choices"][0]["finish_reason"] == "length" and reply["request_id"]
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    assert server.same(flat(server.generate(PROMPT, max_tokens=9, logprobs=1, seed=5)), (ids, values))
    assert flat(server.generate(PROMPT, max_tokens=9, logprobs=1, seed=6))[0] != ids
    assert flat(server.generate(PROMPT, max_tokens=9, logprobs=1)) != flat(
        server.generate(PROMPT, max_tokens=9, logprobs=1)
    )
    assert server.generate(PROMPT, max_tokens=2)["choices"][0]["logprobs"] is None
    salted = {"token_ids": PROMPT, "cache_salt": "3", "sampling_params": {"max_tokens": 9, "logprobs": 1, "seed": 5}}
    assert server.same(flat(server.post("/inference/v1/generate", salted)), (ids, values))
    several = server.generate(PROMPT, max_tokens=9, logprobs=1, seed=5, n=3)
    assert server.same(flat(several), (ids, values)) and len({tuple(flat(several, i)[0]) for i in range(3)}) == 3


def test_ends(server):
    ids, _ = flat(server.generate(PROMPT, max_tokens=30, logprobs=1, seed=11, ignore_eos=True))
    stop = ids[12]
    at = ids.index(stop)
    reply = server.generate(PROMPT, max_tokens=30, logprobs=1, seed=11, ignore_eos=True, stop_token_ids=[stop])
    assert flat(reply)[0] == ids[: at + 1] and reply["choices"][0]["finish_reason"] == "stop"
    reply = server.generate(PROMPT, seed=11, logprobs=1, ignore_eos=True)
    assert len(flat(reply)[0]) == 320 - len(PROMPT) and reply["choices"][0]["finish_reason"] == "length"
    long = server.generate(range(10, 300), max_tokens=500, logprobs=1, ignore_eos=True)
    assert len(flat(long)[0]) == 30


def test_default_stops_are_the_models(server, models):
    tokenizer = load_tokenizer(models["a"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for seed in range(40):
        reply = server.generate(PROMPT, max_tokens=120, logprobs=1, seed=seed)
        ids = reply["choices"][0]["token_ids"]
        if reply["choices"][0]["finish_reason"] == "stop":
            assert ids[-1] in (end, tokenizer.pad_token_id) and not {end, tokenizer.pad_token_id} & set(ids[:-1])
            return
    pytest.fail("no completion ended by itself")


def test_greedy_and_filters_agree(server):
    greedy = flat(server.generate(PROMPT, max_tokens=12, logprobs=1, temperature=0, ignore_eos=True))
    whole = server.generate(PROMPT, max_tokens=12, logprobs=1, seed=4, ignore_eos=True)
    for top_k in (300, 2**31, 2**63, 2**70):
        wide = server.generate(PROMPT, max_tokens=12, logprobs=1, top_k=top_k, seed=4, ignore_eos=True)
        assert server.same(flat(wide), flat(whole))
    narrow = server.generate(PROMPT, max_tokens=12, logprobs=1, top_k=1, seed=4, ignore_eos=True)
    assert flat(narrow)[0] == greedy[0] and set(flat(narrow)[1]) == {0.0}
    nucleus = server.generate(PROMPT, max_tokens=12, logprobs=1, top_p=1e-6, seed=4, ignore_eos=True)
    assert flat(nucleus)[0] == greedy[0]
    top = server.generate(PROMPT, max_tokens=12, logprobs=3, temperature=0, ignore_eos=True)
    for entry in top["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3 and entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_prompt_logprobs(server, models):
    prompt = list(range(40, 90))
    reply = server.generate(prompt, max_tokens=1, temperature=1.0, top_p=1.0, prompt_logprobs=1)
    rows = reply["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(prompt)
    for token, row in zip(prompt[1:], rows[1:], strict=True):
        first = next(iter(row.items()))
        assert first[0] == str(token) and math.isfinite(first[1]["logprob"])
        assert len(row) == 2 or first[1]["rank"] == 1
    values = [row[str(token)]["logprob"] for token, row in zip(prompt[1:], rows[1:], strict=True)]
    model = loading.load(models["a"], attn=exact.NAME).eval()
    assert server.same((prompt, values), (prompt, scored(model, prompt)))
    again = server.generate(prompt[:31], max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    mine, before = ([next(iter(row.values()))["logprob"] for row in some[1:]] for some in (again, rows[:31]))
    assert server.same((31, mine), (len(again), before)), "what follows changes no logprob"


def test_logprobs_of_the_whole_vocabulary(server):
    reply = server.generate(PROMPT, max_tokens=3, logprobs=-1, seed=5, ignore_eos=True)
    ids, values = flat(reply)
    assert server.same((ids, values), flat(server.generate(PROMPT, max_tokens=3, logprobs=1, seed=5, ignore_eos=True)))
    for token, value, entry in zip(ids, values, reply["choices"][0]["logprobs"]["content"], strict=True):
        row = {int(one["token"].removeprefix("token_id:")): one["logprob"] for one in entry["top_logprobs"]}
        assert sorted(row) == list(range(300)) and row[token] == value
        assert math.isclose(sum(map(math.exp, row.values())), 1, rel_tol=1e-5)
    server.generate(PROMPT, status=400, max_tokens=3, logprobs=-2)


def test_64_clients_at_once_get_what_each_gets_alone(server):
    async def many(bodies):
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            replies = await asyncio.gather(*(client.post("/inference/v1/generate", json=body) for body in bodies))
        return [flat(reply.json()) for reply in replies]

    bodies = [
        {
            "token_ids": [10 + (i * 7 + k) % 200 for k in range(1 + i % 23)],
            "sampling_params": {
                "max_tokens": 4 + i % 37,
                "seed": i,
                "logprobs": 1,
                "temperature": [1.0, 0.7][i % 2],
                **({"top_p": 0.9} if i % 5 == 0 else {}),
            },
        }
        for i in range(64)
    ]
    together = asyncio.run(many(bodies))
    assert all(map(server.same, together, asyncio.run(many(bodies[::-1]))[::-1]))
    for i in (0, 1, 5, 22, 63):
        assert server.same(together[i], flat(server.post("/inference/v1/generate", bodies[i])))


def test_a_client_that_leaves_frees_its_slot(server):
    body = {"token_ids": PROMPT, "sampling_params": {"ignore_eos": True, "n": 3}}
    before = server.metric("vllm:generation_tokens_total")
    server.post("/pause", {})
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/inference/v1/generate", json=body, timeout=1)
        time.sleep(1)
    finally:
        server.post("/resume", {})
    server.generate(PROMPT, max_tokens=20, ignore_eos=True)
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
    made = server.metric("vllm:generation_tokens_total") - before
    assert made < 100, f"{made} tokens were made, so the requests of a client that left went on"


def test_errors_are_one_line_of_json(server):
    cases = [
        ({"token_ids": list(range(10)) * 32}, "maximum context length is 320"),
        ({"token_ids": []}, "empty"),
        ({"token_ids": [5000]}, "vocabulary"),
        ({"token_ids": PROMPT, "sampling_params": {"max_tokns": 3}}, "did you mean 'max_tokens'"),
        ({"token_ids": PROMPT, "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": PROMPT, "sampling_params": {"presence_penalty": 1.0}}, "not supported"),
        ({"token_ids": PROMPT, "sampling_params": {"stop_token_ids": [9999]}}, "stop_token_ids"),
        ({"token_ids": "hello"}, "token_ids"),
        ({}, "token_ids"),
        ([1], "JSON object"),
    ]
    for body, message in cases:
        error = server.post("/inference/v1/generate", body, 400)["error"]
        assert message in error["message"] and "\n" not in error["message"] and error["code"] == 400
    for path in ("/inference/v1/generate", "/pause", "/resume", "/update_weights"):
        for content in (b"{", b"\xff", b'{"mode": ' + b"[" * 100_000):
            assert server.client.post(path, content=content).status_code == 400
    error = server.post("/inference/v1/generate", {"model": "polcy", "token_ids": PROMPT}, 404)["error"]
    assert "did you mean 'policy'" in error["message"]
    assert server.client.get("/nowhere").status_code == 404
    assert server.client.get("/inference/v1/generate").status_code == 405
    assert "host" in server.post("/init_broadcaster", {}, 400)["error"]["message"]
    nobody = {"host": "127.0.0.1", "port": 1, "session_id": "x", "backend": "gloo", "timeout": 1}
    nobody |= {"rank_offset": 1, "inference_world_size": 1}
    error = server.post("/init_broadcaster", nobody, 400)["error"]["message"]
    assert "the trainer is not at 127.0.0.1:1" in error and "\n" not in error
    asked = {"lora_name": "r4-a8", "lora_path": "nowhere"}
    assert "enable_lora" in server.post("/load_lora_adapter", asked, 400)["error"]["message"]
    assert "keep" in server.post("/pause", {"mode": "abort"}, 400)["error"]["message"]
    assert "JSON object" in server.post("/pause", [], 400)["error"]["message"]
    assert server.metric("rlmake:paused") == 0
    assert server.client.get("/health").status_code == 200
    server.generate(PROMPT, max_tokens=1, presence_penalty=0, repetition_penalty=1.0, min_p=None)


def test_chat_speaks_openai(server, models):
    tokenizer = load_tokenizer(models["a"])
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    options = {
        "model": "policy",
        "messages": messages,
        "seed": 8,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 15,
    }
    reply = client.chat.completions.create(**options)
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    ids, values = flat(server.generate(prompt, max_tokens=15, logprobs=1, seed=8))
    assert reply.usage.prompt_tokens == len(prompt) and reply.usage.completion_tokens == len(ids)
    assert server.same((ids, [entry.logprob for entry in reply.choices[0].logprobs.content]), (ids, values))
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    special = set(tokenizer.all_special_ids)
    text = reply.choices[0].message.content
    whole = tokenizer.decode([token for token in ids if token not in special])
    assert text.rstrip("\ufffd") == whole.rstrip("\ufffd"), "vLLM leaves out a last character that is cut"
    cut = client.chat.completions.create(**options | {"stop": [text[4:6]]})
    assert cut.choices[0].message.content == text[: text.index(text[4:6])] and cut.choices[0].finish_reason == "stop"
    two = client.chat.completions.create(**options | {"n": 2})
    assert len(two.choices) == 2 and two.choices[0].message.content == text


def test_completions_speak_openai(server, models):
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    one = client.completions.create(model="policy", prompt=PROMPT, seed=8, logprobs=1)
    assert (
        one.usage.completion_tokens <= 16 and len(one.choices[0].logprobs.token_logprobs) == one.usage.completion_tokens
    )
    text = load_tokenizer(models["a"]).decode(PROMPT)
    many = client.completions.create(model="policy", prompt=[PROMPT, PROMPT, [50]], seed=8, n=2)
    assert len(many.choices) == 6 and many.choices[0].text == one.choices[0].text == many.choices[2].text
    assert client.completions.create(model="policy", prompt=text, seed=8, max_tokens=4).usage.prompt_tokens > 0


def test_the_renderers_client(server, models):
    """What verifiers' train client does, with the real client of the `renderers` package."""
    from renderers.client import generate

    renderer = make_renderer(models["a"], RendererConfig(name="custom", import_path=CHATML))

    async def go():
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": "hello"}],
                model="policy",
                sampling_params={"temperature": 1.0, "max_tokens": 12, "seed": 3, "routed_experts_prompt_start": 0},
                cache_salt="0",
            )

    result = asyncio.run(go())
    assert len(result["completion_ids"]) == len(result["completion_logprobs"]) > 0
    ids, values = flat(server.generate(result["prompt_ids"], max_tokens=12, logprobs=1, seed=3))
    assert server.same((result["completion_ids"], result["completion_logprobs"]), (ids, values))
