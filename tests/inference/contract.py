"""What the tests of the HTTP contract read out of replies, and what they compare it with."""

import math

import torch

from rlmake.models import exact
from rlmake.models.logprobs import score

PROMPT = [72, 101, 108, 20, 33]


def flat(reply, choice=0):
    """(ids, logprobs) of a choice; the contract of `renderers.client` is checked on the way."""
    one = reply["choices"][choice]
    entries = one["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in one["token_ids"]]
    values = [entry["logprob"] for entry in entries]
    assert all(math.isfinite(value) and value <= 0 and value != -9999.0 for value in values)
    return one["token_ids"], values


def scored(model, row):
    """The trainer's logprob of each token of `row` but the first."""
    row = torch.tensor(row)
    with torch.no_grad():
        hidden = exact.packed_forward(model, row[None], torch.arange(len(row))[None], [len(row)])
        return score(hidden, model.lm_head.weight, torch.roll(row, -1))[:-1].tolist()
