"""What waits in host memory: not a byte of a run changes, and what was copied there is freed again."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from test_sft_run import CONSTANT, run, tensors, trace
from test_sft_run import config as config  # the fixture
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rlmake.config.optim import AdamWConfig, MuonConfig, SGDConfig, SignSGDConfig
from rlmake.models import loading, packed
from rlmake.trainer import checkpoint, optim
from rlmake.trainer.activations import Kept, Offloading
from rlmake.trainer.recompute import recompute

LAYERS, LENS = 8, [40, 56]


class Watched(Offloading):
    """Remembers what it kept, and lets it die."""

    def __init__(self, most: int):
        super().__init__(SimpleNamespace(max_inflight_activations=most, pin_memory=True), torch.device("cpu"))
        self.kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def _keep(self, tensor):
        kept = super()._keep(tensor)
        if isinstance(kept, Kept):
            self.kept.add(kept)
        return kept


@pytest.fixture(scope="module")
def deep(model_dir):
    """The toy with eight blocks."""
    model = loading.load(model_dir, attn=packed.NAME)
    model.model.layers = nn.ModuleList(copy.deepcopy(model.model.layers[i % 2]) for i in range(LAYERS))
    model.model.config.num_hidden_layers = LAYERS
    model.model.config.layer_types = ["full_attention"] * LAYERS
    return model.train()


def hidden(model) -> torch.Tensor:
    ids = torch.arange(sum(LENS))[None] % model.config.vocab_size
    return packed.packed_forward(model, ids, torch.arange(sum(LENS))[None], LENS)


def gradients(model, out: torch.Tensor) -> dict[str, torch.Tensor]:
    out.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("most", [1, 5])
def test_values_and_gradients_keep_their_bits_and_host_copies_die_with_the_backward_pass(deep, mode, most):
    plain, moved = copy.deepcopy(deep), copy.deepcopy(deep)
    for model in (plain, moved):
        recompute(model, model.model.layers, SimpleNamespace(freq=1, mode=mode, targets=["norm"]))
    offloading, inputs = Watched(most), []
    offloading.apply(list(moved.model.layers))
    for block in moved.model.layers:
        block.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    for _ in range(2):  # the second micro-batch finds what the first has left
        plain.zero_grad(), moved.zero_grad(), inputs.clear()
        out = hidden(moved)
        here = [kept for kept in offloading.kept if kept.source is not None]
        assert len(here) == most and all(torch.equal(kept.source, kept.host) for kept in here)
        if mode == "full":
            assert len(offloading.kept) == LAYERS, "the input of every block and nothing else"
            assert [ref.expired() for ref in inputs] == [True] * (LAYERS - most) + [False] * most
        else:
            assert len(offloading.kept) > 3 * LAYERS
        del here
        expected = hidden(plain)
        assert torch.equal(out, expected)
        ours, theirs = gradients(moved, out), gradients(plain, expected)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert len(offloading.kept) == 0
    with torch.no_grad():
        hidden(moved)
    assert len(offloading.kept) == 0


def test_a_compiled_block_gives_away_its_input_alone(deep):
    deep, offloading = copy.deepcopy(deep), Watched(1)
    deep.model.layers = deep.model.layers[:2]
    deep.model.config.num_hidden_layers = 2
    for block in deep.model.layers:
        block.compile(dynamic=False)
    recompute(deep, deep.model.layers, SimpleNamespace(freq=1, mode="full"))
    plain = hidden(deep)
    theirs = {name: grad.clone() for name, grad in gradients(deep, plain).items()}
    deep.zero_grad()
    offloading.apply(list(deep.model.layers))
    out = hidden(deep)
    assert torch.equal(out, plain) and len(offloading.kept) == 2
    ours = gradients(deep, out)
    assert len(offloading.kept) == 0 and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_and_what_all_blocks_share_stay_where_they_are(deep):
    """Without recomputation a block keeps its weights, too, and the tables of the rotary embedding."""
    model, offloading, seen = copy.deepcopy(deep), Watched(2), []
    keep = offloading._keep
    offloading._keep = lambda tensor: (seen.append(tensor.data_ptr()), keep(tensor))[1]
    offloading.apply(list(model.model.layers))
    rotary = []
    model.model.rotary_emb.register_forward_hook(lambda *args: rotary.extend(args[-1]))
    out = hidden(model)
    stay = {p.data_ptr() for p in model.parameters()} | {table.data_ptr() for table in rotary}
    assert len(rotary) == 2 and len(seen) > 10 * LAYERS and not stay & set(seen)
    ours, theirs = gradients(model, out), gradients(deep, hidden(deep))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    deep.zero_grad()


def test_a_tensor_that_is_changed_between_two_uses_is_kept_twice():
    offloading, tensor = Watched(5), torch.zeros(64, 64)
    first, same = offloading._keep(tensor), offloading._keep(tensor.detach())
    tensor += 1
    second = offloading._keep(tensor)
    assert first is same and first is not second
    assert first.host.sum() == 0 and second.host.sum() == 64 * 64
    part = tensor[:, :32]
    assert offloading._keep(part) is part, "a part of a tensor would come back with other strides"


OPTIMIZERS = [AdamWConfig(lr=1e-2), SGDConfig(lr=1e-2), MuonConfig(lr=1e-2), SignSGDConfig(lr=1e-2)]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.type)
def test_moments_on_the_host_give_the_same_bits_and_stay_where_a_checkpoint_fills_them(kind):
    kind = kind.model_copy(update={"weight_decay": 0.01})
    found = []
    for on_host in (False, True):
        g = torch.Generator().manual_seed(0)
        shapes = {"up.weight": (12, 8), "norm.weight": (8,), "lm_head.weight": (20, 8), "unused.weight": (3, 3)}
        named = [(name, nn.Parameter(torch.randn(shape, generator=g))) for name, shape in shapes.items()]
        optimizer = optim.build(kind, named)
        before = [group["params"] for group in optimizer.param_groups]
        optim.ensure_state(optimizer, on_host)
        held = checkpoint.tensors_of(named, optimizer)
        for _ in range(3):
            for _, p in named[:-1]:
                p.grad = torch.randn(p.shape, generator=g)
            optim.step(optimizer, on_host)
        assert [group["params"] for group in optimizer.param_groups] == before
        after = checkpoint.tensors_of(named, optimizer)
        if on_host:
            assert all(after[key].data_ptr() == tensor.data_ptr() for key, tensor in held.items())
        found.append(after)
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert kind.type == "sign_sgd" or any(value.any() for key, value in found[0].items() if key.startswith("optim."))


ACTIVATIONS, MOMENTS, PARAMETERS = {"ac_offloading": {}}, {"optim_cpu_offload": True}, {"fsdp_cpu_offload": True}
LORA = {"lora": {"rank": 4, "alpha": 8, "dropout": 0.2}}
SELECTIVE = {"ac": {"mode": "selective", "targets": ["norm", "mlp"]}}
ONE = {"ac_offloading": {"max_inflight_activations": 1}}


@pytest.mark.parametrize(
    ("ranks", "base"), [(1, {}), (2, {}), (2, LORA), (1, {**SELECTIVE, "attn": "varlen"})],
    ids=["full-1", "full-2", "lora-2", "selective-1"],
)  # fmt: skip
def test_a_run_keeps_its_bytes(config, tmp_path, base, ranks):
    """Losses, norms, weights and optimizer states, whatever waits in host memory."""
    ends = []
    for number, keys in enumerate(({}, {**ONE, **MOMENTS}, {**ACTIVATIONS, **PARAMETERS})):
        path = tmp_path / str(number)
        run(config(path, max_steps=3, scheduler=CONSTANT, model={**base, **keys}), ranks)
        ends.append((trace(path), tensors(path, 3)))
    (losses, plain), *others = ends
    assert len(losses) == 3
    for name, (found, state) in zip(("activations and moments", "activations and parameters"), others, strict=True):
        assert found == losses, name
        assert state.keys() == plain.keys() and [k for k in plain if not torch.equal(plain[k], state[k])] == [], name


@pytest.mark.parametrize(
    ("ranks", "base"),
    [(2, {"attn": "varlen", "cp": 2, "ac": {}}), (1, {"compile": {}, "ac": {}})],
    ids=["cp", "compile"],
)
def test_shared_rows_and_compiled_blocks_keep_their_bytes_too(config, tmp_path, ranks, base):
    ends = []
    for name, keys in (("plain", {}), ("moved", {**ONE, **MOMENTS})):
        path = tmp_path / name
        world = {"num_train_ranks": ranks}
        run(config(path, max_steps=1, scheduler=CONSTANT, model={**base, **keys}, deployment=world), ranks)
        ends.append((trace(path), tensors(path, 1)))
    (losses, plain), (found, state) = ends
    assert found == losses and state.keys() == plain.keys()
    assert [key for key in plain if not torch.equal(plain[key], state[key])] == []


@pytest.mark.parametrize(("kind", "ranks"), [("adamw", 1), ("muon", 2), ("sgd", 2), ("sign_sgd", 1)])
def test_a_checkpoint_of_the_other_setting_goes_on_as_if_nothing_had_changed(config, tmp_path, kind, ranks):
    """Two steps with, two without, two with, against six without."""
    other = {**ACTIVATIONS, **(MOMENTS if kind in ("adamw", "muon") else PARAMETERS)}
    straight, switched = tmp_path / "straight", tmp_path / "switched"
    keys = {"scheduler": CONSTANT, "optim": {"type": kind, "lr": 1e-3}}
    run(config(straight, max_steps=6, **keys), ranks)
    run(config(switched, max_steps=2, model=other, **keys), ranks)
    run(config(switched, max_steps=4, resume={"step": 2}, **keys), ranks, attempt=2)
    run(config(switched, max_steps=6, resume={"step": 4}, model=other, **keys), ranks, attempt=3)
    a, b = tensors(straight, 6), tensors(switched, 6)
    assert a.keys() == b.keys() and [key for key in a if not torch.equal(a[key], b[key])] == []
    assert trace(straight) == trace(switched) and len(trace(switched)) == 6
