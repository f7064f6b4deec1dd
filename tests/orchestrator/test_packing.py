"""Packing: every sample once, rows within bounds, ranks equal in number and nearly in cost."""

import json
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmake.core.rundir import RunContext
from rlmake.orchestrator.batches import Packer, loss_counts, micro_batch
from rlmake.orchestrator.packing import CostModel, balance, first_fit_decreasing, plan
from rlmake.orchestrator.records import Unit
from rlmake.transport import TrainingSample

QUADRATIC = CostModel(2.0, 0.5)


def naive_ffd(lengths, seq_len):
    rows = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row in rows:
            if sum(lengths[j] for j in row) + lengths[i] <= seq_len:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


@given(st.lists(st.integers(1, 50), max_size=60))
def test_first_fit_decreasing_is_what_it_says(lengths):
    assert first_fit_decreasing(lengths, 50) == naive_ffd(lengths, 50)


def test_a_sample_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="51 tokens is longer than a row of 50"):
        first_fit_decreasing([3, 51], 50)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 5))
def test_plan_keeps_every_sample_once(lengths, ranks):
    parts = plan(lengths, 50, ranks, QUADRATIC)
    assert len(parts) == ranks and len({len(part) for part in parts}) == 1
    rows = [row for part in parts for row in part]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)
    assert parts == plan(lengths, 50, ranks, QUADRATIC)
    if len(lengths) >= ranks:
        assert all(any(row for row in part) for part in parts)


def test_balance_and_speed():
    rng = random.Random(1)
    lengths = [min(4096, int(rng.lognormvariate(6, 1)) + 1) for _ in range(100_000)]
    start = time.process_time()
    parts = plan(lengths, 8192, 8, QUADRATIC)
    seconds = time.process_time() - start
    loads = [sum(QUADRATIC([lengths[i] for i in row]) for row in part) for part in parts]
    rows = [row for part in parts for row in part]
    assert max(loads) / (sum(loads) / 8) < 1.03
    assert 1 - sum(lengths) / (8192 * len(rows)) < 0.01
    assert seconds < 5  # 2 s on an idle core; shared machines are slower


def test_balance_beats_round_robin_on_few_rows():
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 1.0]
    loads = sorted(sum(costs[i] for i in part) for part in balance(costs, 2))
    assert loads == [15.0, 16.0]
    with pytest.raises(ValueError):
        balance(costs, 4)


def test_cost_from_a_model(tmp_path):
    config = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "intermediate_size": 16, "vocab_size": 10,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    linear = 2 * (2 * 8 * (2 + 2) * 4 + 2 * 64 + 6 * 8 * 16) + 2 * 8 * 10
    assert CostModel.of_model(str(tmp_path)) == CostModel(linear, 2 * 2 * 2 * 4)
    assert CostModel.of_model("some/hub-id") == CostModel(1.0, 0.0)


def sample(name, n, trained, **streams):
    mask = np.arange(n) >= n - trained
    return TrainingSample(
        name, "env", np.arange(n, dtype=np.int32), mask, np.where(mask, -1, 0).astype(np.float32),
        np.ones(n, np.float32), advantages=np.where(mask, 0.5, 0).astype(np.float32), **streams,
    )  # fmt: skip


def test_micro_batch_layout_fills_and_padding():
    left = sample("a", 3, 2)
    right = sample("b", 4, 1, rl_weights=np.array([0, 0, 0, 0.25], np.float32))
    right.ce_weights = np.array([0, 0.1, 0, 0], np.float32)
    row = micro_batch([left, right], 4)
    assert row.input_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 1] and row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert row.loss_mask.tolist() == [False, True, True, False, False, False, True, False]
    assert row.sequence_lengths == [3, 5] and row.sample_ids == ["a", "b"] and row.env_names == ["env", "env"]
    assert row.rl_weights.tolist() == [1, 1, 1, 0, 0, 0, 0.25, 0] and row.ref_kl_weights is None
    assert row.ce_weights.tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0, 0, 0]) and row.temperatures[-1] == 1
    swapped = micro_batch([right, left], 4)  # the padding behind a sample that has no such stream
    assert swapped.rl_weights.tolist() == [0, 0, 0, 0.25, 1, 1, 1, 0] and len(swapped.ce_weights) == 8
    counts = loss_counts([left, right])
    assert (counts.rl, counts.ce, counts.ref_kl) == (2.25, 1, 0)


def test_missing_advantages_are_an_error_where_rl_needs_them():
    bad = sample("a", 3, 2)
    bad.advantages = None
    with pytest.raises(ValueError, match="sample a feeds the rl loss but has no advantages"):
        micro_batch([bad], 1)
    bad.rl_weights = np.zeros(3, np.float32)
    assert micro_batch([bad], 1).advantages.tolist() == [0, 0, 0]


def test_ranks_get_equally_many_rows_and_a_dummy_trains_nothing(tmp_path):
    class Config:
        seq_len, num_train_workers, pad_to_multiple_of = 8, 2, 4

        class model:
            name = "x"

    ctx = RunContext(tmp_path, "run", "run", 1, None, tmp_path, tmp_path)
    units = [Unit([sample(f"s{i}", n, 1)], "env", "agent", i, 0, 0, False, {}) for i, n in enumerate((8, 7, 8))]
    batches = Packer(Config, ctx).pack(5, units)
    assert [len(batch.micro_batches) for batch in batches] == [2, 2]
    assert [batch.rank for batch in batches] == [0, 1] and {batch.step for batch in batches} == {5}
    assert batches[0].sample_ids == batches[1].sample_ids == ["s0", "s1", "s2"] and batches[1].counts.rl == 3
    rows = [row for batch in batches for row in batch.micro_batches]
    dummy = next(row for row in rows if row.sample_ids == [""])
    assert len(dummy.input_ids) == 4 and not dummy.loss_mask.any() and dummy.env_names == [""]
    assert all(len(row.input_ids) % 4 == 0 for row in rows)
    with pytest.raises(ValueError, match="empty"):
        Packer(Config, ctx).pack(5, [])
