"""Episodes whose numbers per token are arrays until they are asked for: to whoever looks, verifiers' own."""

import copy
import pickle

import msgpack
import msgspec
import numpy as np
import pytest
import verifiers.v1 as vf
from verifiers.v1.serve.delta import EpisodeAssembly

from rlmake.envs import compact
from rlmake.envs.compact import CompactNode, decoded, float32, keep, kept, streams

pack = msgspec.msgpack.encode
REPLY = {
    "parent": 0, "sampled": True, "message": {"role": "assistant", "content": "b"}, "token_ids": [9, 100, 70_000, 300],
    "mask": [False, True, True, True], "is_content": [False, True, True, False], "logprobs": [-0.1, -1e-9, -0.25],
}  # fmt: skip


@pytest.fixture(params=["compiled", "without a compiler"], autouse=True)
def both(request, monkeypatch):
    if request.param != "compiled":
        monkeypatch.setattr(compact, "_packed", None)
    elif compact._packed is None:
        pytest.skip("installed without a C compiler")


def arrived(given):
    """A node as it comes out of a delta."""
    (node,) = decoded(pack({"trace": "t", "nodes": [given]}))["nodes"]
    taken = streams(node)
    made = CompactNode.model_validate(node)
    keep(made, taken)
    return made


def test_a_node_is_verifiers_own_to_whoever_looks():
    plain, node = vf.MessageNode.model_validate(REPLY | {"timestamp": 1.0}), arrived(REPLY | {"timestamp": 1.0})
    assert kept(node, "token_ids").tolist() == REPLY["token_ids"] and kept(node, "token_ids").dtype == np.int32
    for mode in ("python", "json"):
        untouched = arrived(REPLY | {"timestamp": 1.0})
        assert untouched.model_dump(mode=mode) == plain.model_dump(mode=mode)
    assert arrived(REPLY).model_dump(exclude_unset=True).keys() == REPLY.keys()
    for twin in (copy.deepcopy(node), pickle.loads(pickle.dumps(node)), node.model_copy()):
        assert twin.token_ids == plain.token_ids and twin.logprobs == plain.logprobs
    for name in ("token_ids", "is_content", "logprobs", "mask"):
        assert getattr(node, name) == getattr(plain, name) and getattr(node, name) is getattr(node, name)
    with pytest.raises(AttributeError, match="token_idz"):
        _ = node.token_idz


def test_what_was_looked_at_or_replaced_counts():
    node = arrived(REPLY)
    node.token_ids.append(5)
    assert kept(node, "token_ids") is None and node.token_ids[-1] == 5
    node.logprobs = [-1.0]
    assert kept(node, "logprobs") is None and node.logprobs == [-1.0] and node.model_dump()["logprobs"] == [-1.0]
    assert kept(vf.MessageNode.model_validate(REPLY), "token_ids") is None


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_numbers_of_every_length_arrive_exactly(count):
    rng = np.random.default_rng(count)
    given = REPLY | {
        "token_ids": rng.integers(0, 200_000, count).tolist(), "is_content": (rng.random(count) < 0.5).tolist(),
        "logprobs": (-rng.random(count)).tolist(), "mask": [True] * count,
    }  # fmt: skip
    node = arrived(given)
    assert np.array_equal(float32(given["logprobs"]), np.asarray(given["logprobs"], np.float32))
    assert all(getattr(node, name) == given[name] for name in ("token_ids", "is_content", "logprobs", "mask"))


EDGES = [
    0,
    1,
    127,
    128,
    255,
    256,
    65_535,
    65_536,
    (1 << 31) - 1,
    -1,
    -32,
    -33,
    -128,
    -129,
    -32_768,
    -32_769,
    -(1 << 31),
]


def test_integers_of_every_width():
    for packer in (pack, msgpack.packb):
        assert compact._token_ids(packer(EDGES)).tolist() == EDGES
        for beyond in (1 << 31, (1 << 32) - 1, 1 << 63, -(1 << 31) - 1, -(1 << 63)):
            assert compact._token_ids(packer([1, beyond, 3])) == [1, beyond, 3]
    # Wider than they need be.
    assert list(compact._token_ids(b"\x93\xcf\0\0\0\0\0\0\0\x07\xd3" + b"\xff" * 8 + b"\xd1\0\x05")) == [7, -1, 5]


def test_cut_and_foreign_lists_of_integers_are_refused():
    whole = pack(EDGES)
    for wrong in (*(whole[:end] for end in range(len(whole))), whole + b"\0", pack("text"), pack([1.0]), pack([True]),
                  pack([None]), pack([[1]]), b"\xdd\xff\xff\xff\xff\x01"):  # fmt: skip
        with pytest.raises(msgspec.DecodeError):
            compact._token_ids(wrong)


def test_nothing_that_a_delta_says_is_lost():
    """All fields that the assembly of verifiers looks at."""
    looked_at = set()

    class Delta(dict):
        def get(self, key, default=None):
            looked_at.add(key)
            return super().get(key, default)

        def __getitem__(self, key):
            looked_at.add(key)
            return super().__getitem__(key)

        def __contains__(self, key):
            looked_at.add(key)
            return super().__contains__(key)

    assembly = EpisodeAssembly()
    assembly.apply(Delta(trace="t", open={}, nodes=[], pending=[]))
    assembly.apply(Delta(trace="t", discard=True))
    assert {"trace", "open", "nodes", "discard", "set", "links"} <= looked_at <= set(compact.FIELDS)


def test_numbers_that_are_no_plain_ones():
    odd = {"logprobs": [0, -0.5, -0.0], "token_ids": [1 << 40, 3]}
    node = arrived(REPLY | odd)
    assert node.logprobs == [0.0, -0.5, -0.0] and type(node.logprobs[0]) is float and node.token_ids == [1 << 40, 3]
    assert str(node.logprobs[2]) == "-0.0"
    assert arrived({"message": REPLY["message"]}).token_ids == []
    for wrong in ({"token_ids": [1, "2"]}, {"logprobs": None}, {"mask": [1]}, {"is_content": [True, 0]}):
        with pytest.raises(msgspec.ValidationError):
            arrived(REPLY | wrong)
