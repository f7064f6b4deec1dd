"""Sampling against float64 references: the uniform numbers, the distribution drawn from, and the filters."""

import math

import numpy as np
import pytest
import torch

from rlmake.inference.engines.base import Sampling
from rlmake.inference.engines.sampling import sample, uniforms
from rlmake.inference.metrics import render
from rlmake.inference.replies import split_calls


def draw(logits, rows, seeds=None, positions=None):
    count = len(rows)
    seeds = seeds if seeds is not None else range(count)
    positions = positions if positions is not None else [0] * count
    return sample(logits, rows, seeds, positions, [0] * count)


def test_uniform_numbers():
    def one(seed, position):  # splitmix64's finaliser in plain integers
        mask = 2**64 - 1
        x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53

    pairs = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 511), (-5, 3), (2**80 + 7, 2)]
    found = uniforms([s for s, _ in pairs], [p for _, p in pairs])
    assert found.tolist() == [one(s, p) for s, p in pairs]
    many = uniforms(list(range(100)) * 100, np.repeat(np.arange(100), 100).tolist())
    assert many.min() >= 0 and many.max() < 1 and len(set(many.tolist())) == 10_000
    assert abs(many.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 10_000)


def test_frequencies_and_logprobs():
    torch.manual_seed(0)
    logits = torch.randn(1, 20) * 2
    count = 20_000
    for temperature in (1.0, 0.5):
        rows = [Sampling(max_tokens=1, temperature=temperature)] * count
        tokens, logprobs, _ = draw(logits.expand(count, 20).contiguous(), rows)
        expected = torch.log_softmax(logits[0].double() / temperature, -1)
        np.testing.assert_allclose(logprobs, expected[tokens], rtol=0, atol=2e-6)
        shares = np.bincount(tokens, minlength=20) / count
        error = np.sqrt(expected.exp().numpy() * (1 - expected.exp().numpy()) / count)
        assert (np.abs(shares - expected.exp().numpy()) <= 5 * error + 1e-9).all()


def kept(logits, **options):
    """The tokens that can be drawn, and their logprobs."""
    count = 500
    rows = [Sampling(max_tokens=1, **options)] * count
    tokens, logprobs, _ = draw(logits.expand(count, -1).contiguous(), rows)
    return dict(zip(tokens, logprobs, strict=True))


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.74}, {0, 1}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.31}, {0, 1}),
        ({"min_p": 0.1, "top_k": 3}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 0, "top_p": 1.0}, {0, 1, 2, 3}),
    ],
)
def test_filters(options, expected):
    probabilities = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)
    found = kept(probabilities.log().float(), **options)
    assert set(found) == expected
    total = sum(float(probabilities[0, token]) for token in expected)
    for token, logprob in found.items():
        assert logprob == pytest.approx(math.log(float(probabilities[0, token]) / total), abs=1e-6)


def test_rows_do_not_disturb_one_another():
    torch.manual_seed(1)
    logits = torch.randn(5, 50)
    rows = [
        Sampling(max_tokens=1),
        Sampling(max_tokens=1, temperature=0.0),
        Sampling(max_tokens=1, top_k=3, top_logprobs=2),
        Sampling(max_tokens=1, temperature=0.3, top_p=0.8),
        Sampling(max_tokens=1, min_tokens=1, stop_ids=frozenset([int(logits[4].argmax())])),
    ]
    together = draw(logits, rows, seeds=[7] * 5)
    for i, row in enumerate(rows):
        alone = draw(logits[i : i + 1].clone(), [row], seeds=[7])
        assert (together[0][i], together[1][i]) == (alone[0][0], alone[1][0])
    assert together[0][1] == int(logits[1].argmax())
    assert [entry.rank for entry in together[2][2]] == [1, 2] and together[2][0] == []
    assert together[0][4] != int(logits[4].argmax())


def test_a_draw_never_lands_on_what_is_left_out(monkeypatch):
    """The extreme draws: 0 with a first token of probability zero, and one that rounds up to the total."""
    from rlmake.inference.engines import sampling

    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    for extreme in (0.0, 1.0 - 2.0**-53, 1.0):
        monkeypatch.setattr(sampling, "uniforms", lambda seeds, positions, u=extreme: np.array([u]))
        tokens, logprobs, _ = draw(logits, [Sampling(max_tokens=1)])
        assert tokens[0] in (1, 2) and logprobs[0] == pytest.approx(math.log(0.5))


def test_split_calls():
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    text, calls = split_calls(f"so\n{call}\n{call}")
    assert text == "so" and [c["function"] for c in calls] == [{"name": "look", "arguments": '{"at": "é"}'}] * 2
    assert split_calls("<tool_call>no json</tool_call>") == ("<tool_call>no json</tool_call>", [])
    assert split_calls('<tool_call>["x"]</tool_call>')[1] == []
    assert split_calls("plain") == ("plain", [])


def test_metrics_text():
    from rlmake.inference.engines.base import Stats

    stats = Stats(1, 2, 0.5, 100, 0, 3, 4, {"stop": 5}, 6, False)
    text = render(stats, 'a"b\\c')
    assert 'vllm:num_requests_running{model_name="a\\"b\\\\c"} 1' in text.splitlines()
    assert 'vllm:cache_config_info{block_size="1",num_gpu_blocks="100"} 1' in text
