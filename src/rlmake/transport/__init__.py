"""What travels between orchestrator and trainer: batches one way, weight versions the other.

Every message carries run, step (or version) and attempt; a foreign one is refused by a line that names both sides.
The orchestrator and the trainer may call this room; it knows nothing of either, nor of torch.
"""

from rlmake.transport.asks import answered, ask_half, asked_halves
from rlmake.transport.batches import BatchReceiver, BatchSender, open_receiver, open_sender
from rlmake.transport.types import Batch, LossCounts, MicroBatch, TrainingSample
from rlmake.transport.weights import WeightReceiver, WeightSender, broadcast

__all__ = [
    "Batch",
    "BatchReceiver",
    "BatchSender",
    "LossCounts",
    "MicroBatch",
    "TrainingSample",
    "WeightReceiver",
    "WeightSender",
    "answered",
    "ask_half",
    "asked_halves",
    "broadcast",
    "open_receiver",
    "open_sender",
]
