"""The exact forward: the same bits packed, alone, reordered, with gradients and decoded; and it computes attention."""

import pytest
import torch
import torch.nn.functional as F

from rlmake.core.errors import UserError
from rlmake.models import exact, loading, packed
from rlmake.models.logprobs import score
from rlmake.models.packing import SHORT, Plan, key_rows, query_rows

LENS = (1, 3, 16, 17, 40, 64, 65, 100, 192, 193, 300)


def model_of(attn=exact.NAME, **changes):
    from transformers import Qwen3Config

    table = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 160, "vocab_size": 331, "max_position_embeddings": 1024, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.1,
    }  # fmt: skip
    torch.manual_seed(0)
    return loading.build(Qwen3Config(**{**table, **changes}), attn=attn, device="cpu").eval()


def documents(lens, vocabulary=331):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lens]


def forward(model, docs, function=exact.packed_forward):
    lens = [len(doc) for doc in docs]
    ids, positions = torch.cat(docs)[None], torch.cat([torch.arange(n) for n in lens])[None]
    return function(model, ids, positions, lens).split(lens)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [{}, {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}])
def test_self_test_passes(threads, shape):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = exact.self_test(model_of(**shape), lens=(1, 2, 5, 33, 130, 195, 260), decoded=12)
    finally:
        torch.set_num_threads(before)
    assert result.ok, str(result)
    assert result.threads == threads


def test_self_test_can_fail(monkeypatch):
    """With the decode step's row rule broken (one row per head) or a wrong mask the test says so."""
    model = model_of()
    true = exact.Decode.of
    monkeypatch.setattr(exact.Decode, "of", lambda cache, at: true(cache, (at - 1).clamp_min(0)))
    result = exact.self_test(model, lens=(20, 33), decoded=3)
    assert not result.ok and result.packed_vs_decoded > 1e-3 and result.packed_vs_alone == 0
    assert "NOT exact" in str(result)


def test_order_company_and_gradients_change_no_bit():
    model, docs = model_of(), documents(LENS)
    together = forward(model, docs)
    backwards = forward(model, docs[::-1])[::-1]
    with torch.no_grad():
        alone = [forward(model, [doc])[0] for doc in docs]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("function, attn", [(exact.packed_forward, exact.NAME), (packed.packed_forward, packed.NAME)])
def test_values_and_gradients_against_float64(function, attn):
    """Against transformers' own eager attention in float64, one document at a time: nothing leaks, nothing is lost."""
    model, docs = model_of(attn), documents((1, 7, 16, 30, 70, 200))
    reference = model_of("eager").double()
    weights = [torch.randn(len(doc), 64, dtype=torch.float64) for doc in docs]
    for part, weight in zip(forward(model, docs, function), weights, strict=True):
        (part * weight).sum().backward(retain_graph=True)
    for doc, weight, part in zip(docs, weights, forward(model, docs, function), strict=True):
        hidden = reference.model(input_ids=doc[None]).last_hidden_state[0]
        torch.testing.assert_close(part.double(), hidden, rtol=1e-4, atol=1e-5)
        (hidden * weight).sum().backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("function, attn", [(exact.packed_forward, exact.NAME), (packed.packed_forward, packed.NAME)])
def test_nan_of_one_document_stays_there(function, attn):
    model, docs = model_of(attn), documents((20, 21, 22))
    with torch.no_grad():
        model.model.embed_tokens.weight[330] = float("nan")
    docs[0][docs[0] == 330], docs[2][docs[2] == 330] = 1, 1
    docs[1][0] = 330
    first, second, third = forward(model, docs, function)
    assert torch.isfinite(first).all() and torch.isfinite(third).all() and second.isnan().any()


def test_engine_and_trainer_score_alike():
    """The sampled token's logprob from single hidden rows equals that from the packed row, temperatures too."""
    model, docs = model_of(), documents((5, 60, 61))
    with torch.no_grad():
        hidden = torch.cat(forward(model, docs))
    targets, temperatures = torch.cat(docs).roll(-1), torch.linspace(0.3, 1.7, len(hidden))
    whole, entropy = exact.token_logprobs(hidden, model.lm_head.weight, targets, temperatures)
    for row in (0, 4, 17, 125):
        at = slice(row, row + 1)
        assert torch.equal(score(hidden[at], model.lm_head.weight, targets[at], temperatures[at]), whole[at])
    assert not entropy.requires_grad


@pytest.mark.parametrize("head_dim", [32, 20])
def test_tabulated_angles_are_the_bits_of_computed_ones(head_dim):
    model = model_of(head_dim=head_dim)
    rotary, x = model.model.rotary_emb, torch.zeros(1)
    asked = [torch.randperm(1000)[None], *(torch.tensor([[n]]) for n in (0, 1, 15, 16, 999)), torch.arange(37)[None]]
    computed = [rotary(x, positions) for positions in asked]
    exact.tabulate(model, 1000)
    assert isinstance(model.model.rotary_emb, exact.RotaryTable)
    for positions, (cos, sin) in zip(asked, computed, strict=True):
        found = model.model.rotary_emb(x, positions)
        assert torch.equal(found[0], cos) and torch.equal(found[1], sin)
    scaled = model_of(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    before = scaled.model.rotary_emb
    exact.tabulate(scaled, 1000)
    assert scaled.model.rotary_emb is before, "its angles depend on the longest position of a call"


@pytest.mark.parametrize("keep", [True, False])
def test_logprobs_and_their_gradients_against_float64(keep, monkeypatch):
    from rlmake.models import logprobs

    monkeypatch.setattr(logprobs, "CHUNK_VALUES", 331 * 16)
    if not keep:
        monkeypatch.setattr(logprobs, "KEEP_VALUES", 0)
    torch.manual_seed(3)
    hidden, weight = torch.randn(45, 64, requires_grad=True), torch.randn(331, 64, requires_grad=True)
    targets, temperatures, grad = torch.randint(0, 331, (45,)), torch.rand(45) + 0.5, torch.randn(45)
    logp, entropy = logprobs.token_logprobs(hidden, weight, targets, temperatures)
    (logp * grad).sum().backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    z = F.log_softmax(h @ w.T / temperatures.double()[:, None], -1)
    expected = z.gather(1, targets[:, None])[:, 0]
    (expected * grad.double()).sum().backward()
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(z.exp() * z).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), h.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), w.grad, rtol=1e-4, atol=1e-4)
    plain = logprobs.token_logprobs(hidden, weight, targets)[0]
    assert torch.equal(plain, logprobs.token_logprobs(hidden, weight, targets, torch.ones(45))[0])


def test_plan_covers_every_token_once():
    plan = Plan.of(LENS)
    row = torch.arange(sum(LENS))
    flat = torch.cat([row[bucket.queries].flatten() for bucket in plan.buckets])
    assert torch.equal(flat[plan.back], row)
    for length in range(1, 1100):
        rows, keys = query_rows(length), key_rows(length)
        assert length <= rows <= keys and rows % 16 == 0 and keys % 16 == 0
        assert keys <= SHORT or keys % 512 == 0
    with pytest.raises(ValueError, match="at least one token"):
        Plan.of([3, 0])


def test_what_it_cannot_serve_is_refused():
    model, docs = model_of(), documents((4,))
    with pytest.raises(ValueError, match="sum to 3"):
        exact.packed_forward(model, docs[0][None], torch.arange(4)[None], [3])
    with pytest.raises(UserError, match="sliding_attention"):
        exact.require(model_of(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True).config)
    with pytest.raises(ValueError, match="context"):
        model(input_ids=docs[0][None])
