"""Every loss against its formula in float64, gradients included; overflow; one normaliser for the whole step."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlmake.config.loss import CISPOConfig, CustomLossConfig, IcePopConfig, IPOConfig, PPOConfig
from rlmake.core.errors import UserError
from rlmake.trainer import losses
from rlmake.trainer.losses import Streams
from rlmake.trainer.losses.inputs import capped_ratio, k3, probability_gap

N = 400


def example(seed: int = 0, spread: float = 1.0) -> tuple[torch.Tensor, Streams]:
    g = torch.Generator().manual_seed(seed)
    mu = -torch.rand(N, generator=g) * 4
    pi = (mu + spread * torch.randn(N, generator=g)).clamp(max=-1e-3).requires_grad_()
    weights = torch.rand(N, generator=g) + 0.5
    streams = Streams(
        inference_logprobs=mu,
        advantages=torch.randn(N, generator=g),
        loss_mask=torch.rand(N, generator=g) < 0.7,
        rl_weights=weights * (torch.rand(N, generator=g) < 0.8),
        ce_weights=weights * (torch.rand(N, generator=g) < 0.3),
        ref_kl_weights=(torch.rand(N, generator=g) < 0.3).float(),
        ref_logprobs=-torch.rand(N, generator=g) * 4,
        sequences=[100, 0, 250, 50],
    )
    return pi, streams


def reference(config, pi: np.ndarray, s: Streams) -> tuple[float, np.ndarray]:
    """Σ of the rl component and its gradient with respect to log π, float64, token by token."""
    mu, adv = s.inference_logprobs.double().numpy(), s.advantages.double().numpy()
    weights = s.rl_weights.double().numpy() * s.loss_mask.numpy()
    total, grad = 0.0, np.zeros(N)
    for i in range(N):
        a, w, rho = adv[i], weights[i], math.exp(pi[i] - mu[i])
        if w == 0:
            continue
        match config.type:
            case "ipo":
                kept = abs(math.exp(pi[i]) - math.exp(mu[i])) <= config.eps
                capped = min(rho, config.max_importance_ratio)
                value = kept * -config.adv_tau * a * capped
                slope = value
                if config.kl_tau:
                    ell = pi[i] - mu[i]
                    value, slope = value + config.kl_tau * ell**2, slope + 2 * config.kl_tau * ell
            case "icepop":
                kept = config.ratio_low <= rho <= config.ratio_high
                value = slope = kept * -config.adv_tau * a * rho
            case "ppo":
                low, high = 1 - config.clip_low, 1 + config.clip_high
                clipped = min(max(rho, low), high)
                value = -config.adv_tau * min(a * rho, a * clipped)
                slope = value if a * rho <= a * clipped else 0.0
            case "cispo":
                coefficient = min(max(rho, config.ratio_low), config.ratio_high)
                value = -config.adv_tau * coefficient * a * pi[i]
                slope = -config.adv_tau * coefficient * a
        total += w * value
        grad[i] = w * slope
    return total, grad


CONFIGS = [
    IPOConfig(),
    IPOConfig(eps=0.1, adv_tau=0.5, max_importance_ratio=1.5, kl_tau=1e-2),
    IcePopConfig(),
    IcePopConfig(ratio_low=0.7, ratio_high=1.2, adv_tau=2.0),
    PPOConfig(),
    CISPOConfig(),
    CISPOConfig(ratio_low=0.8, ratio_high=1.3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.type}-{CONFIGS.index(c)}")
def test_rl_losses_and_their_gradients_are_the_formulas(config):
    pi, streams = example()
    streams.ce_weights = streams.ref_kl_weights = streams.ref_logprobs = None
    rl, token_wise = losses.build(config)
    outputs = losses.compute(pi, streams, streams.counts(), rl, token_wise)
    outputs.loss.backward()
    wanted, grad = reference(config, pi.detach().double().numpy(), streams)
    n = (streams.rl_weights.double() * streams.loss_mask).sum().item()
    assert outputs.sums[0].item() == pytest.approx(wanted, rel=2e-5)
    assert outputs.loss.item() == pytest.approx(wanted / n, rel=2e-5)
    np.testing.assert_allclose(pi.grad.numpy(), grad / n, rtol=2e-5, atol=1e-9)


def test_ce_and_ref_kl_are_the_formulas_and_not_confined_to_the_loss_mask():
    pi, streams = example()
    streams.loss_mask = torch.zeros(N, dtype=torch.bool)
    counts = streams.counts()
    assert counts.tolist() == [0, (streams.ce_weights != 0).sum(), streams.ref_kl_weights.sum()]
    rl, token_wise = losses.build(IPOConfig())
    outputs = losses.compute(pi, streams, counts, rl, token_wise)
    outputs.loss.backward()
    p, mu, ref = (t.detach().double().numpy() for t in (pi, streams.inference_logprobs, streams.ref_logprobs))
    ce = -(p * streams.ce_weights.double().numpy())
    kept = (streams.ref_kl_weights.numpy() != 0) & ~(np.exp(p) - np.exp(mu) < -0.2)
    kl = np.where(kept, -(ref - p) * np.minimum(np.exp(p - mu), 1e4), 0.0)
    assert outputs.sums.tolist() == pytest.approx([0.0, ce.sum(), kl.sum()], rel=1e-5)
    slope = -streams.ce_weights.double().numpy() / counts[1].item() + kl / counts[2].item()
    np.testing.assert_allclose(pi.grad.numpy(), slope, rtol=2e-5, atol=1e-8)


def test_statistics_are_about_the_right_tokens():
    pi, streams = example()
    rl, token_wise = losses.build(IPOConfig(eps=0.1))
    tokens = losses.compute(pi, streams, streams.counts(), rl, token_wise).tokens
    member = streams.loss_mask & (streams.rl_weights != 0)
    kl, about = tokens["mismatch_kl"]
    assert torch.equal(about, member | (streams.loss_mask & (streams.ref_kl_weights != 0)))
    ell = (pi.detach().double() - streams.inference_logprobs.double())[about]
    np.testing.assert_allclose(kl[about].numpy(), (ell.exp() - ell - 1).numpy(), rtol=1e-3, atol=1e-7)
    masked, about = tokens["is_masked"]
    gap = (pi.detach().double().exp() - streams.inference_logprobs.double().exp()).abs()
    assert torch.equal(about, member) and torch.equal(masked[member] != 0, (gap > 0.1)[member])
    assert torch.equal(tokens["masked_mismatch_kl"][1] | tokens["unmasked_mismatch_kl"][1], member)


def one(pi: float, mu: float, adv: float, in_loss: bool, config=None):
    logprobs = torch.tensor([pi, -1.0], requires_grad=True)
    streams = Streams(
        torch.tensor([mu, -1.0]), torch.tensor([adv, 1.0]), torch.tensor([in_loss, True]), None, None, None, None, [2]
    )
    rl, token_wise = losses.build(config or IPOConfig())
    outputs = losses.compute(logprobs, streams, streams.counts(), rl, token_wise)
    outputs.loss.backward()
    return outputs, logprobs.grad


@pytest.mark.parametrize("config", [IPOConfig(), IcePopConfig(), PPOConfig(), CISPOConfig()], ids=lambda c: c.type)
@pytest.mark.parametrize("mu", [-91.0, -math.inf])
def test_a_ratio_beyond_fp32_stays_finite(config, mu):
    for adv, in_loss in ((1.0, True), (-1.0, True), (0.0, True), (1.0, False)):
        outputs, grad = one(-2.0, mu, adv, in_loss, config)
        assert outputs.loss.isfinite() and grad.isfinite().all(), (adv, in_loss)
        if not in_loss:
            assert grad[0] == 0
        if adv == 0.0:
            assert grad[0] == 0
    seen = sum(outputs.tokens[name][0][0].item() for outputs in [one(-2.0, mu, 1.0, True, config)[0]]
               for name in ("is_masked", "is_clamped"))  # fmt: skip
    assert seen >= 1, "the token that overflowed shows in no counter"


def test_ipo_keeps_the_gradient_of_a_capped_ratio():
    outputs, grad = one(-2.0, -91.0, 1.0, True)
    assert grad[0].item() == pytest.approx(-1e4 / 2)
    assert outputs.tokens["is_clamped"][0].tolist() == [1.0, 0.0]


def test_a_nan_outside_the_mask_touches_nothing_and_inside_is_seen():
    _, grad = one(-2.0, math.nan, 1.0, False)
    assert grad.isfinite().all() and grad[0] == 0
    outputs, _ = one(math.nan, -1.0, 1.0, True)
    assert outputs.sums[0].isnan()


def test_probability_gap_has_no_cancellation_and_k3_no_overflow():
    p, m = torch.tensor([-1e-6, -2.0]), torch.tensor([-1.1e-6, -2.0])
    wanted = math.exp(-1e-6) * -math.expm1(-1e-7)
    gap = probability_gap(p, m)
    assert gap[0].item() == pytest.approx(wanted, rel=2e-2) and gap[1].item() == 0
    assert k3(torch.tensor([0.0]), torch.tensor([-200.0])).isfinite().all()
    assert capped_ratio(torch.tensor([-1.0]), torch.tensor([-3.0]), 2.0).item() == pytest.approx(2.0)


# ---- one normaliser -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[1] * 9, [4, 3, 2], [8, 1], [9]])
def test_the_split_into_micro_batches_changes_nothing(cuts):
    """Also a micro-batch without members, which changes nothing."""
    pi, streams = example(seed=3)
    size = N // 9
    rl, token_wise = losses.build(IPOConfig())
    whole = slice(0, 9 * size)

    def part(where: slice) -> Streams:
        values = {k: v[where] if isinstance(v, torch.Tensor) else v for k, v in vars(streams).items()}
        return Streams(**{**values, "sequences": [where.stop - where.start]})

    counts = part(whole).counts()
    losses.compute(pi[whole], part(whole), counts, rl, token_wise).loss.backward()
    wanted, pi.grad = pi.grad.clone(), None
    ends, total = np.cumsum([0, *cuts]) * size, torch.zeros(3, dtype=torch.float64)
    for a, b in itertools.pairwise(ends):
        piece = part(slice(int(a), int(b)))
        total += piece.counts()
        losses.compute(pi[int(a) : int(b)], piece, counts, rl, token_wise).loss.backward()
    idle = part(slice(0, size))
    idle.loss_mask, idle.ce_weights, idle.ref_kl_weights = torch.zeros(size, dtype=torch.bool), None, None
    losses.compute(pi[:size], idle, counts, rl, token_wise).loss.backward()
    assert torch.allclose(total, counts)
    torch.testing.assert_close(pi.grad, wanted, rtol=1e-5, atol=1e-9)


def test_the_step_mean_is_over_tokens_not_over_micro_batches():
    """Sums and counts (8, 4), (4, 4), (3, 1): 15 / 9, not the mean 2.0 of the means."""
    rl, token_wise = losses.build(IPOConfig())
    total = 0.0
    for value, count in ((2.0, 4), (1.0, 4), (3.0, 1)):
        zero = torch.zeros(count)
        s = Streams(zero, zero, torch.zeros(count, dtype=torch.bool), None, torch.ones(count), None, None, [count])
        logprobs = torch.full((count,), -value, requires_grad=True)
        total += losses.compute(logprobs, s, torch.tensor([0.0, 9.0, 0.0]).double(), rl, token_wise).loss.item()
    assert total == pytest.approx(15 / 9)


# ---- custom ---------------------------------------------------------------------------------------------------------


def test_a_custom_loss_sees_one_sequence_at_a_time(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlmake.trainer.losses import LossOutputs\n"
        "def loss(inputs, scale):\n"
        "    value = (inputs.trainer_logprobs * inputs.loss_mask).sum() ** 2 * scale\n"
        "    return LossOutputs(value, {'squares': value.detach(), 'scale': scale})\n"
    )
    pi, streams = example()
    rl, token_wise = losses.build(CustomLossConfig(import_path=f"{file}:loss", kwargs={"scale": 2.0}))
    assert not token_wise
    streams.rl_weights = streams.ce_weights = streams.ref_kl_weights = None
    outputs = losses.compute(pi, streams, streams.counts(), rl, token_wise)
    parts = (pi.detach() * streams.loss_mask).split(streams.sequences)
    wanted = [2.0 * part.sum().item() ** 2 for part in parts]
    assert outputs.sums[0].item() == pytest.approx(sum(wanted), rel=1e-5)
    assert outputs.scalars["scale"].item() == 2.0
    assert outputs.scalars["squares"].item() == pytest.approx(sum(wanted) / 3, rel=1e-5)


@pytest.mark.parametrize(
    "body, said",
    [
        ("return inputs.advantages", "gave a Tensor of shape"),
        ("return LossOutputs(inputs.trainer_logprobs)", "gave a LossOutputs of shape"),
        ("return None", "gave a NoneType"),
        ("return LossOutputs(0.0)", "gave a LossOutputs"),
    ],
)
def test_what_a_custom_loss_must_return(tmp_path, body, said):
    file = tmp_path / "own.py"
    file.write_text(f"from rlmake.trainer.losses import LossOutputs\ndef loss(inputs):\n    {body}\n")
    rl, token_wise = losses.build(CustomLossConfig(import_path=f"{file}:loss"))
    pi, streams = example()
    with pytest.raises(UserError, match=f"own.py:loss' must return LossOutputs .*{said}"):
        losses.compute(pi, streams, streams.counts(), rl, token_wise)


@pytest.mark.parametrize("metrics", ["None", "{'mine': 'text'}", "{'mine': None}"])
def test_what_the_metrics_of_a_custom_loss_must_be(tmp_path, metrics):
    file = tmp_path / "own.py"
    body = f"return LossOutputs(inputs.trainer_logprobs.sum(), {metrics})"
    file.write_text(f"from rlmake.trainer.losses import LossOutputs\ndef loss(inputs):\n    {body}\n")
    rl, token_wise = losses.build(CustomLossConfig(import_path=f"{file}:loss"))
    pi, streams = example()
    with pytest.raises(UserError, match=r"own\.py:loss' must return its metrics as a table of tensors or numbers"):
        losses.compute(pi, streams, streams.counts(), rl, token_wise)


@pytest.mark.parametrize(
    "text, said",
    [
        ("def loss(inputs): pass", "cannot be called with one argument, scale: got an unexpected keyword argument"),
        ("def loss(scale): pass", "cannot be called with one argument, scale: multiple values"),
        ("def loss(:", "cannot import '.*own.py:loss': SyntaxError"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*own.py:1\)"),
        ("loss = 3", "is not a function"),
    ],
)
def test_a_custom_loss_that_cannot_be_called_is_one_line(tmp_path, text, said):
    (tmp_path / "own.py").write_text(text + "\n")
    with pytest.raises(UserError, match=f"trainer.loss.import_path: .*{said}"):
        losses.build(CustomLossConfig(import_path=f"{tmp_path}/own.py:loss", kwargs={"scale": 1.0}))


@pytest.mark.parametrize("path", ["no.such.module.f", "rlmake.trainer.losses.no_such", "nowhere.py:f", "plain"])
def test_an_import_path_that_leads_nowhere_is_one_line(path):
    with pytest.raises(UserError, match=r"trainer\.loss\.import_path"):
        losses.build(SimpleNamespace(type="custom", import_path=path, kwargs={}))
