"""From credited traces to training samples, and the removal of tokens without a signal."""

import msgspec
import numpy as np
import verifiers.v1 as vf

from rlmake.algorithms.traces import trainable_branches
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
        fresh = np.concatenate([np.full(len(n.token_ids), id(n) not in trained) for n in branch.nodes])[:seq_len]
        fresh[0] = False
        mask = np.asarray(branch.sampled_mask[:seq_len], bool) & fresh
        weights = {stream: _stream(branch.loss_weights(stream), seq_len) for stream in STREAMS}
        weights = {stream: None if w is None else np.where(fresh, w, np.float32(0)) for stream, w in weights.items()}
        advantages = _stream(branch.advantages, seq_len)
        sample = TrainingSample(
            sample_id=f"{name}#{number}" if len(branches) > 1 else name,
            env_name=env,
            token_ids=np.asarray(branch.token_ids[:seq_len], np.int32),
            mask=mask,
            logprobs=np.asarray(branch.logprobs[:seq_len], np.float32),
            temperatures=np.full(len(mask), temperature, np.float32),
            advantages=None if advantages is None else np.where(mask, advantages, np.float32(0)),
            ref_logprobs=_stream(branch.reference_logprobs, seq_len),
            **{STREAMS[stream]: w for stream, w in weights.items()},
        )
        if trains(sample):
            samples.append(sample)
            trained.update(id(node) for node in branch.nodes)
    return samples


def _stream(values: list[float] | None, seq_len: int) -> np.ndarray | None:
    return None if values is None else np.asarray(values[:seq_len], np.float32)


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
