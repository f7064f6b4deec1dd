"""Offloading on a GPU: the same bits, less of the card's memory. Skipped without one."""

from types import SimpleNamespace

import pytest
import torch
from test_sft_run import CONSTANT, run, tensors, trace
from test_sft_run import config as config  # the fixture
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlmake.config.optim import AdamWConfig, MuonConfig, SGDConfig
from rlmake.trainer import checkpoint, optim
from rlmake.trainer.activations import Offloading
from rlmake.trainer.recompute import recompute

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAYERS, TOKENS, WIDTH, MOST = 12, 1024, 512, 2


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_leave_the_card_and_come_back_with_their_bits(mode, pin):
    found = []
    for offload in (False, True):
        shape = Qwen3Config(
            num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
            intermediate_size=1024, vocab_size=331, max_position_embeddings=TOKENS,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        shape._attn_implementation = "eager"  # deterministic as it is
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(shape).cuda().train()
        blocks = list(model.model.layers)
        recompute(model, blocks, SimpleNamespace(freq=1, mode=mode, targets=["norm"]))
        if offload:
            table = SimpleNamespace(max_inflight_activations=MOST, pin_memory=pin)
            Offloading(table, torch.device("cuda")).apply(blocks)
        ids = torch.arange(TOKENS, device="cuda")[None] % 331
        for _ in range(3):
            model.zero_grad()
            before = allocated()
            out = model.model(input_ids=ids, use_cache=False).last_hidden_state
            kept = allocated() - before
            out.square().sum().backward()
        found.append((kept, out.detach().cpu(), [p.grad.cpu() for p in model.parameters() if p.grad is not None]))
        del model, blocks, out
    (plain, out, grads), (less, moved, others) = found
    assert torch.equal(out, moved) and all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert plain - less >= (LAYERS - MOST - 1) * TOKENS * WIDTH * 4, (plain, less)


@pytest.mark.parametrize("kind", [AdamWConfig, SGDConfig, MuonConfig])
def test_moments_leave_the_card_and_the_update_keeps_its_bits(kind):
    found = []
    for on_host in (False, True):
        g = torch.Generator().manual_seed(0)
        named = [(f"{i}.weight", nn.Parameter(torch.randn(512, 512, generator=g).cuda())) for i in range(16)]
        before = allocated()
        optimizer = optim.build(kind(lr=1e-2, weight_decay=0.01), named)
        optim.ensure_state(optimizer, on_host)
        held = allocated() - before
        for _ in range(3):
            for _, p in named:
                p.grad = torch.randn(p.shape, generator=g).cuda()
            optim.step(optimizer, on_host)
        state = checkpoint.tensors_of(named, optimizer)
        moments = [value for key, value in state.items() if key.startswith("optim.") and value.ndim]
        assert moments and all(value.is_pinned() if on_host else value.is_cuda for value in moments)
        found.append((held, {key: value.cpu() for key, value in state.items()}))
        del named, optimizer, state, moments, p
    (plain, a), (less, b) = found
    assert a.keys() == b.keys() and [key for key in a if not torch.equal(a[key], b[key])] == []
    assert plain >= 16 * 512 * 512 * 4 and less < plain / 100


@pytest.mark.parametrize(
    "keys", [{"ac_offloading": {}, "optim_cpu_offload": True}, {"fsdp_cpu_offload": True}], ids=str
)
def test_a_run_offloads_saves_and_goes_on_without(config, tmp_path, keys):
    """Attention's backward pass sums in any order on a GPU: to rounding."""
    gpu = {"deployment": {"gpus_per_node": 1, "num_train_gpus": 1, "num_infer_gpus": 0}, "scheduler": CONSTANT}
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    run(config(plain, max_steps=4, **gpu))
    run(config(moved, max_steps=2, model=keys, **gpu))
    run(config(moved, max_steps=4, resume={"step": 2}, **gpu), attempt=2)
    for (loss, *_), (other, *_) in zip(trace(plain), trace(moved), strict=True):
        assert other == pytest.approx(loss, rel=1e-2)
    assert tensors(plain, 4).keys() == tensors(moved, 4).keys()
