"""The embedded engine itself: exact to the trainer, and no completion depends on its company."""

from concurrent.futures import wait

import pytest
import torch

from rlmake.config import InferenceConfig
from rlmake.inference.engines.base import EngineFailed, Refused, Sampling
from rlmake.inference.engines.transformers import TransformersEngine
from rlmake.models import exact


def engine_of(model, **transformers):
    cfg = {"device": "cpu", "engine": "transformers", "cpu_threads": 1, "transformers": transformers}
    return TransformersEngine(InferenceConfig(**cfg, vllm={"model": str(model), "max_model_len": 400}))


def requests(count=28):
    """Ragged prompts (some equal, as in a group), lengths and temperatures."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=generator))  # noqa: E731
    prompts = [tuple(torch.randint(9, 290, (draw(1, 60),), generator=generator).tolist()) for _ in range(count // 2)]
    return [
        (
            prompts[i // 2],
            Sampling(
                max_tokens=draw(1, 50),
                temperature=[1.0, 0.6, 1.3][i % 3],
                seed=i,
                top_p=1.0 if i % 7 else 0.95,
                top_k=0 if i % 9 else 20,
            ),
        )
        for i in range(count)
    ] + [(tuple(range(20, 210)), Sampling(max_tokens=30, seed=900 + i)) for i in range(3)]


def run(engine, asked):
    futures = [engine.submit(prompt, sampling, None) for prompt, sampling in asked]
    return [(future.result(120).token_ids, future.result().logprobs) for future in futures]


@pytest.fixture(scope="module")
def reference(models):
    engine = engine_of(models["a"])
    yield run(engine, requests()), engine
    engine.close()


@pytest.mark.parametrize("slots, prefill", [(16, 2048), (5, 64)])
def test_company_changes_nothing(models, reference, slots, prefill):
    engine = engine_of(models["a"], max_slots=slots, prefill_tokens=prefill)
    try:
        asked = requests()
        assert run(engine, asked) == reference[0]
        assert run(engine, asked[::-1])[::-1] == reference[0]
        assert run(engine, asked[7:8]) == reference[0][7:8]
    finally:
        engine.close()


def test_logprobs_are_the_trainers_bit_for_bit(models, reference):
    """All completions in one packed row with autograd, the trainer's way, give the very floats that were sampled."""
    from rlmake.models import loading

    model = loading.load(models["a"], attn=exact.NAME)
    asked, found = requests(), reference[0]
    kept = [i for i, (_, sampling) in enumerate(asked) if sampling.top_p == 1.0 and not sampling.top_k]
    docs = [[*asked[i][0], *found[i][0]] for i in kept]
    lens = [len(doc) for doc in docs]
    ids, positions = (
        torch.tensor([token for doc in docs for token in doc])[None],
        torch.cat([torch.arange(n) for n in lens])[None],
    )
    hidden = exact.packed_forward(model, ids, positions, lens)
    temperatures = torch.cat([torch.full((n,), asked[i][1].temperature) for i, n in zip(kept, lens, strict=True)])
    logprobs, _ = exact.token_logprobs(hidden, model.lm_head.weight, ids[0].roll(-1), temperatures)
    compared = 0
    for i, row in zip(kept, logprobs.split(lens), strict=True):
        mine = row[len(asked[i][0]) - 1 : -1].tolist()
        assert mine == found[i][1]
        compared += len(mine)
    assert compared > 300


def test_stop_texts_and_min_tokens(reference):
    _, engine = reference
    whole = engine.submit((30, 40), Sampling(max_tokens=40, seed=1), None).result(60)
    text = engine.tokenizer.decode(whole.token_ids)
    stop = text[10:12]
    cut = engine.submit((30, 40), Sampling(max_tokens=40, seed=1, stop=(stop, "\0never")), None).result(60)
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    ends = frozenset(range(200))
    early = engine.submit((30, 40), Sampling(max_tokens=40, seed=1, stop_ids=ends), None).result(60)
    late = engine.submit((30, 40), Sampling(max_tokens=40, seed=1, stop_ids=ends, min_tokens=9), None).result(60)
    assert len(early.token_ids) < 9 <= len(late.token_ids) - 1 and not ends & set(late.token_ids[:9])


def test_cancelled_requests_leave(reference):
    _, engine = reference
    engine.pause()
    futures = [engine.submit((30, 40), Sampling(max_tokens=100), None) for _ in range(100)]
    assert engine.stats().waiting == 100
    assert all(future.cancel() for future in futures[1:])
    engine.resume()
    assert len(futures[0].result(60).token_ids) > 0
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert engine.stats().finished["abort"] >= 99


def test_weights_that_give_nan_fail_the_request_and_not_the_engine(models, tmp_path):
    from safetensors.torch import load_file, save_file

    engine = engine_of(models["a"])
    try:
        tensors = load_file(models["a"] / "model.safetensors")
        tensors["model.norm.weight"][0] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors")
        good = engine.submit((30, 40), Sampling(max_tokens=5, seed=1), None).result(60)
        engine.update_weights(tmp_path, 1)
        with pytest.raises(EngineFailed, match="not finite"):
            engine.submit((30, 40), Sampling(max_tokens=5, seed=1), None).result(60)
        engine.update_weights(models["a"], 2)
        assert engine.submit((30, 40), Sampling(max_tokens=5, seed=1), None).result(60).logprobs == good.logprobs
        assert engine.stats().version == 2
    finally:
        engine.close()


def test_end_fails_what_is_open(models):
    engine = engine_of(models["a"])
    engine.pause()
    future = engine.submit((30, 40), Sampling(max_tokens=5), None)
    engine.close()
    assert wait([future], 5).done
    with pytest.raises(EngineFailed):
        future.result()
    with pytest.raises(EngineFailed):
        engine.submit((30,), Sampling(max_tokens=5), None)
    assert not engine.alive(10)


def test_refusals(reference):
    _, engine = reference
    for prompt, message in (
        ((), "empty"),
        (tuple([5] * 400), "maximum context"),
        ((5000,), "vocabulary"),
        ((-1,), "voc"),
    ):
        with pytest.raises(Refused, match=message):
            engine.submit(prompt, Sampling(max_tokens=1), None)


def test_bfloat16_runs(models):
    engine = engine_of(models["a"], dtype="bfloat16")
    try:
        done = engine.submit((30, 40, 50), Sampling(max_tokens=20, seed=1), None).result(60)
        assert len(done.token_ids) > 0 and max(done.logprobs) <= 0
    finally:
        engine.close()
