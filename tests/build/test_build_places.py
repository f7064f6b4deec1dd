"""Files and folders that are not what they should be: one line, wherever they are met."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlmake.build import explain, store
from rlmake.build.registry import Registry
from rlmake.build.workflow import code_state
from rlmake.cli import verbs
from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_json

DATA = {"stage": "data", "kind": "data", "semantic": {}, "revisions": {}, "defaults": {}, "parents": []}
# Root may read everything; without these capabilities it is refused like anybody.
NOBODY = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-dac_override,-dac_read_search"]


@pytest.mark.parametrize("kind", ["a file", "a link that leads nowhere"])
def test_outputs_is_no_folder(project, kind):
    if kind == "a file":
        (project.root / "outputs").touch()
    else:
        os.symlink("/nowhere/at/all", "outputs")
    (line,) = project.refused("all")
    assert line == f"error: outputs: is {kind}; results go into a folder of this name: mend it or move it away"
    with pytest.raises(UserError, match=r"^outputs: is "):
        verbs.load("plan")([])


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("experiments/t/data.toml", "experiments/t/data.toml: cannot be read: Permission denied"),
        ("experiments/base/cpu.toml", "experiments/base/cpu.toml: cannot be read: Permission denied"),
        ("outputs/.store", "outputs/.store/accepted: Permission denied; whoever starts this needs the right to it"),
    ],
)
def test_what_may_not_be_read(project, path, line):
    prefix = [] if os.getuid() else NOBODY
    if prefix and (not shutil.which("setpriv") or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("root can't be made to lack rights here")
    (project.root / "outputs/.store").mkdir(parents=True)
    os.chmod(path, 0)
    try:
        command = [*prefix, sys.executable, "-m", "rlmake.cli.main", "plan"]
        done = subprocess.run(command, capture_output=True, text=True, env=project.env, timeout=300, check=False)
    finally:
        os.chmod(path, 0o755)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == f"error: {line}", done.stderr
    assert "Traceback" not in done.stderr


def test_junk_in_the_cache_of_contents_is_no_matter(project):
    (project.root / "outputs/.store").mkdir(parents=True)
    for junk in ("[]", "{", '{"/a": 1}', "null", '{"rows.jsonl": []}'):
        (project.root / "outputs/.store/content.json").write_text(junk)
        assert "t/sft" in Registry.load().runs


def test_a_line_break_in_a_name_breaks_no_line(project):
    (line,) = project.refused("outputs/a\nb/weights")
    assert line == r"error: outputs/a\nb/weights: no target; no run's name holds a line break"
    shutil.copy("experiments/t/data.toml", "experiments/t/a\nb.toml")
    (line,) = project.refused("all")
    assert line.startswith(r"error: experiments/t/a\nb.toml: 'a\nb' is no safe name")


def test_a_grid_with_a_value_that_is_no_number(project):
    """Text that spells one too, which no cell could be told from another by."""
    text = (project.root / "experiments/t/sft.toml").read_text()
    for value, line in (
        ("nan", "experiments/t/grid.toml:14: experiment.grid.optim.lr: must be finite, not nan"),
        ("'inf'", "experiments/t/grid.toml:14: optim.lr: must be finite, not 'inf' (cell lr=inf)"),
    ):
        project.write("t/grid.toml", f'{text}[experiment.grid]\n"optim.lr" = [1e-3, {value}]\n')
        assert project.refused("all") == [f"error: {line}"]


@pytest.mark.parametrize(
    "path", ["./outputs/t/sft/weights", "{root}/outputs/t/sft/weights", "outputs//t/sft/weights",
             "outputs/t/sft/weights/", "experiments/../outputs/t/sft/weights"],
)  # fmt: skip
def test_a_target_that_is_spelled_otherwise_is_told_the_right_spelling(project, path):
    """Taken as a local directory it would be no dependency."""
    path = path.format(root=project.root)
    project.edit("t/rl.toml", "outputs/t/sft/weights", path)
    words = "a target of the build is written outputs/t/sft/weights"
    assert project.refused("outputs/t/rl/weights") == [f"error: experiments/t/rl.toml:3: model.name: {path}: {words}"]
    with pytest.raises(UserError, match=words):
        Registry.load()
    project.edit("t/rl.toml", path, "outputs/t/sft/weights")
    project.edit("t/sft.toml", "max_steps", 'resume.dir = "./outputs/t/sft/checkpoints/step_2"\nmax_steps')
    (line,) = project.refused("outputs/t/sft/weights")
    assert line.endswith("resume.dir: ./outputs/t/sft/checkpoints/step_2: a target of the build is written "
                         "outputs/t/sft/checkpoints/step_2")  # fmt: skip


def test_a_fork_that_could_not_go_on_is_refused(project):
    """A checkpoint of another kind of training, and one behind the fork's last step."""
    sft, rl = ((project.root / f"experiments/t/{name}.toml").read_text() for name in ("sft", "rl"))
    fork = 'resume.dir = "outputs/t/sft/checkpoints/step_2"\nmax_steps = 2'
    project.write("t/fork.toml", sft.replace("max_steps = 4", fork))
    (line,) = project.refused("outputs/t/fork/weights")
    assert "max_steps: 2 steps are over at outputs/t/sft/checkpoints/step_2: a fork counts on from there" in line
    (project.root / "experiments/t/fork.toml").unlink()
    project.write("t/other.toml", rl.replace("max_steps = ", fork.partition("max_steps")[0] + "max_steps = 1"))
    assert any("kind 'sft', which 'rl' cannot continue" in line for line in project.refused("outputs/t/other/weights"))


def test_a_fork_has_no_step_before_its_own_first(project):
    """It counts on from its checkpoint: earlier steps are refused, and are none to choose the best from."""
    text = (project.root / "experiments/t/sft.toml").read_text()
    text = text.replace('evals = ["held"]', 'best = {suite = "held"}')
    project.write(
        "t/fork.toml", text.replace("max_steps = 4", 'resume.dir = "outputs/t/sft/checkpoints/step_2"\nmax_steps = 6')
    )
    (line,) = project.refused("outputs/t/fork/checkpoints/step_2")
    assert line.endswith(
        "there is no step 2: the run is a fork of outputs/t/sft/checkpoints/step_2 and counts on from there"
    )
    asked = {row["target"] for row in project.document("outputs/t/fork/exports/best/weights")["jobs"]}
    assert {name for name in asked if "/fork/evals/" in name} == {
        "outputs/t/fork/evals/held@step_4",
        "outputs/t/fork/evals/held@step_6",
    }


def test_the_state_of_the_code_counts_files_that_git_does_not_know(project):
    """A new experiment that nobody has added yet is no clean commit; what it says is not copied into cards."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    Path(".gitignore").write_text("outputs/\n.snakemake/\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    clean, nothing = code_state()
    assert clean["commit"] and clean["dirty"] is None and not nothing
    states = []
    for text in ("secret = 1", "secret = 2"):
        project.write("t/new.toml", text)
        state, difference = code_state()
        states.append(state["dirty"])
        assert b"untracked: 'experiments/t/new.toml', 10 bytes" in difference and b"secret" not in difference
    assert None not in states and states[0] != states[1]


@pytest.mark.parametrize("root", ["", "{root}/", "./"])
def test_a_place_in_the_store_is_no_target(project, root):
    path = root.format(root=project.root) + "outputs/.store/train-0123456789abcdef/exports/step_4/weights"
    project.edit("t/rl.toml", "outputs/t/sft/weights", path)
    (line,) = project.refused("outputs/t/rl/weights")
    assert line.startswith(
        f"error: experiments/t/rl.toml:3: model.name: {path}: a place in the store, no target; name "
    )


def test_files_that_the_environments_read_are_looked_for_when_it_is_planned(project):
    """By the same rule as of a run that is started directly; what may be a hub id is not looked for."""
    whole = "outputs/t/data/data/train.jsonl"
    for path in ("nope.jsonl", "./nope", "/nope/at/all", "~/nope/at.all", "a" * 300 + ".jsonl"):
        project.edit("t/rl.toml", whole, path)
        (line,) = project.refused("outputs/t/rl/weights")
        assert line.startswith(
            f"error: experiments/t/rl.toml:12: orchestrator.train.source.0.env.taskset.path: {path}: "
        ) and line.endswith(("no such file or directory", "File name too long"))
        project.edit("t/rl.toml", path, whole)
    project.edit("evals/held.toml", whole, "nope.jsonl")
    (line,) = project.refused("all")
    assert (
        line == "error: experiments/evals/held.toml:8: source.0.env.taskset.path: nope.jsonl: no such file or directory"
    )
    project.edit("evals/held.toml", "nope.jsonl", "rows.jsonl")
    project.edit("t/rl.toml", whole, "somebody/rows")
    assert "t/rl" in Registry.load().runs


def test_a_file_that_built_data_does_not_have(project):
    """Refused when it is planned: by the splits of data that is not built, by the manifest of data that is. Where
    neither tells, the job that reads it says so before anything is started."""
    from rlmake.cli.making import placed

    registry = Registry.load()
    artefact = registry.artefact(registry.target("outputs/t/data/data"))
    spec = json.loads(json.dumps(registry.work("t/rl").spec([5], {})).replace("data/train.jsonl", "data/trian.jsonl"))
    project.edit("t/rl.toml", "data/train.jsonl", "data/trian.jsonl")
    (line,) = project.refused("outputs/t/rl/weights")
    assert line.endswith("data/trian.jsonl: no such file in it; did you mean 'train.jsonl'?; there are train.jsonl")

    (artefact.path / "sub").mkdir(parents=True)
    for name in ("train.jsonl", "sub/a.jsonl"):
        (artefact.path / name).write_text('{"prompt": "a", "target": "a"}')
    key = "orchestrator.train.source.0.env.taskset.path"
    with pytest.raises(UserError) as refused:
        placed(spec)
    assert f"{key}: outputs/t/data/data/trian.jsonl: no such file in what was built" in str(refused.value).splitlines()

    files = [{"path": name, "size": 0, "blake3": ""} for name in ("sub/a.jsonl", "train.jsonl")]
    write_json(artefact.done_path, store.manifest_of(artefact, DATA | {"fingerprint": artefact.fingerprint}, files))
    (line,) = project.refused("outputs/t/rl/weights")
    assert line == (
        f"error: experiments/t/rl.toml:12: {key}: outputs/t/data/data/trian.jsonl: no such file in it; did you mean "
        "'train.jsonl'?; there are sub/a.jsonl, train.jsonl"
    )
    for there in ("train.jsonl", "sub/a.jsonl", "sub"):
        text = (project.root / "experiments/t/rl.toml").read_text()
        project.write("t/rl.toml", text.replace("data/trian.jsonl", f"data/{there}"))
        assert "t/rl" in Registry.load().runs
        project.write("t/rl.toml", text)


def test_a_misspelt_column_is_refused_when_it_is_planned(project):
    """By the first row: of the rows that a data set is made from, with its `columns`, and of one that is built."""
    good, data = '{"prompt": "a", "completion": "b", "target": "b"}\n', "outputs/t/data/data/train.jsonl"
    rows = project.root / "rows.jsonl"
    rows.write_text("\n" + good.replace("target", "targt"))
    task = "rows.jsonl: row 2: expected an object with text in 'prompt' and 'target'; it has 'prompt', 'completion', "
    where = "orchestrator.train.source.0", "source.0"
    assert len(lines := project.refused("all")) == 2
    assert all(f": {at}.env.taskset.path: {task}'targt'" in line for at, line in zip(where, lines, strict=True))
    project.edit("t/data.toml", "[experiment]", '[columns]\ntargt = "target"\n[experiment]')
    assert project.plan("outputs/t/rl/weights")["train"] == 2
    rows.write_text("\n")
    lines = project.refused("all")
    assert len(lines) == 3 and all(line.endswith(": rows.jsonl: has no rows") for line in lines)
    rows.write_text(good.replace("completion", "completon").replace("target", "targt"))
    (line,) = project.refused("all")
    assert line == (
        "error: experiments/t/sft.toml:5: data.name: rows.jsonl: row 1: expected a conversation in 'messages', or "
        "'prompt' and 'completion'; it has 'prompt', 'completon', 'target'"
    )
    more = (project.root / "experiments/t/data.toml").read_text().replace("rows.jsonl", data).replace("targt", "prompt")
    project.write("t/more.toml", more.replace('= "target"', '= "question"'))  # of the rows of a data set
    project.edit("evals/held.toml", data, "outputs/t/more/data/train.jsonl")
    assert any("it has 'question', 'completon', 'target'" in line for line in project.refused("all"))
    project.edit("evals/held.toml", "outputs/t/more/data/train.jsonl", data)
    project.edit("t/sft.toml", "data.name =", 'data.columns.completion = "completon"\ndata.name =')
    assert project.plan("outputs/t/rl/weights")["train"] == 2
    (project.root / "own.jsonl").write_text('{"prompt": "a"}')
    project.edit("t/rl.toml", data, "own.jsonl")
    (line,) = project.refused("all")
    assert line.endswith("own.jsonl: row 1: expected an object with text in 'prompt' and 'target'; it has 'prompt'")
    project.edit("t/rl.toml", "own.jsonl", data)
    artefact = Registry.load().artefact(Registry.load().target("outputs/t/data/data"))
    artefact.path.mkdir(parents=True)
    (artefact.path / "train.jsonl").write_text("{}")
    files = [{"path": "train.jsonl", "size": 2, "blake3": ""}]
    write_json(artefact.done_path, store.manifest_of(artefact, Registry.load().work("t/data").spec([], {}), files))
    assert all(f"{artefact.path}/train.jsonl: row 1" in line for line in project.refused("all"))


def test_an_edited_file_is_named_not_who_names_it(project):
    before = Registry.load().work("t/data").spec([], {})
    rows = project.root / "rows.jsonl"
    rows.write_text(rows.read_text().replace("abc", "abd"))
    (change,) = explain.changes(before, Registry.load().work("t/data"))
    assert re.fullmatch(r"content of rows.jsonl [0-9a-f]{8} → [0-9a-f]{8}", str(change))
    rows.rename("others.jsonl")
    project.edit("t/data.toml", "rows.jsonl", "others.jsonl")
    (change,) = explain.changes(before, Registry.load().work("t/data"))
    assert str(change) == "source.paths.train rows.jsonl → others.jsonl (experiments/t/data.toml)"
    before = Registry.load().work("t/rl").spec([], {})
    project.edit("t/data.toml", "paths.train", 'paths.test = "others.jsonl"\npaths.train')
    project.edit("t/rl.toml", "train.jsonl", "test.jsonl")
    told = [str(change) for change in explain.changes(before, Registry.load().work("t/rl"))]
    data = "outputs/t/data/data"
    path = f"orchestrator.train.source.0.env.taskset.path {data}/train.jsonl → {data}/test.jsonl"
    assert f"{path} (experiments/t/rl.toml)" in told


def test_a_misspelt_axis_is_said_once(project):
    """Not once per cell; what only follows from it is not said at all."""
    text = (project.root / "experiments/t/sft.toml").read_text()
    grid = '[experiment.grid]\n"optm.lr" = [1e-5, 3e-5]\nseed = [0, 1]\n'
    project.write("t/sft.toml", f"{text}{grid}")
    (line,) = project.refused("all")
    assert line.endswith("t/sft.toml:14: optm: unknown key; did you mean 'optim'? (axis 'optm.lr', in every cell)")
    project.write(
        "t/sft.toml", f"{text}{grid}" + 'baseline = {"optim.lr" = 1e-5, seed = 0}\nzip = ["optim.lr", "seed"]\n'
    )
    (line,) = project.refused("all")
    assert line.endswith("t/sft.toml:14: optm: unknown key; did you mean 'optim'? (axis 'optm.lr')"), (
        "not those that name it rightly"
    )
    project.write("t/sft.toml", f"{text}{grid}".replace("optm", "optim") + 'baseline = {"optim.lrr" = 1e-5}\n')
    (line,) = project.refused("all")
    assert line.endswith("experiment.grid.baseline: 'optim.lrr' is no axis; did you mean 'optim.lr'?")
    project.write("t/sft.toml", text + "[experiment.grid]\nmax_steps = [4, 0, -1]\n")
    assert [line.rpartition(" (")[2] for line in project.refused("all")] == ["cell max_steps=0)", "cell max_steps=-1)"]
    project.write("t/sft.toml", text)
    project.edit("evals/held.toml", "renderer.name", "renderer.nam")
    assert len(project.refused("all")) == 1


def test_a_fault_in_every_cell_is_the_file_s(project):
    """Said once, also where a file without a grid extends the grid's."""
    text = (project.root / "experiments/t/sft.toml").read_text()
    project.write("t/grid.toml", f"{text}[loss_mask]\nuser = 7\n[experiment.grid]\nseed = [0, 1]\n")
    project.write("t/on.toml", '[experiment]\nkind = "sft"\nextends = ["grid.toml"]\n')
    (line,) = project.refused("all")
    assert "t/grid.toml:" in line and "cell" not in line


def test_a_fault_between_values_of_two_files_names_both(project):
    """The file that it extends has no fault of its own; where it has, that is all that is said."""
    on = 'max_steps = 3\n[experiment]\nkind = "sft"\nextends = ["sft.toml"]\n'
    project.edit("t/sft.toml", "max_steps = 4", "max_steps = 40")
    text = (project.root / "experiments/t/sft.toml").read_text()
    project.write("t/sft.toml", f'{text}[scheduler]\ntype = "linear"\nwarmup_steps = 2\ndecay_steps = 3\n')
    project.write("t/on.toml", on)
    (line,) = project.refused("all")
    assert "t/sft.toml:" in line and line.endswith("exceeds max_steps = 3 (in experiments/t/on.toml)")
    with pytest.raises(UserError, match=r"new\.toml: was not written"):
        verbs.load("new")(["t/new", "--from", "t/on", "--set", "max_steps=4"])
    project.write("t/also.toml", on)
    (line,) = project.refused("all")
    assert line.endswith("(in experiments/t/also.toml and experiments/t/on.toml)")
    project.edit("t/sft.toml", "max_steps = 40", "max_steps = 3")
    (line,) = project.refused("all")
    assert line.endswith("exceeds max_steps = 3")


def test_a_misspelt_word_of_a_grid(project):
    text = (project.root / "experiments/t/sft.toml").read_text()
    project.write("t/sft.toml", text + "[experiment.grid]\nseed = [0, 1]\ninclud = [{seed = 3}]\n")
    assert all("(axis 'includ'; did you mean 'include'?" in line for line in project.refused("all"))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('{id = "reverse-text", pth = "x.jsonl"}', "taskset.pth: unknown key; did you mean 'path'?"),
        ('{id = "reverse-text"}', "taskset.path: is needed"),
        ('{id = "kuhn-poker", sede = 1}', "taskset.sede: unknown key; 'kuhn-poker' has id, system_prompt, task"),
    ],
)
def test_keys_of_a_taskset_that_ships_are_known_to_the_plan(project, table, said):
    text = (project.root / "experiments/evals/held.toml").read_text()
    project.write("evals/held.toml", re.sub(r"env\.taskset\.id.*\n|env\.taskset\.path.*\n", "", text))
    project.edit("evals/held.toml", "[[source]]", f"[[source]]\nenv.taskset = {table}")
    assert any(said in line for line in project.refused("all"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("env.agnt.max_turns = 3", "env.agnt: unknown key; did you mean 'agent'?"),
        ("env.timeout.scoring = 3", "env.timeout.scoring: unknown key; expected one of episode, finalize"),
        ("env.agent.max_turn = 3", "env.agent.max_turn: unknown key; did you mean 'max_turns'?"),
        ("env.agent.timeout.scorin = 3", "env.agent.timeout.scorin: unknown key; did you mean 'scoring'?"),
    ],
)
def test_keys_of_an_environment_of_one_agent_are_known_to_the_plan(project, line, said):
    project.edit("evals/held.toml", "[[source]]", f"[[source]]\n{line}")
    assert any(said in line for line in project.refused("all"))


def test_a_fault_that_many_files_share_is_said_once(project):
    """Of a fragment that they extend; a file with another fault beside it keeps its own line."""
    project.write("base/gone.toml", '[source]\ntype = "file"\npaths.train = "gone.jsonl"\n')
    text = '[experiment]\nkind = "data"\nextends = ["../base/gone.toml"]\n'
    for number in range(5):
        project.write(f"many/{number}.toml", text)
    project.write("many/own.toml", text + '[source]\npaths.train = "other.jsonl"\n')
    shared, own = project.refused("all")
    assert shared.endswith(
        "source.paths.train: gone.jsonl: no such file or directory (in experiments/many/0.toml and 4 more)"
    )
    assert own == "error: experiments/many/own.toml:5: source.paths.train: other.jsonl: no such file or directory"
    for number in range(2, 5):
        (project.root / f"experiments/many/{number}.toml").unlink()
    shared, own = project.refused("all")
    assert shared.endswith(" (in experiments/many/0.toml and experiments/many/1.toml)")


def test_a_fragment_that_cannot_be_read_is_named_once(project):
    """It is extended from two folders by two spellings."""
    project.write("top.toml", (project.root / "experiments/t/sft.toml").read_text().replace("../base", "base"))
    project.write("base/cpu.toml", "a = [")
    (line,) = project.refused("all")
    assert line.startswith("error: experiments/base/cpu.toml: not readable as TOML")


def test_names_in_a_file_that_are_nearly_right(project):
    project.edit("t/rl.toml", '"reverse-text"', '"revers-text"')
    (line,) = project.refused("all")
    assert line.endswith("; did you mean 'reverse-text'?")
    project.edit("t/rl.toml", '"revers-text"', '"reverse-text"')
    project.edit("t/sft.toml", "cpu.toml", "cpuu.toml")
    assert all(line.endswith("(experiments/base/cpuu.toml); did you mean 'cpu'?") for line in project.refused("all"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("outputs/t/grid", "is a grid; ask for outputs/t/grid/report.html, outputs/t/grid/results.csv"),
        ("t/grid", "is a grid; ask for outputs/t/grid/report.html"),
        ("outputs/t/sft/", "is a run (sft); ask for a target of it, outputs/t/sft/ and one of weights, weights-FP8"),
        ("outputs/t/data", "is a run (data); ask for a target of it, outputs/t/data/ and one of data"),
        ("outputs/t/grid/seed=7", "no cell 'seed=7'; did you mean 'seed="),
        ("outputs/t/grid/weights", "a grid yields report.html"),
        ("t/sft/weights", "no target; did you mean 'outputs/t/sft/weights'?"),
        ("t/stf", "no target; targets are written outputs/<run>/<artefact>; did you mean 't/sft'?"),
        ("outputs/evals/held/weights", "no target; targets are written outputs/<run>/<artefact>"),
        ("outputs/base/cpu/weights", "experiments/base/cpu.toml declares no run: its [experiment] has no 'kind'"),
    ],
)
def test_a_whole_run_or_grid_is_told_what_to_ask_for(project, path, said):
    text = (project.root / "experiments/t/sft.toml").read_text()
    project.write("t/grid.toml", f"{text}[experiment.grid]\nseed = [0, 1]\n")
    with pytest.raises(UserError, match=re.escape(said)):
        verbs.load("why")([path])
    (project.root / "outputs/t/sft").mkdir(parents=True)  # as a build leaves it
    with pytest.raises(UserError, match=re.escape(said)):
        verbs.load("card")([path])
