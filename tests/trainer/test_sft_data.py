"""Sources, the global order, and the loader: every row once per epoch, the same on any ranks and workers, resumable."""

import json
from collections import Counter

import numpy as np
import pytest
from trainer_samples import rows, write_jsonl

from rlmake.config.renderer import RendererConfig
from rlmake.config.sft import FakeSFTDataConfig, SFTDataConfig
from rlmake.core.errors import UserError
from rlmake.models.renderer import CHATML
from rlmake.trainer.data.loader import SFTLoader
from rlmake.trainer.data.order import epoch_order
from rlmake.trainer.data.source import open_parts

RENDERER = RendererConfig(name="custom", import_path=CHATML)


@pytest.fixture
def loader(model_dir, tmp_path):
    """`loader(rows or path, rank=…, world=…, epochs=…, <data keys>)`."""

    def make(content, rank=0, world=1, epochs=None, **data):
        name = content if isinstance(content, str) else str(write_jsonl(tmp_path / "d" / "train.jsonl", content).parent)
        settings = {"batch_size": 4, "seq_len": 64, "num_workers": 0, **data}
        return SFTLoader(SFTDataConfig(name=name, **settings), RENDERER, model_dir, 320, rank, world, epochs)

    return make


def ids(steps) -> list[str]:
    return [sample for data in steps for sample in data.sample_ids]


def some(loader, count):
    return [loader.step() for _ in range(count)]


# ---- sources --------------------------------------------------------------------------------------------------------


def test_files_folders_and_saved_data_sets_hold_the_same_rows(tmp_path):
    import datasets

    content = rows(9)
    write_jsonl(tmp_path / "plain" / "train.jsonl", content)
    table = datasets.Dataset.from_list(content)
    (tmp_path / "parquet").mkdir()
    table.select(range(5)).to_parquet(tmp_path / "parquet" / "train-00000-of-00002.parquet")
    table.select(range(5, 9)).to_parquet(tmp_path / "parquet" / "train-00001-of-00002.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "dict")
    for name in ("plain", "plain/train.jsonl", "parquet", "saved", "dict"):
        (part,) = open_parts(str(tmp_path / name))
        assert [part.rows[i] for i in range(len(part.rows))] == content, name


def test_subsets_and_splits(tmp_path):
    write_jsonl(tmp_path / "a" / "train.jsonl", rows(2))
    write_jsonl(tmp_path / "b" / "data" / "test.jsonl", rows(3))
    parts = open_parts(str(tmp_path), ["a", "b"], ["train", "test"])
    assert [(part.label, len(part.rows)) for part in parts] == [("a/train", 2), ("b/test", 3)]


@pytest.mark.parametrize(
    ("name", "splits", "said"),
    [
        ("nowhere", None, "no such file"),
        ("d", ["tran"], "did you mean 'train'"),
        ("d/train.csv", None, "expected a file ending in"),
        ("empty", None, "no rows"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path, name, splits, said):
    write_jsonl(tmp_path / "d" / "train.jsonl", rows(1))
    write_jsonl(tmp_path / "empty" / "train.jsonl", [])
    (tmp_path / "d" / "train.csv").write_text("a,b\n")
    with pytest.raises(UserError, match=said):
        open_parts(str(tmp_path / name), None, splits)


def test_a_bad_row_is_named_by_data_set_row_and_column(loader):
    with pytest.raises(UserError, match=r"train\): row 2: column 'tools': not JSON"):
        loader([*rows(2), {**rows(1)[0], "tools": "not json"}], shuffle=False).step()


# ---- order ----------------------------------------------------------------------------------------------------------


def test_an_epoch_is_a_permutation_of_its_own():
    orders = [epoch_order([50], seed=7, epoch=epoch, shuffle=True) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    np.testing.assert_array_equal(orders[1], epoch_order([50], seed=7, epoch=1, shuffle=True))
    assert epoch_order([5], seed=7, epoch=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_mixing():
    turns = epoch_order([2, 4], seed=0, epoch=0, shuffle=False)
    assert turns.tolist() == [0, 2, 1, 3, 0, 4, 1, 5], "in turn, the short part starts over"
    first = epoch_order([2, 4], seed=0, epoch=0, shuffle=False, stopping_strategy="first_exhausted")
    assert first.tolist() == [0, 2, 1]
    mixed = epoch_order([3000, 1000], seed=0, epoch=0, shuffle=True, probabilities=[0.75, 0.25])
    assert set(mixed.tolist()) == set(range(4000))
    assert np.mean(mixed >= 3000) == pytest.approx(0.25, abs=0.03)


# ---- loader ---------------------------------------------------------------------------------------------------------


def test_each_row_once_per_epoch_and_the_tail_wraps_into_the_next(loader):
    """10 rows, a few documents per step: nothing is dropped at the end of an epoch, nothing comes twice in one."""
    made = loader(rows(10), batch_size=2, seq_len=40)
    found = Counter(tuple(map(int, sample.split("/"))) for sample in ids(some(made, 40)))
    assert max(found.values()) == 1
    last = max(epoch for epoch, _ in found)
    assert last >= 3
    pool = {(document.epoch, document.index) for document in made._packer.pool}
    for epoch in range(last):
        assert {index for e, index in {*found, *pool} if e == epoch} == set(range(10))
    assert made.metrics()["progress/num_samples"] == sum(found.values())


def test_the_plan_does_not_depend_on_ranks_micro_batches_or_workers(loader):
    alone = some(loader(rows(30)), 3)
    for world, micro in ((2, 1), (2, 2), (4, 1)):
        ranks = [some(loader(rows(30), rank=r, world=world, micro_batch_size=micro), 3) for r in range(world)]
        assert [ids(steps) for steps in ranks] == [ids(alone)] * world
        for step, whole in enumerate(alone):
            parts = [row for steps in ranks for row in steps[step].rows]
            assert sum(len(row.at) for row in parts) == whole.trained_tokens
            assert Counter(t for row in parts for t in row.targets.tolist()) == Counter(
                t for row in whole.rows for t in row.targets.tolist()
            )
            assert len({len(steps[step].rows) for steps in ranks}) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_threads_change_nothing(loader, workers):
    made = loader(rows(30), num_workers=workers)
    try:
        assert ids(some(made, 3)) == ids(some(loader(rows(30)), 3))
        state = json.loads(json.dumps(made.state()))
        rest = ids(some(made, 3))
    finally:
        made.close()
    again = loader(rows(30), num_workers=0)
    again.load(state)
    assert ids(some(again, 3)) == rest


def test_a_resumed_loader_continues_exactly_over_two_epochs(loader):
    straight = loader(rows(20), seed=7, batch_size=2)
    whole = some(straight, 10)
    first = loader(rows(20), seed=7, batch_size=2)
    some(first, 3)
    state = json.loads(json.dumps(first.state()))
    some(first, 1)  # killed in the step after the checkpoint
    second = loader(rows(20), seed=7, batch_size=2)
    second.load(state)
    rest = some(second, 7)
    assert ids(rest) == ids(whole[3:])
    for a, b in zip(rest, whole[3:], strict=True):
        assert all(x.input_ids.equal(y.input_ids) for x, y in zip(a.rows, b.rows, strict=True))
    assert second.metrics() == straight.metrics()


def test_another_data_set_is_refused_on_resume(loader):
    state = loader(rows(20)).state()
    with pytest.raises(UserError, match="not the data set that the checkpoint was made with"):
        loader(rows(21)).load(state)


def test_fewer_rows_than_a_step_wrap_and_none_is_an_error(loader):
    data = loader(rows(3), batch_size=4).step()
    assert len(data.rows) == 4 and {sample.split("/")[1] for sample in data.sample_ids} == {"0", "1", "2"}
    with pytest.raises(UserError, match="no rows"):
        loader([])


def test_rows_with_nothing_left_to_train_are_counted_and_a_data_set_of_them_stops(loader, caplog):
    long = {"prompt": " ".join(["alpha beta gamma"] * 20), "completion": "x"}
    good = rows(1)[0]
    made = loader([long, good], seq_len=32, batch_size=1)
    samples = ids(some(made, 3))
    assert {sample.split("/")[1] for sample in samples} == {"1"}
    assert made.metrics()["progress/skipped_rows"] >= 1
    with pytest.raises(UserError, match="no trained token is left within seq_len"):
        loader([long], seq_len=32).step()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_sees_every_row_once_on_any_number_of_ranks(loader, world):
    ranks = [loader(rows(5), rank=r, world=world, epochs=1, batch_size=4, seq_len=24) for r in range(world)]
    for _ in range(2):
        steps = [list(made) for made in ranks]
        assert sorted(ids(steps[0])) == [f"0/{i}" for i in range(5)]
        scored = sum(len(row.at) for own in steps for data in own for row in data.rows if not row.empty)
        assert scored == sum(data.trained_tokens for data in steps[0])
        assert len({tuple(len(data.rows) for data in own) for own in steps}) == 1
        for made in ranks:
            made.restart()


def test_realised_mixing_ratios(model_dir, tmp_path):
    write_jsonl(tmp_path / "a" / "train.jsonl", rows(40))
    write_jsonl(tmp_path / "b" / "train.jsonl", rows(40))
    config = SFTDataConfig(
        name=str(tmp_path), subsets=["a", "b"], probabilities=[0.8, 0.2], batch_size=8, seq_len=64, num_workers=0
    )
    made = SFTLoader(config, RENDERER, model_dir, 320, 0, 1)
    some(made, 20)
    metrics = made.metrics()
    assert metrics["progress/a/train/ratio_samples"] == pytest.approx(0.8, abs=0.08)
    assert metrics["progress/a/train/ratio_tokens"] + metrics["progress/b/train/ratio_tokens"] == pytest.approx(1)


@pytest.mark.parametrize("length", ["fixed", "variable"])
@pytest.mark.parametrize("input_ids", ["increasing", "random"])
def test_made_up_rows(length, input_ids):
    config = FakeSFTDataConfig(length=length, input_ids=input_ids, batch_size=2, seq_len=32)
    data = SFTLoader(config, None, None, 50, 0, 1).step()
    assert all(int(row.input_ids.max()) < 50 and sum(row.lens) <= 32 for row in data.rows)
