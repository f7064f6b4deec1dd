"""Fingerprints: what counts, what does not, and that they stay what they are."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_golden as golden
import pytest
from build_toys import FILES, ROOT

from rlmake.build import fingerprint as fp
from rlmake.build.explain import changes
from rlmake.build.names import Target
from rlmake.build.registry import Registry
from rlmake.core.errors import ConfigError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Experiment files only; returns a function that edits one and gives all identities."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        path = Path("experiments") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Path("rows.jsonl").write_text('{"prompt": "abc", "completion": "cba", "target": "cba"}\n')

    def identities(name=None, old=None, new=None):
        if name:
            path = Path("experiments") / name
            text = path.read_text()
            assert old in text, old
            path.write_text(text.replace(old, new))
        registry = Registry.load()
        return {run: registry.work(run).fingerprint for run in registry.runs}

    return identities


def changed(before, after):
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("t/sft.toml", "# supervised", "# other words"),
        ("t/sft.toml", "optim.lr = 1e-3", "optim.lr = 0.001"),
        ("t/sft.toml", "max_steps = 4\nmodel.name", "seed = 0\nmax_steps = 4\nmodel.name"),
        ("t/sft.toml", "ckpt.interval = 2", "ckpt.interval = 1\nckpt.keep_last = 3"),
        ("t/rl.toml", "max_steps = 5", "max_steps = 9\nlog.level = 'debug'"),
        ("t/rl.toml", "[inference]", "[inference]\nserver.port = 8123"),
        ("t/rl.toml", "[inference]", "[inference]\nseed = 0"),
        ("evals/held.toml", "[inference]", "group_size = 2\n[inference]"),
    ],
)
def test_what_does_not_count(project, name, old, new):
    """Comments, spelling of numbers, defaults written out, order of keys, horizon, runtime."""
    assert changed(project(), project(name, old, new)) == set()


@pytest.mark.parametrize(
    ("name", "old", "new", "runs"),
    [
        ("t/rl.toml", "lr = 1e-5", "lr = 3e-5", {"t/rl"}),
        ("t/rl.toml", "group_size = 4", "group_size = 8", {"t/rl"}),
        ("t/rl.toml", "max_steps = 5", "seed = 1\nmax_steps = 5", {"t/rl"}),
        ("t/sft.toml", "optim.lr = 1e-3", "optim.lr = 2e-3", {"t/sft", "t/rl"}),
        ("t/sft.toml", "max_steps = 4", "max_steps = 6", {"t/rl"}),
        ("t/model.toml", "tokenizer.text", "seed = 3\ntokenizer.text", {"t/model", "t/sft", "t/rl"}),
        ("t/data.toml", "[source]", '[source]\npaths.test = "rows.jsonl"', {"t/data", "t/model", "t/sft", "t/rl"}),
    ],
)  # fmt: skip
def test_what_counts(project, name, old, new, runs):
    assert changed(project(), project(name, old, new)) == runs


def test_swapped_values_differ(project):
    before = project("t/sft.toml", "optim.lr = 1e-3", "optim.betas1 = 0.9\noptim.betas2 = 0.8")
    after = project("t/sft.toml", "optim.betas1 = 0.9\noptim.betas2 = 0.8", "optim.betas1 = 0.8\noptim.betas2 = 0.9")
    assert changed(before, after) == {"t/sft", "t/rl"}


def test_a_schedule_that_depends_on_max_steps_makes_it_count(project):
    cosine = 'scheduler.type = "cosine"\nscheduler.warmup_steps = 1\noptim.lr = 1e-3'
    before = project("t/sft.toml", "optim.lr = 1e-3", cosine)
    after = project("t/sft.toml", "max_steps = 4", "max_steps = 6")
    assert changed(before, after) == {"t/sft", "t/rl"}
    registry = Registry.load()
    registry.target("outputs/t/sft/checkpoints/step_4")
    with pytest.raises(Exception, match="the schedule depends on max_steps = 6"):
        registry.target("outputs/t/sft/checkpoints/step_3")


def test_names_and_places_do_not_count(project, tmp_path):
    """A renamed parent, a moved root: the same. Alike under two names: one work."""
    before = project()
    os.rename("experiments/t/sft.toml", "experiments/t/warm.toml")
    after = project("t/rl.toml", "outputs/t/sft/weights", "outputs/t/warm/weights")
    assert after["t/rl"] == before["t/rl"] and after["t/warm"] == before["t/sft"]
    shutil.copy("experiments/t/warm.toml", "experiments/t/again.toml")
    registry = Registry.load()
    assert registry.work("t/again") is registry.work("t/warm")
    assert registry.work("t/warm").facts["runs"] == ["t/again", "t/warm"]
    shutil.copy("experiments/t/warm.toml", "experiments/t/longer.toml")
    project("t/longer.toml", "max_steps = 4", "max_steps = 6")
    registry = Registry.load()
    longer, warm = (registry.artefact(Target(f"t/{name}", "weights")) for name in ("longer", "warm"))
    assert longer.fingerprint == warm.fingerprint and (longer.step, warm.step) == (6, 4), "each ends at its own step"
    Path("experiments/t/longer.toml").unlink()
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move("experiments", moved)
    shutil.move("rows.jsonl", moved)
    os.chdir(moved)
    assert project() == {**after, "t/again": after["t/warm"]}


def test_cells_are_shared_by_grids_and_their_pages_are_not(project):
    """A page names its runs: under another grid's name it would lead to runs that nobody declares."""
    text = FILES["t/rl.toml"] + "[experiment.grid]\nseed = [0, 1]\n"
    for name in ("one", "two"):
        Path(f"experiments/t/{name}.toml").write_text(text)
    registry = Registry.load()
    assert registry.work("t/one/seed=0") is registry.work("t/two/seed=0")
    one, two = (registry.reports.of_grid(f"t/{name}") for name in ("one", "two"))
    assert one.fingerprint != two.fingerprint and (one.facts["grid"], two.facts["grid"]) == ("t/one", "t/two")


def test_files_count_by_their_content(project):
    before = project()
    os.rename("rows.jsonl", "lines.jsonl")
    assert changed(before, project("t/data.toml", "rows.jsonl", "lines.jsonl")) == set()
    Path("lines.jsonl").write_text('{"prompt": "abc", "completion": "", "target": "cba"}\n')
    assert changed(before, project()) == set(before)
    Path("lines.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"t/data.toml.*lines.jsonl: no such file"):
        project()


def test_code_of_the_project_counts_by_content_and_shipped_code_by_revision(project, monkeypatch):
    before = project()
    Path("my_task.py").write_text("REWARD = 1\n")
    own = project("t/rl.toml", 'taskset.id = "reverse-text"', 'taskset.id = "my-task"')
    assert changed(before, own) == {"t/rl"}
    Path("my_task.py").write_text("REWARD = 2\n")
    assert changed(own, project()) == {"t/rl"}
    from rlmake.build import revisions

    monkeypatch.setitem(revisions.SHIPPED, "sft", revisions.SHIPPED["sft"] + 1)
    assert changed(own, project()) == {"t/sft", "t/rl"}
    with pytest.raises(ConfigError, match="taskset 'no-such-task'"):
        project("t/rl.toml", 'taskset.id = "my-task"', 'taskset.id = "no-such-task"')


def test_hub_ids_need_a_pin(project):
    with pytest.raises(ConfigError) as error:
        project("t/sft.toml", "outputs/t/model/weights", "Qwen/Qwen3-0.6B")
    (fault,) = error.value.faults
    assert fault.key == "model.name" and "kind 'import'" in fault.message
    with pytest.raises(ConfigError, match=r"needs data\.revision"):
        project("t/sft.toml", "outputs/t/data/data", "someone/rows")


def test_wrong_kinds_and_circles(project):
    with pytest.raises(ConfigError, match="expected a target of weights, not outputs/t/data/data"):
        project("t/sft.toml", "outputs/t/model/weights", "outputs/t/data/data")
    with pytest.raises(ConfigError, match="in a circle: t/rl → t/sft → t/rl") as error:
        project("t/sft.toml", 'model.name = "outputs/t/data/data"', 'model.name = "outputs/t/rl/weights"')
    assert len(error.value.faults) == 1


def test_a_fork_is_an_edge(project):
    fork = "max_steps = 9\nresume.dir = 'outputs/t/sft/checkpoints/step_2'\n"
    text = FILES["t/sft.toml"].replace("max_steps = 4", fork)
    Path("experiments/t/fork.toml").write_text(text)
    project()
    registry = Registry.load()
    parents = {parent["role"]: parent for parent in registry.work("t/fork").parents}
    assert parents["resume.dir"]["step"] == 2 and parents["resume.dir"]["kind"] == "checkpoint"
    assert registry.work("t/fork").fingerprint != registry.work("t/sft").fingerprint


def test_a_frozen_model_is_an_edge(project):
    """The teacher of opd and the source of sft: their weights are built first, and another teacher is another run."""

    def runs(**tables):
        for name, table in tables.items():
            text = FILES["t/rl.toml"].replace("group_size = 4\n", f"group_size = 4\n{table}\n")
            Path(f"experiments/t/{name}.toml").write_text(text)
        registry = Registry.load()
        return {name: registry.work(f"t/{name}") for name in tables}

    project()
    teacher = "algo.type = 'opd'\nalgo.teacher.name = '{}'"
    source = "algo.type = 'sft'\nalgo.sampling.source.name = '{}'"
    elsewhere = "algo.type = 'opd'\nalgo.teacher = {{name = '{}', base_url = 'http://{}/v1'}}"
    rl, sft = "outputs/t/rl/weights", "outputs/t/sft/weights"
    works = runs(opd=teacher.format(rl), sftt=source.format(rl), weak=teacher.format(sft))
    for name in ("opd", "sftt"):
        edge = next(parent for parent in works[name].parents if parent["ref"] == rl)
        assert (edge["kind"], edge["step"]) == ("weights", 5)
    assert works["opd"].fingerprint != works["weak"].fingerprint
    a, b, c = runs(
        a=elsewhere.format("big", "host:1"), b=elsewhere.format("big", "host:2"), c=elsewhere.format("bigger", "host:1")
    ).values()
    assert a.fingerprint == b.fingerprint != c.fingerprint
    with pytest.raises(ConfigError, match="expected a target of weights, not outputs/t/data/data"):
        runs(wrong=teacher.format("outputs/t/data/data"))
    Path("experiments/t/wrong.toml").unlink()
    with pytest.raises(ConfigError, match="big: neither a directory nor a target; a server that knows it needs base"):
        runs(nowhere=teacher.format("big"))


def test_evaluations_cover_model_step_and_suite(project):
    project()

    def ids():
        registry = Registry.load()
        last, second = (registry.artefact(Target("t/sft", "eval", step, "held")) for step in (None, 2))
        assert registry.artefact(Target("t/sft", "eval", 4, "held")) == last
        return last.fingerprint, second.fingerprint

    before = ids()
    assert before[0] != before[1]
    suite = Path("experiments/evals/held.toml")
    suite.write_text(suite.read_text().replace("[inference]", "sampling.temperature = 0.5\n[inference]"))
    assert not set(ids()) & set(before)


def test_golden():
    """Identities stand. If this fails, a default, a canonical form or a revision has moved. A field that is new belongs
    into build/migrations.json, with the value it was introduced with."""
    known = json.loads(golden.FILE.read_text())
    assert golden.identities() == known["fingerprints"]


def test_every_later_field_is_in_the_migrations():
    known = json.loads(golden.FILE.read_text())["keys"]
    for kind, keys in golden.keys().items():
        introduced = fp.migrations()["introduced"].get(kind, {})
        renamed = fp.migrations()["renamed"].get(kind, {})
        new = {key for key in keys if key not in known[kind] and key not in introduced and key not in renamed}
        assert not new, f"{kind}: add {sorted(new)} to build/migrations.json, introduced, with their first values"


def test_migrations():
    old = {"a": {"b": 1}, "list": [{"x": 1}, {"x": 2}]}
    new = {"a": {"b": 1, "later": 5}, "table": {"later": None}, "list": [{"x": 1, "y": 0}, {"x": 2, "y": 0}]}
    table = {"introduced": {"k": {"a.later": 5, "table.later": None, "list.*.y": 0}}, "renamed": {}}
    assert fp.migrated("k", new, table) == old
    assert fp.migrated("k", {**new, "a": {"b": 1, "later": 6}}, table)["a"] == {"b": 1, "later": 6}
    table = {"introduced": {}, "renamed": {"k": {"c.d": "a.b"}}}
    assert fp.migrated("k", {"c": {"d": 1}, "list": []}, table) == {"a": {"b": 1}, "list": []}


def test_a_changed_default_is_a_difference_and_says_so(project):
    """Neither silently reused nor silently rebuilt: the last build's defaults are in its specification."""
    project()
    work = Registry.load().work("t/sft")
    before = json.loads(json.dumps(work.spec([4], {})))
    assert before["defaults"]["optim.betas2"] == 0.999 and "optim.lr" not in before["defaults"]
    before["semantic"]["optim"]["betas2"] = before["defaults"]["optim.betas2"] = 0.99
    before["semantic"]["optim"]["lr"] = 5e-4
    found = {change.key: change for change in changes(before, work)}
    assert found["optim.betas2"].default and "default in the code" in str(found["optim.betas2"])
    assert (
        not found["optim.lr"].default and str(found["optim.lr"]) == "optim.lr 0.0005 → 0.001 (experiments/t/sft.toml)"
    )


def test_planning_imports_no_torch():
    code = (
        "import sys, rlmake.build.workflow, rlmake.build.explain, rlmake.cli.stages, rlmake.cli.rlmake\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'verifiers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
