"""Records that cross the orchestrator–trainer boundary, and their bytes (msgpack).

Axes: T = tokens of one sample, or of one packed row; Q = sequences packed into a row. All per-token arrays of one
record have the same length. Arrays are one-dimensional numpy: int32 ids and positions, float32 numbers, bool masks;
they travel as raw little-endian bytes, so they arrive bit for bit.
"""

from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from rlmake.core.errors import UserError

SCHEMA = 1
_DTYPES = {1: np.dtype("<i4"), 2: np.dtype("<f4"), 3: np.dtype("?")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def _encode(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"no wire form for {type(value).__name__}")
    if value.ndim != 1 or value.dtype not in _CODES:
        raise TypeError(
            f"an array on the wire is one-dimensional int32, float32 or bool, not {value.dtype}{value.shape}"
        )
    return msgspec.msgpack.Ext(_CODES[value.dtype], value.tobytes())


def _decode(code: int, data: memoryview) -> np.ndarray:
    return np.frombuffer(bytes(data), dtype=_DTYPES[code])


class TrainingSample(msgspec.Struct, array_like=True, omit_defaults=True):
    """One branch of one rollout, prompt and completion together; context tokens have `mask` False and `logprobs` 0.

    `sample_id` names it in the ledger: `<env>/<draw>/<rollout>[/<agent>.<trace>][/<branch>]`.
    A missing stream means: rl weight 1 wherever `mask`, ce and ref_kl weight 0, no advantage stream at all.
    """

    sample_id: str
    env_name: str
    token_ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T], sampled by the policy and trained here
    logprobs: np.ndarray  # float32 [T], of the sampling policy, at `temperatures`
    temperatures: np.ndarray  # float32 [T]
    advantages: np.ndarray | None = None  # float32 [T]
    rl_weights: np.ndarray | None = None  # float32 [T]
    ce_weights: np.ndarray | None = None  # float32 [T]
    ref_kl_weights: np.ndarray | None = None  # float32 [T]
    ref_logprobs: np.ndarray | None = None  # float32 [T]

    def __len__(self) -> int:
        return len(self.token_ids)


class MicroBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """One packed row for one rank. `sequence_lengths` sum to T; padding belongs to the last sequence.

    `env_names` and `sample_ids` name each sequence (Q of them; "" for a dummy row). Attention is causal within a
    sequence and nothing crosses from one to the next; `position_ids` restart at 0 with each (and at the padding).
    """

    input_ids: np.ndarray  # int32 [T]
    position_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    advantages: np.ndarray  # float32 [T]
    inference_logprobs: np.ndarray  # float32 [T]
    temperatures: np.ndarray  # float32 [T]
    sequence_lengths: list[int]
    env_names: list[str]
    sample_ids: list[str]
    rl_weights: np.ndarray | None = None  # float32 [T]
    ce_weights: np.ndarray | None = None  # float32 [T]
    ref_kl_weights: np.ndarray | None = None  # float32 [T]
    ref_logprobs: np.ndarray | None = None  # float32 [T]


class LossCounts(msgspec.Struct, array_like=True):
    """N of each loss component over the whole step, all ranks: sum of rl weights, number of ce and ref_kl members."""

    rl: float = 0.0
    ce: float = 0.0
    ref_kl: float = 0.0


class Batch(msgspec.Struct, array_like=True):
    """What one trainer rank gets for one step. All ranks get equally many micro-batches.

    `sample_ids` are those of the whole step (every rank's), in the order that the ledger hashes.
    """

    schema: int
    run_id: str
    attempt: int
    step: int
    rank: int
    world: int
    counts: LossCounts
    sample_ids: list[str]
    micro_batches: list[MicroBatch]


class Envelope(msgspec.Struct, array_like=True):
    """A batch on the wire: `checksum` is the blake3 hash of `payload`, the msgpack of a `Batch`."""

    schema: int
    checksum: bytes
    payload: bytes


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_ENVELOPE = msgspec.msgpack.Decoder(Envelope)
_BATCH = msgspec.msgpack.Decoder(Batch, ext_hook=_decode)
_SAMPLES = msgspec.msgpack.Decoder(list[TrainingSample], ext_hook=_decode)


def encode_samples(samples: list[TrainingSample]) -> bytes:
    return _ENCODER.encode(samples)


def decode_samples(data: bytes) -> list[TrainingSample]:
    return _SAMPLES.decode(data)


def encode_any(value: Any) -> bytes:
    """Msgpack of plain data and records that may hold arrays."""
    return _ENCODER.encode(value)


def decode_as(data: bytes, kind: Any) -> Any:
    """Inverse of `encode_any` for a record type; raises `msgspec.DecodeError` on anything else."""
    return msgspec.msgpack.decode(data, type=kind, ext_hook=_decode)


def encode_batch(batch: Batch) -> bytes:
    payload = _ENCODER.encode(batch)
    return _ENCODER.encode(Envelope(SCHEMA, blake3(payload).digest(), payload))


def decode_batch(data: bytes, *, run_id: str, attempt: int, step: int, rank: int, world: int, origin: str) -> Batch:
    """Verify and decode; `UserError` naming `origin` for damage, an unknown schema, or a batch of another run,
    attempt, step, rank or world size."""
    try:
        envelope = _ENVELOPE.decode(data)
    except msgspec.DecodeError as error:
        raise UserError(f"{origin}: not a batch ({error})") from None
    if envelope.schema != SCHEMA:
        raise UserError(f"{origin}: batch schema {envelope.schema}, this version reads {SCHEMA}")
    if blake3(envelope.payload).digest() != envelope.checksum:
        raise UserError(f"{origin}: checksum does not match, the batch is damaged")
    batch = _BATCH.decode(envelope.payload)
    expected = {"run_id": run_id, "attempt": attempt, "step": step, "rank": rank, "world": world}
    found = {name: getattr(batch, name) for name in expected}
    if found != expected:
        wrong = [
            f"{name} {found[name]!r} (expected {expected[name]!r})"
            for name in expected
            if found[name] != expected[name]
        ]
        raise UserError(f"{origin}: foreign batch refused: {', '.join(wrong)}")
    return batch
