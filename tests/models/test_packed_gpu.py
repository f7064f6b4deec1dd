"""Packed attention on a GPU: flash attention of variable length in bf16, buckets in fp32. Skipped without one."""

import pytest
import torch

from rlmake.models import packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENS = ((1, 7, 64, 130, 300, 1000), (700,))


def model_of(attn, dtype):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=2, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        intermediate_size=512, vocab_size=331, max_position_embeddings=2048, initializer_range=0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = attn
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to("cuda", dtype)


def forward(model, docs):
    ids = torch.cat(docs)[None].cuda()
    positions = torch.cat([torch.arange(len(doc)) for doc in docs])[None].cuda()
    lens = [len(doc) for doc in docs]
    return packed.packed_forward(model, ids, positions, lens).split(lens)


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float32, 1e-3)])
def test_values_gradients_and_no_leak(dtype, tolerance, lens):
    model, reference = model_of(packed.NAME, dtype), model_of("eager", torch.float64)
    reference.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    docs = [torch.randint(0, 331, (length,), generator=generator) for length in lens]
    parts = forward(model, docs)
    weights = [torch.randn(part.shape, device="cuda", dtype=torch.float64) for part in parts]
    sum((part.double() * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    for doc, part, weight in zip(docs, parts, weights, strict=True):
        hidden = reference.model(input_ids=doc[None].cuda()).last_hidden_state[0]
        (hidden * weight).sum().backward()
        error = (part.double() - hidden).norm() / hidden.norm()
        assert error < tolerance, (len(doc), float(error))
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        if b.grad is not None and b.grad.norm() > 1e-6:
            error = (a.grad.double() - b.grad).norm() / b.grad.norm()
            assert error < 3 * tolerance, (name, float(error))
    changed = len(docs) // 2
    docs[changed] = (docs[changed] + 1) % 331
    again = forward(model, docs)
    for index, (before, after) in enumerate(zip(parts, again, strict=True)):
        assert torch.equal(before, after) == (index != changed)
