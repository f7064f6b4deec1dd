"""Names and grids (K06, O06): what a path means, which cells there are, and what they are called."""

from pathlib import Path

import pytest

from rlmake.build import names
from rlmake.build.names import Target, parse_target
from rlmake.config import load_experiment
from rlmake.config.grid import expand
from rlmake.core.errors import ConfigError

RUNS = {"a/rl", "data", "t/data", "g/lr=1e-5,seed=0"}


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("outputs/a/rl/weights", Target("a/rl", "weights")),
        ("outputs/a/rl/exports/step_12/weights", Target("a/rl", "weights", 12)),
        ("outputs/a/rl/checkpoints/step_3", Target("a/rl", "checkpoint", 3)),
        ("outputs/a/rl/evals/x/y@step_3", Target("a/rl", "eval", 3, "x/y")),
        ("outputs/a/rl/report.html", Target("a/rl", "report")),
        ("outputs/t/data/data/train.jsonl", Target("t/data", "data", rest="train.jsonl")),
        ("outputs/data/data/data", Target("data", "data", rest="data")),
        ("outputs/g/lr=1e-5,seed=0/weights", Target("g/lr=1e-5,seed=0", "weights")),
    ],
)
def test_paths_read_in_one_way(path, target):
    assert parse_target(path, RUNS) == target
    assert path.startswith(target.path)


@pytest.mark.parametrize(
    "path",
    [
        "outputs/b/weights", "outputs/a/rl", "outputs/a/rl/weight", "outputs/a/rl/checkpoints/step_0",
        "outputs/a/rl/checkpoints/step_03", "outputs/a/rl/../rl/weights", "outputs/a/rl/weights/",
        "/outputs/a/rl/weights", "outputs/a/rl/weights-FP16",
    ],
)  # fmt: skip
def test_what_is_no_target_is_said_in_one_line(path):
    fault = parse_target(path, RUNS)
    assert isinstance(fault, str) and "\n" not in fault


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("outputs/a/rl/wieghts", "weights"), ("outputs/a/rl/checkpoint/step_12", "checkpoints/step_12"),
        ("outputs/a/rl/checkpoints/step_03", "checkpoints/step_3"), ("outputs/a/rl/reprot.html", "report.html"),
        ("outputs/a/rl/checkpoints/step_0", "checkpoints/step_<n>"), ("outputs/g/result.csv", "results.csv"),
        ("outputs/a/rl/exports/step_5/weigths", "exports/step_5/weights"), ("outputs/g/reprot.html", "report.html"),
    ],
)  # fmt: skip
def test_a_misspelt_artefact_has_its_nearest_name(path, meant):
    assert f"{path}: no target; did you mean '{meant}'?; " in parse_target(path, RUNS, {"g"})


def test_a_run_is_told_what_its_own_kind_yields():
    fault = parse_target("outputs/a/rl/train.jsonl", RUNS, stages=lambda run: "data")
    assert fault == (
        "outputs/a/rl/train.jsonl: no target; did you mean 'outputs/a/rl/data/train.jsonl'?; a run yields data"
    )
    assert "checkpoints" not in parse_target("outputs/a/rl/wieghts", RUNS, stages=lambda run: "model")


def test_what_resembles_nothing_gets_no_hint():
    assert "did you mean" not in parse_target("outputs/a/rl/zzz", RUNS)


@pytest.mark.parametrize(
    "name", ["my run", "it's", "a;touch x", "$(touch x)", "naïve", "-x", "a{b}", "..", "a/../b", "x/weights", "", "a@b"]
)
def test_unsafe_names(name):
    assert names.fault_of_run(name)


def test_runs_inside_runs():
    assert names.nested(["a", "a/b", "ab", "c/d"]) == [("a", "a/b")]


def test_the_name_of_before_an_axis_was_added_leads_to_what_it_has_become():
    cells = [f"abl/lr=1,seed={seed},t={t}" for seed in (1, 0) for t in (0.7, 1.0)]
    fault = parse_target("outputs/abl/lr=1,seed=0/weights", cells, ["abl"])
    assert fault.endswith("an axis was added: there are 'lr=1,seed=0,t=0.7', 'lr=1,seed=0,t=1.0'")


def cells(tmp_path: Path, text: str):
    file = tmp_path / "g.toml"
    file.write_text(f'[experiment]\nkind = "rl"\n[experiment.grid]\n{text}')
    table, _ = load_experiment(file)
    faults = []
    return expand(table.grid, file, faults), [str(fault) for fault in faults]


def test_product_in_the_order_of_the_file_with_the_users_spelling(tmp_path):
    found, faults = cells(tmp_path, '"trainer.optim.lr" = [1e-5, 0.003]\nseed = [0, 1]\nbaseline = {seed = 1}\n')
    assert not faults
    assert [cell.name for cell in found] == ["lr=1e-5,seed=0", "lr=1e-5,seed=1", "lr=0.003,seed=0", "lr=0.003,seed=1"]
    assert found[0].values == {"trainer.optim.lr": 1e-5, "seed": 0}
    assert [cell.baseline for cell in found] == [False, True, False, True]


def test_a_new_axis_at_the_end_only_appends(tmp_path):
    first, _ = cells(tmp_path, "trainer.optim.lr = [1, 2]\n")
    second, _ = cells(tmp_path, 'trainer.optim.lr = [1, 2]\n"x.lr" = [true]\n')
    assert [cell.name for cell in second] == [f"{cell.name},x.lr=true" for cell in first]


def test_zip_include_exclude(tmp_path):
    text = 'a = [1, 2]\nb = ["x/y", "z w"]\nc = [0, 1]\nzip = [["a", "b"]]\nexclude = [{a = 2, c = 1}]\n'
    found, faults = cells(tmp_path, text + "include = [{a = 3, c = 7}]\n")
    assert not faults
    assert [cell.name for cell in found] == ["a=1,b=x-y,c=0", "a=1,b=x-y,c=1", "a=2,b=z-w,c=0", "a=3,c=7"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr = [1e-5, 0.00001]", "two values are equal: 1e-5 and 0.00001"),
        ('lr = [1e-5, "1e-5"]', "two values are equal: 1e-5 and 1e-5"),
        ("seed = [1, 1.0]", "two values are equal: 1 and 1.0"),
        ('k = ["a b", "a/b"]', "two cells have one name 'k=a-b': k = a b and k = a/b"),
        ("include = [{a = 1}]\na = [1, 2]", "two cells have one name 'a=1'"),
        ("a = [1]\nexclude = [{a = 5}]", "no cell has a = 5"),
        ("a = [1]\nbaseline = {a = 5}", "experiment.grid.baseline: no cell has a = 5"),
        ("a = [1]\nb = [1]\nc = [1]\nzip = [['a', 'b'], ['b', 'c']]", "experiment.grid.zip.1: 'b' is in two groups"),
        ("", "experiment.grid: has no axis"),
        ("a = [1, 2]\nexclude = [{a = 1}, {a = 2}]", "experiment.grid.exclude: leaves no cell"),
        ("a = [1, 2]\ninclude = [{a = 1.0}]", "two cells are equal: a = 1 and a = 1.0"),
        ("a = [-0.0, 0]", "two values are equal: -0.0 and 0"),
        ("a = [{b = 1}, {b = 1.0}]", "two values are equal: {b = 1} and {b = 1.0}"),
        ("a = [0x10, 16]", "two values are equal: 0x10 and 16"),
        ('a = ["é", "ü"]', "two cells have one name 'a=-'"),
        ('a = ["x=1", "x-1"]', "two cells have one name 'a=x-1': a = x=1 and a = x-1"),
        (f'k = ["{"x" * 220}"]', "at most 200 are possible"),
        ("seed = [0]\nexclude = [{sed = 1}]", "5: experiment.grid.exclude.0: 'sed' is no axis; did you mean 'seed'?"),
        ("seed = [0]\nzip = ['seed', 'b']", "5: experiment.grid.zip.0: 'b' is no axis"),
        ("seed = [0]\nbaseline = {x = 1}", "5: experiment.grid.baseline: 'x' is no axis"),
    ],
)
def test_collisions_are_errors_that_show_both(tmp_path, text, words):
    found, faults = cells(tmp_path, text + "\n")
    assert not found
    assert len(faults) == 1 and words in faults[0] and "g.toml" in faults[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = [1e400]", "experiment.grid.a: must be finite, not inf"),
        ("a = [2026-11-30]", "experiment.grid.a: no key takes a date or time; as text it is written '2026-11-30'"),
        ("a = [{b = 07:32:00}]", "experiment.grid.a: no key takes a date or time"),
        ('a.b = [1]\n"a.b" = [2]', "experiment.grid.a.b: stands twice, spelled in two ways"),
        ("a-b = [1]\na_b = [2]", "experiment.grid.a_b: stands twice"),
        ("a = []", "experiment.grid.a: an axis needs at least one value"),
        ("a = 1", "experiment.grid.a: an axis is a list of values, not 1"),
        ("seed = [0]\nbasline = {seed = 0}", "an axis is a list of values, not 0; did you mean 'baseline'?"),
        ("a = [1, 2]\nb = [3]\nzip = ['a', 'b']", "axes of one zip need equally many values, not [1, 2]"),
    ],
)
def test_axes_that_cannot_be_read(tmp_path, text, words):
    with pytest.raises(ConfigError) as refused:
        cells(tmp_path, text + "\n")
    (fault,) = refused.value.faults
    assert words in str(fault) and "g.toml" in str(fault)


def test_true_and_one_and_an_empty_list_are_values_of_their_own(tmp_path):
    for text, called in (
        ("a = [true, 1]", ["a=true", "a=1"]),
        ("a = [[], [1]]", ["a=--", "a=-1-"]),
        ('a = ["x/y", "..", ""]', ["a=x-y", "a=..", "a="]),
        ("a = [9007199254740993, 9007199254740992]", ["a=9007199254740993", "a=9007199254740992"]),
    ):
        found, faults = cells(tmp_path, text + "\n")
        assert not faults and [cell.name for cell in found] == called
