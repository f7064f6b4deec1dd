"""Selective recomputation: the same numbers, and one compilation for all blocks."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlmake.core.errors import UserError
from rlmake.trainer.recompute import TARGETS, recompute

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def chosen(*targets):
    return SimpleNamespace(mode="selective", freq=1, targets=list(targets))


def loss_of(model):
    ids = torch.arange(24)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=32, num_hidden_layers=4, **SHAPE))


@pytest.mark.parametrize("targets", [*([name] for name in TARGETS), list(TARGETS)], ids=str)
def test_parts_are_computed_again_and_no_number_changes(model, targets):
    plain, calls = copy.deepcopy(model), 0
    recompute(model, list(model.model.layers), chosen(*targets))
    original = type(model.model.layers[0].mlp.act_fn).forward

    def counted(self, hidden):
        nonlocal calls
        calls += 1
        return original(self, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model.layers[0].mlp.act_fn), "forward", counted)
        assert loss_of(model).item() == loss_of(plain).item()
    assert calls == (12 if "mlp" in targets else 8), "four blocks of each model; the first model's again"
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name


def test_blocks_share_what_was_compiled_for_the_first(model):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    recompute(model, list(model.model.layers), chosen("norm", "mlp"))
    for block in model.model.layers:
        block.compile(backend="eager")
    loss_of(model)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_part_that_a_block_lacks_is_named(model):
    del model.model.layers[0].mlp
    with pytest.raises(UserError, match=r"model.ac.targets: .* no part 'mlp'"):
        recompute(model, list(model.model.layers)[:1], chosen("mlp"))
