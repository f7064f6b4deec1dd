"""From credited traces to training samples, and the removal of tokens without a signal."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import verifiers.v1 as vf

from rlmake.algorithms.traces import trainable_branches
from rlmake.envs.compact import float32, int32, kept
from rlmake.transport import TrainingSample

STREAMS = {"rl": "rl_weights", "ce": "ce_weights", "ref_kl": "ref_kl_weights"}


def samples_of(trace: vf.Trace, name: str, env: str, temperature: float, seq_len: int) -> list[TrainingSample]:
    """One sample per trainable branch, cut to `seq_len` tokens from the right; those that train nothing are left out.

    A node that several branches share trains in the first of them and is context in the others. The first token of a
    sample has no prediction and never trains. `name` is the trace's name in the ledger; branches append `#<n>`.
    """
    samples, trained = [], set()
    branches = trainable_branches(trace)
    for number, branch in enumerate(branches):
        tokens = _Tokens(branch.nodes, seq_len)
        fresh = np.ones(tokens.count, bool)
        if trained:
            fresh = tokens.joined(np.full(len(node.mask), id(node) not in trained) for node in branch.nodes)
        fresh[0] = False
        mask = tokens.joined(tokens.flags) & fresh
        weights = {stream: branch.loss_weights(stream) for stream in STREAMS}
        advantages = tokens.spread("advantages")
        sample = TrainingSample(
            sample_id=f"{name}#{number}" if len(branches) > 1 else name,
            env_name=env,
            token_ids=tokens.joined(map(_token_ids, branch.nodes)),
            mask=mask,
            logprobs=tokens.spread("logprobs"),
            temperatures=np.full(len(mask), temperature, np.float32),
            advantages=None if advantages is None else np.where(mask, advantages, np.float32(0)),
            ref_logprobs=tokens.spread("reference_logprobs"),
            **{
                STREAMS[stream]: None if w is None else np.where(fresh, float32(w[:seq_len]), np.float32(0))
                for stream, w in weights.items()
            },
        )
        if trains(sample):
            samples.append(sample)
            trained.update(id(node) for node in branch.nodes)
    return samples


class _Tokens:
    """Arrays of a branch, made node by node: `verifiers.Branch` has lists, several times as slow."""

    def __init__(self, nodes: Sequence[vf.MessageNode], seq_len: int):
        self.nodes, self.seq_len = nodes, seq_len
        self.flags = [_flags(node.mask) for node in nodes]
        self.count = min(seq_len, sum(map(len, self.flags)))

    def joined(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(parts))[: self.seq_len]

    def spread(self, name: str) -> np.ndarray | None:
        """float32 [T] of numbers that nodes hold compactly, 0 where nothing was sampled; None when no node has any."""
        given = [array if (array := kept(node, name)) is not None else getattr(node, name) for node in self.nodes]
        if all(values is None for values in given):
            return None
        return self.joined(map(_spread, self.flags, given))


def _flags(values: list[bool]) -> np.ndarray:
    count = values.count(True)
    if count and values[-count:].count(True) < count:  # not "scaffold, then what was sampled", as nearly all are
        return np.frombuffer(bytes(values), bool)
    flags = np.zeros(len(values), bool)
    flags[len(values) - count :] = True
    return flags


def _spread(flags: np.ndarray, values: np.ndarray | list[float] | None) -> np.ndarray:
    spread = np.zeros(len(flags), np.float32)
    if values is not None and len(values) and flags.any():
        first = int(flags.argmax())
        if flags[first:].all():  # nearly always: a slice is filled several times as fast
            at, values = slice(first, first + len(values)), values[: len(flags) - first]
        else:
            at = np.flatnonzero(flags)[: len(values)]
            values = values[: len(at)]
        if isinstance(values, list):
            values = values[0] if _equal(values) else float32(values)
        spread[at] = values
    return spread


def _equal(values: list[float]) -> bool:
    """An advantage, as a rule: no need to convert each. Not of zeros, which have two signs."""
    return values[0] == values[-1] != 0 and values.count(values[0]) == len(values)


def _token_ids(node: vf.MessageNode) -> np.ndarray:
    arrived = kept(node, "token_ids")
    return int32(node.token_ids) if arrived is None else arrived


def rl_members(sample: TrainingSample) -> np.ndarray:
    """bool [T]: tokens of the rl component; without a weight stream all of the mask."""
    return sample.mask if sample.rl_weights is None else sample.mask & (sample.rl_weights != 0)


def trains(sample: TrainingSample) -> bool:
    """Whether any token feeds any loss component."""
    others = (sample.ce_weights, sample.ref_kl_weights)
    return bool(rl_members(sample).any()) or any(w is not None and bool(w.any()) for w in others)


def prune(sample: TrainingSample) -> TrainingSample | None:
    """Take tokens whose advantage is exactly zero out of the rl component; None when nothing is left to train.

    A sample without an advantage stream stays as it is.
    """
    if sample.advantages is None:
        return sample
    silent = rl_members(sample) & (sample.advantages == 0)
    if silent.any():
        weights = sample.mask.astype(np.float32) if sample.rl_weights is None else sample.rl_weights.copy()
        weights[silent] = 0
        sample = msgspec.structs.replace(sample, rl_weights=weights)
    return sample if trains(sample) else None
