"""The [experiment] table: what it holds, and what is refused in it."""
# ruff: noqa: E501 - tables of cases, one a line

import pytest

from rlmake.config import load_experiment, set_key
from rlmake.core.errors import ConfigError


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str):
        (tmp_path / "run.toml").write_text(text)
        return load_experiment("run.toml")

    return load


def test_a_fragment_and_a_full_table(load, tmp_path):
    table, raw = load("max_steps = 3\n")
    assert table.kind is None and raw == {"max_steps": 3} and not table.manual
    (tmp_path / "base.toml").write_text("[experiment]\nmanual = true\n[optim]\nlr = 1\n")
    table, raw = load('[experiment]\nkind = "sft"\nextends = "base.toml"\nevals = ["a", "b/c"]\n')
    assert (table.kind, table.extends, table.evals, table.manual) == ("sft", ["base.toml"], ["a", "b/c"], False)
    assert raw == {"optim": {"lr": 1}}


def test_axes_stand_beside_the_words_of_a_grid_quoted_or_nested(load):
    table, _ = load(
        '[experiment]\nkind = "rl"\n[experiment.grid]\n"trainer.optim.lr" = [1e-5, 3e-5]\nseed = [0, 1]\n'
        'trainer.model.seq-len = [8, 9]\nzip = ["seed", "trainer.model.seq_len"]\n'
        'exclude = [{seed = 1}]\ninclude = [{"trainer.optim.lr" = 1e-4}]\nbaseline = {seed = 0}\n'
    )
    grid = table.grid
    assert grid.axes == {"trainer.optim.lr": [1e-5, 3e-5], "seed": [0, 1], "trainer.model.seq_len": [8, 9]}
    assert list(grid.axes) == ["trainer.optim.lr", "seed", "trainer.model.seq_len"]
    assert grid.zip == [["seed", "trainer.model.seq_len"]] and grid.baseline == {"seed": 0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('kind = "rll"', "run.toml:2: experiment.kind: expected 'data', 'init', 'import', 'sft', 'rl', not 'rll'; did you mean 'rl'?"),
        ('knid = "rl"', "run.toml:2: experiment.knid: unknown key; did you mean 'kind'?"),
        ('evals = ["a"]', "run.toml:2: experiment.evals: a file of kind (none) has no model to evaluate"),
        ('kind = "rl"\nevals = ["../a"]', "experiment.evals.0: '..' is no safe name"),
        ('kind = "rl"\nevals = ["a", "a"]', "run.toml:3: experiment.evals: names a suite twice"),
        ("[experiment.grid]\nseed = [0]", "experiment.grid: needs a kind"),
        ('kind = "data"\nseconds_per_step = 1', "run.toml:3: experiment.seconds_per_step: a file of kind data trains nothing"),
        ('kind = "init"\nbest.suite = "a"', "experiment.best: a file of kind init trains nothing"),
        ('kind = "rl"\n[experiment.grid]\nseed = []', "experiment.grid.seed: an axis needs at least one value"),
        ('kind = "rl"\n[experiment.grid]\nseed = 3', "experiment.grid.seed: an axis is a list of values, not 3"),
        ('kind = "rl"\n[experiment.grid]\nseed = [0]\na = [1, 2]\nzip = ["seed", "a"]', "experiment.grid.zip.0: axes of one zip need equally many"),
        ('kind = "rl"\n[experiment.grid]\nseed = [0]\n"trainer.optim.lr" = [1e-3, nan]', "run.toml:5: experiment.grid.trainer.optim.lr: must be finite, not nan"),
        ('kind = "rl"\n[experiment.grid]\na = [[0, {x = inf}]]', "experiment.grid.a: must be finite, not inf"),
        ('kind = "rl"\n[experiment.grid]\na = [0]\ninclude = [{a = nan}]', "experiment.grid.include.0.a: must be finite, not nan"),
        ('kind = "rl"\n[experiment.grid]\na = [0]\nexclude = [{a = nan}]', "experiment.grid.exclude.0.a: must be finite, not nan"),
        ("max_steps = 3", "run.toml:2: experiment.max_steps: unknown key; known here: best, evals, extends, grid, kind, manual, seconds_per_step; the run's own keys stand above the first [table]"),
        ('kind = "rl"\n[experiment.grid]\n"experiment.evals" = [[]]', "experiment.evals: an axis is a key of the run's configuration"),
        ('kind = "rl"\n[experiment.grid]\na = [0]\nbaseline = {a = -inf}', "experiment.grid.baseline.a: must be finite, not -inf"),
    ],
)  # fmt: skip
def test_faults(load, text, expected):
    with pytest.raises(ConfigError) as error:
        load(f"[experiment]\n{text}\n")
    assert any(expected in line for line in str(error.value).splitlines()), str(error.value)


def test_a_cell_sets_keys_and_is_named_in_faults(load):
    _, raw = load("[optim]\nlr = 1\n")
    cell = raw.copy()
    set_key(cell, "optim.lr", 2, "run.toml (cell lr=2)")
    assert (cell["optim"]["lr"], raw["optim"]["lr"]) == (2, 1)
    assert cell.origin(["optim", "lr"]) == "run.toml (cell lr=2)" and raw.origin(["optim", "lr"]) == "run.toml"
    with pytest.raises(ConfigError, match="expected a table, not 1"):
        set_key(raw.copy(), "optim.lr.x", 2, "cell")
