"""The verbs that look after the store, on a real build of toys: card, diff, accept, adopt, gc, pin, plan's figures."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rlmake.build import lease
from rlmake.cli import verbs
from rlmake.cli.scaffold import edited
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json

pytestmark = pytest.mark.timeout(1200)
WEIGHTS = "outputs/t/sft/weights"


@pytest.fixture
def call(capsys):
    """`call("gc", "--dry-run")`: the lines that a verb prints."""

    def run(verb: str, *argv: str) -> list[str]:
        capsys.readouterr()
        verbs.load(verb)(list(argv))
        return capsys.readouterr().out.splitlines()

    return run


def test_verbs_on_a_build(project, call, tmp_path):
    """One build, looked at from all sides (it costs most of this test)."""
    project.build(WEIGHTS, "outputs/t/sft/evals/held")

    # the card, also of a copy; the model card says the same
    record = json.loads("\n".join(call("card", WEIGHTS, "--json")))
    assert record["runs"] == ["t/sft"] and record["set"]["optim.lr"] == 1e-3
    assert not [key for key in record["set"] if key.startswith(("model.name", "data.name"))], "those are its lineage"
    assert [row["name"] for row in record["lineage"]] == ["t/data", "t/model", "t/sft"]
    assert record["evaluations"][0]["envs"]["toy"]["reward"]["mean"] == 0.25
    assert "data.columns.renderer.reasoning_effort" not in record["set"], "nobody set that"
    (hardware,) = [line for line in call("card", WEIGHTS) if line.startswith("hardware")]
    assert " cores" in hardware and " GiB" in hardware
    with pytest.raises(UserError, match=r"^/not/here: no such file or directory$"):
        call("card", "/not/here")
    copy = tmp_path / "elsewhere"
    shutil.copytree(WEIGHTS, copy)
    assert json.loads("\n".join(call("card", str(copy), "--json"))) == record
    assert (
        "# t/sft" in (copy / "README.md").read_text()
        and "| held | toy | 1 | 0.250 |" in (copy / "README.md").read_text()
    )
    assert project.plan(WEIGHTS, "outputs/t/sft/evals/held") == {}, "cards are no part of what is hashed"
    (copy / "model.safetensors").write_text("sft 5")
    with pytest.raises(UserError, match="changed since t/sft was published"):
        call("card", str(copy))
    (copy / "card.json").unlink()
    with pytest.raises(UserError, match="and no artefact of this project"):
        call("card", str(copy))
    (copy / "model.safetensors").write_text("sft 4")
    assert json.loads("\n".join(call("card", str(copy), "--json")))["fingerprint"] == record["fingerprint"]

    for name in ("evals/held", "evals/held/report.json"):  # logs and all; one file
        to = tmp_path / "of-eval" / Path(name).name
        (shutil.copytree if Path("outputs/t/sft", name).is_dir() else shutil.copy)(f"outputs/t/sft/{name}", to)
        assert json.loads("\n".join(call("card", str(to), "--json")))["stage"] == "eval"

    # a suite that was edited is priced by its episodes
    took = read_json(next(Path("outputs/.store").glob("eval-*/done.json")))["seconds"]
    project.edit("evals/held.toml", "[inference]", "group_size = 2\n[inference]")
    (row,) = [row for row in project.document("outputs/t/sft/evals/held")["jobs"] if row["rule"] == "evaluate"]
    assert row["rate"] == "by the episodes of 1 before the suite was edited"
    assert row["hours"] == pytest.approx(2 * took / 3600, abs=1e-6)
    project.edit("evals/held.toml", "group_size = 2", "group_size = 2\nsampling.max_completion_tokens = 9")
    assert project.document("outputs/t/sft/evals/held")["totals"]["unknown"] == 1, "an episode costs something else now"
    project.edit("evals/held.toml", "\nsampling.max_completion_tokens = 9", "")
    project.edit("evals/held.toml", "group_size = 2\n", "")

    # verify finds a flipped bit
    weights = Path(WEIGHTS) / "model.safetensors"
    weights.write_text("sft_4")
    with pytest.raises(AssertionError):
        assert verbs.load("verify")([WEIGHTS]) == 0
    assert project.plan(WEIGHTS) == {"export": 1, "publish_weights": 1}
    reason = project.document(WEIGHTS)["jobs"][0]["reason"]
    assert reason.startswith("damaged: ") and reason.endswith(
        "weights/model.safetensors: content differs from its hash"
    )
    assert project.build(WEIGHTS) == ["export step_4"]

    # an older version: planned with its difference and file, kept while published, then garbage
    before = os.readlink(WEIGHTS)
    project.edit("t/sft.toml", "optim.lr = 1e-3", "optim.lr = 2e-3")
    rows = project.document(WEIGHTS)["jobs"]
    assert rows[0]["rule"] == "train" and rows[0]["run"] == "t/sft"
    (change,) = rows[0]["changes"]
    assert (change["key"], change["before"], change["after"]) == ("optim.lr", 0.001, 0.002)
    assert (change["default"], change["file"], change["note"]) == (False, "experiments/t/sft.toml", None)
    assert rows[0]["gpus"] == 0 and rows[0]["gpu_hours"] == 0 and "earlier built alike" in rows[0]["rate"]
    assert rows[0]["reuses"] == ["outputs/t/model/weights", "outputs/t/data/data"]
    assert any(
        "published: outputs/t/sft/weights" in line for line in call("gc", "--dry-run") if line.startswith("keep")
    )
    project.build(WEIGHTS, "outputs/t/sft/evals/held")
    lines = [line for line in call("gc", "--dry-run") if line.startswith("delete")]
    assert len(lines) == 2 and all("an earlier version of t/sft" in line for line in lines), "training and evaluation"
    assert call("pin") == ["nothing is pinned"]
    call("pin", "/".join(("outputs", ".store", before.split(".store/")[1].split("/")[0])), "--reason", "the paper's")
    assert any("pinned" in line and "the paper's" in line for line in call("gc", "--dry-run"))
    (outside := tmp_path / "precious").mkdir()
    (outside / "file").touch()
    (lost,) = [Path("outputs/.store", line.split()[3]) for line in call("gc", "--dry-run") if line.startswith("delete")]
    os.symlink(outside, lost / "link-out")
    assert call("gc")[-1].startswith("1 of ")
    assert not lost.exists() and (outside / "file").exists()
    assert Path("outputs/t/sft", before).exists()
    assert project.plan(WEIGHTS, "outputs/t/sft/evals/held") == {}

    # declared equivalent: nothing is built, what rests on it neither, and it is on record
    project.edit("t/sft.toml", "optim.lr = 2e-3", "optim.lr = 2.5e-3")
    assert project.plan(WEIGHTS)["train"] == 1
    with pytest.raises(UserError, match="--reason is needed"):
        call("accept", WEIGHTS)
    call("accept", WEIGHTS, "--reason", "rounding")
    assert project.plan(WEIGHTS, "outputs/t/sft/evals/held") == {}
    assert project.document(WEIGHTS)["accepted"][0]["reason"] == "rounding"
    assert json.loads("\n".join(call("card", WEIGHTS, "--json")))["accepted"][0]["reason"] == "rounding"
    assert "): rounding." in Path(WEIGHTS, "README.md").read_text(), "a copy says so too"
    call("accept", WEIGHTS, "--revoke")
    assert "rounding" not in Path(WEIGHTS, "README.md").read_text()
    assert project.plan(WEIGHTS)["train"] == 1

    # in the store, and its link is gone: found by all, or one line says what to run
    os.rename(WEIGHTS, "outputs/t/sft/mine")
    project.edit("t/sft.toml", "optim.lr = 2.5e-3", "optim.lr = 2e-3")
    (line,) = [line for line in call("ls") if line.startswith("t/sft ")]
    assert " 4 of 4 steps " in line and "weights (no link)" in line
    assert "snakemake -c all " in call("ls")[-1] and call("ls")[-1].endswith(WEIGHTS)
    assert json.loads("\n".join(call("card", WEIGHTS, "--json")))["set"]["optim.lr"] == 2e-3
    with pytest.raises(UserError, match="not built; build it with: snakemake -c all outputs/t/rl/weights"):
        call("card", "outputs/t/rl/weights")
    shutil.rmtree("outputs/t/sft")
    project.edit("t/sft.toml", "optim.lr = 2e-3", "optim.lr = 2.5e-3")
    assert "optim.lr 0.002 → 0.0025" in call("accept", WEIGHTS, "--reason", "found without a link")[0]
    assert project.plan(WEIGHTS) == {"publish_weights": 1}
    call("accept", WEIGHTS, "--revoke")

    # how runs differ
    shutil.copy("experiments/t/sft.toml", "experiments/t/other.toml")
    project.edit("t/other.toml", "optim.lr = 2.5e-3", "optim.lr = 5e-3\nlog.level = 'debug'")
    lines = call("diff", "t/sft", "t/other")
    assert "optim.lr 0.0025 → 0.005 (experiments/t/other.toml)" in lines
    assert "does not count: log.level none → debug" in lines
    with pytest.raises(UserError, match="did you mean 't/other'"):
        call("diff", "t/sft", "t/othr")
    rl = Path("experiments/t/rl.toml").read_text()
    project.write("t/grid.toml", rl + "[experiment.grid]\n'orchestrator.train.group_size' = [4, 8]\n")
    lines = call("diff", "t/grid/group_size=4", "t/grid/group_size=8")
    assert lines == ["orchestrator.train.source.0.group_size 4 → 8 (experiments/t/grid.toml)"], "and not the shared key"
    project.write(
        "t/cosine.toml",
        rl.replace("max_steps = 5", 'max_steps = 3\ntrainer.scheduler = {type = "cosine", warmup_steps = 1}'),
    )
    assert [line for line in call("diff", "t/rl", "t/cosine") if "max_steps" in line] == ["max_steps 5 → 3"]
    project.edit("t/cosine.toml", "max_steps = 3", "max_steps = 5")
    assert not any("max_steps" in line for line in call("diff", "t/rl", "t/cosine")), "it counts in one of them only"
    for wrong, said in (("t/gird", "mean 't/grid'"), ("t/grid", "is a grid; name one of its cells, as t/grid/g")):
        with pytest.raises(UserError, match=said):
            call("diff", "t/sft", wrong)
    assert [line.split()[0] for line in call("ls", "t/grid")] == ["t/grid/group_size=4", "t/grid/group_size=8"]
    assert " 0 of 5 steps " in call("ls", "t/grid")[0]
    assert "weights (not built)" in call("ls", "t/grid")[0]
    with pytest.raises(UserError, match="t/gird: no run, grid or folder; did you mean 't/grid'"):
        call("ls", "t/gird")
    for name in ("cosine", "grid"):
        Path(f"experiments/t/{name}.toml").unlink()
    fork = 'resume.dir = "outputs/t/sft/checkpoints/step_2"\nmax_steps = 4'
    project.write("t/fork.toml", Path("experiments/t/sft.toml").read_text().replace("max_steps = 4", fork))
    for pair in (("t/sft", "t/fork"), ("t/fork", "t/sft")):
        assert not any("ckpt.skip" in line for line in call("diff", *pair)), "nobody wrote that"
        assert any("resume.dir" in line for line in call("diff", *pair))
    project.edit("t/sft.toml", "optim.lr = 2.5e-3", "optim.lr = 2e-3")
    project.edit("t/fork.toml", "optim.lr = 2.5e-3", "optim.lr = 4e-3")
    fork = "outputs/t/fork/weights"
    (row,) = [row for row in project.document(fork)["jobs"] if row["run"] == "t/fork" and row["rule"] == "train"]
    assert "outputs/t/sft/checkpoints/step_2" in row["reuses"], "kept on the way to step 4"
    assert any("; begins from outputs/t/sft/checkpoints/step_2" in line for line in call("plan", fork))
    project.build(fork)
    record = json.loads("\n".join(call("card", fork, "--json")))
    assert record["differences"] == ["optim.lr: 0.002 → 0.004"]


def test_a_changed_default_asks(project, call):
    """The earlier build was made with another default: nothing starts before the user has said what is to be done."""
    project.build(WEIGHTS)
    (spec,) = Path("outputs/.store").glob("train-*/spec.json")
    folder = spec.parent
    record = read_json(spec)
    record["semantic"]["optim"]["betas2"] = record["defaults"]["optim.betas2"] = 0.5
    fingerprint = "0123456789abcdef"
    write_json(spec, {**record, "fingerprint": fingerprint})
    old = folder.with_name(f"train-{fingerprint}")
    os.rename(folder, old)
    Path(WEIGHTS).unlink()
    os.symlink(f"../../.store/{old.name}/exports/step_4/weights", WEIGHTS)
    code, output = project.snakemake("-n", WEIGHTS)
    assert code == 0 and "asks: " in output
    code, output = project.snakemake("-c", "1", WEIGHTS)
    assert code == 2 and not folder.exists()
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "optim.betas2 0.5 →" in line and "the default in the code has changed" in line and "rlmake accept" in line
    call("accept", WEIGHTS, "--reason", "no difference at this size")
    assert project.plan(WEIGHTS) == {}
    call("accept", WEIGHTS, "--revoke")
    code, output = project.snakemake("-c", "2", WEIGHTS, "--quiet", "all", "--config", "defaults=new")
    assert code == 0, output
    assert folder.exists() and project.plan(WEIGHTS) == {}


def test_adopt(project, call, tmp_path):
    """Weights from elsewhere, a real directory in the target's place, a run that was started directly."""
    project.build("outputs/t/model/weights")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(UserError, match="no model directory"):
        call("adopt", str(foreign), "--as", WEIGHTS)
    with pytest.raises(UserError, match="say with --as which declared target it is"):
        call("adopt", str(foreign))
    (foreign / "config.json").write_text("{}")
    (foreign / "model.safetensors").write_text("theirs")
    assert "not known" in call("adopt", str(foreign), "--as", WEIGHTS)[1]
    assert project.plan(WEIGHTS) == {} and (foreign / "config.json").exists()
    assert json.loads("\n".join(call("card", WEIGHTS, "--json")))["origin"] == "adopted"
    lines = call("card", WEIGHTS)
    assert "hardware   not known" in lines and "cost       not known; its line 0.0 GPU-hours" in lines
    assert not any("None" in line for line in lines if line.startswith(("made", "cost", "commit", "hardware")))
    with pytest.raises(UserError, match="is built already"):
        call("adopt", str(foreign), "--as", WEIGHTS)

    (spec,) = Path("outputs/.store").glob("train-*/spec.json")
    with lease.acquire(spec.parent / "exports/step_4"):  # as the job of a driver that runs has it
        Path(WEIGHTS).resolve().with_name("weights.done.json").unlink()
        with pytest.raises(lease.LeaseHeld, match=rf"^{WEIGHTS}: .* is being written by pid {os.getpid()} on"):
            call("adopt", str(foreign), "--as", WEIGHTS)
    call("adopt", str(foreign), "--as", WEIGHTS)

    real = Path("outputs/t/rl/weights")
    shutil.copytree(foreign, real)
    assert "take it in with `rlmake adopt" in project.refused(str(real))[0]
    call("adopt", str(real))
    assert real.is_symlink() and project.plan(str(real)) == {}


def test_what_the_store_has_built_is_adopted_as_nothing_else(project, call, tmp_path):
    """Copies without a card are known by their hashes."""
    project.edit("t/sft.toml", 'evals = ["held"]', 'evals = ["held"]\nbest = {suite = "held"}')
    project.build("outputs/t/sft/exports/best/weights", "outputs/t/sft/checkpoints/step_2")
    for name in ("exports/best/weights", "checkpoints/step_2"):
        shutil.copytree(f"outputs/t/sft/{name}", tmp_path / name, ignore=shutil.ignore_patterns("card.json"))
    best, checkpoint = (str(tmp_path / name) for name in ("exports/best/weights", "checkpoints/step_2"))
    assert json.loads("\n".join(call("card", checkpoint, "--json")))["step"] == 2
    with pytest.raises(UserError, match=r"it is what was built as t/sft, train-\w+, not train-"):
        call("adopt", best, "--as", "outputs/t/rl/weights")
    (folder,) = Path("outputs/.store").glob("train-*")
    shutil.rmtree(folder / "exports/step_4")
    with pytest.raises(UserError, match="it is what was built as t/sft, step 2, not 4"):
        call("adopt", best, "--as", WEIGHTS)
    shutil.rmtree(folder / "exports/step_2")
    assert call("adopt", best, "--as", "outputs/t/sft/exports/step_2/weights")


def test_a_fork_of_a_run_that_was_started_directly(project, call):
    """Its directory is adopted; a fork of it and its own extension go on from there, and nothing is trained again."""
    project.build("outputs/t/sft/checkpoints/step_4")
    (folder,) = Path("outputs/.store").glob("train-*")
    mine = Path("outputs/mine")  # as `sft @ … --run.name mine` would have left it
    resolved = mine / "configs" / "attempt_1" / "resolved" / "sft.json"
    write_json(resolved, read_json(folder / "spec.json")["config"])
    os.symlink("attempt_1", mine / "configs" / "latest")
    write_json(mine / "run.json", {"schema": 1, "run_id": "0", "name": "mine", "kind": "sft"})
    shutil.move(folder / "checkpoints", mine)
    shutil.rmtree(folder)
    shutil.rmtree("outputs/t/sft")
    fork = 'resume.dir = "outputs/t/sft/checkpoints/step_2"\nmax_steps = 4'
    project.write("t/fork.toml", (project.root / "experiments/t/sft.toml").read_text().replace("max_steps = 4", fork))
    assert project.plan("outputs/t/fork/weights")["train"] == 2

    record = mine / "checkpoints" / "step_2" / "COMPLETE"
    named = record.parent / read_json(record)["files"][0]["path"]
    for path, damage in ((named, b"damaged"), (record, b"[]")):
        before = path.read_bytes()
        path.write_bytes(damage)
        for what in ((mine, "t/sft"), (record.parent, "outputs/t/sft/checkpoints/step_2")):
            with pytest.raises(UserError, match=rf"{path}: .*a damaged checkpoint is not adopted"):
                call("adopt", str(what[0]), "--as", what[1])
        path.write_bytes(before)
    assert not folder.exists() or not any(folder.glob("checkpoints/step_*"))
    with pytest.raises(UserError, match="outputs/mine: no experiment has this name: say with --as which"):
        call("adopt", str(mine))
    assert "steps 2, 4 of 4" in call("adopt", str(mine), "--as", "t/sft")[0]
    rows = project.document("outputs/t/fork/weights")["jobs"]
    assert [row["run"] for row in rows if row["rule"] == "train"] == ["t/fork"]
    assert "outputs/t/sft/checkpoints/step_2" in rows[0]["reuses"]
    done = project.build("outputs/t/fork/weights")
    assert done == ["train t/fork from 0 to 4 ", "export step_4"]
    record = json.loads("\n".join(call("card", "outputs/t/fork/weights", "--json")))
    assert [(row["name"], row["origin"], row["step"]) for row in record["lineage"]][-2:] == [
        ("t/sft", "adopted", 2), ("t/fork", "built", 4)
    ]  # fmt: skip
    project.edit("t/sft.toml", "max_steps = 4", "max_steps = 6")
    assert project.build(WEIGHTS) == ["train t/sft from 4 to 6 ", "export step_6"]


def test_a_stated_rate_counts_whoever_else_is_the_same_training(project):
    """A longer run and one without a rate, read before and after the one that states it."""
    project.edit("t/sft.toml", 'evals = ["held"]', "seconds_per_step = 3600")
    for name in ("a_longer", "z_longer"):
        extends = '[experiment]\nkind = "sft"\nextends = ["sft.toml"]\n'
        project.write(f"t/{name}.toml", f"max_steps = 600\n\n{extends}")
    (row,) = [row for row in project.document(WEIGHTS)["jobs"] if row["rule"] == "train"]
    assert (row["hours"], row["rate"]) == (4.0, "3.6e+03 s a step, as stated")


def test_a_misspelt_harness_is_refused_when_it_is_planned(project):
    project.edit("evals/held.toml", "env.taskset.id", 'env.agent.harness.id = "inproc-chta"\nenv.taskset.id')
    (line,) = project.refused("all")
    assert "env.agent.harness.id: harness 'inproc-chta'" in line and line.endswith("did you mean 'inproc-chat'?")


def test_budget(project, capsys):
    """More GPU-hours than allowed: exit code 3, and nothing was started. What is not known is said."""
    project.edit("t/sft.toml", 'evals = ["held"]', "seconds_per_step = 3600")
    project.edit("t/sft.toml", 'extends = ["../base/cpu.toml"]', "")
    project.edit("t/sft.toml", "max_steps = 4\n", "max_steps = 4\ndeployment.num_train_gpus = 2\n")
    found = project.document(WEIGHTS)
    (row,) = [row for row in found["jobs"] if row["rule"] == "train"]
    assert (row["gpus"], row["hours"], row["gpu_hours"]) == (2, 4.0, 8.0) and "as stated" in row["rate"]
    assert found["totals"]["gpu_hours"] == 8.0 and found["totals"]["unknown"] == 0
    with pytest.raises(UserError, match="the plan needs 8 GPU-hours, the budget is 7") as error:
        verbs.load("plan")([WEIGHTS, "--json", "--budget-gpu-hours", "7"])
    assert error.value.exit_code == 3 and not Path("outputs").exists()
    here = sorted(path.name for path in project.root.iterdir())
    assert verbs.load("plan")([WEIGHTS, "--budget-gpu-hours", "8"]) == 0
    code, output = project.snakemake("-c", "1", WEIGHTS, "--config", "budget_gpu_hours=7")
    assert code == 3 and "nothing was started" in output and not Path("outputs").exists()
    assert {path.name for path in project.root.iterdir()} - set(here) <= {".snakemake"} and project.log() == []
    code, output = project.snakemake("-n", WEIGHTS, "--config", "budget_gpu_hour=7")
    assert code == 2 and "did you mean 'budget_gpu_hours'?" in output
    project.edit("t/sft.toml", "seconds_per_step = 3600", "")
    assert project.document(WEIGHTS)["totals"]["unknown"] == 1


def test_new(project, call):
    """A file from a template or another experiment, comments kept, paths right from the new place."""
    project.write("base/reverse-text-env.toml", "")
    ours = ["--set", "model.name=outputs/t/model/weights", "--set", "data.name=outputs/t/data/data"]
    ours += ["--set", 'experiment.evals=["held"]']
    call("new", "abl/deep/first", "--template", "sft", "--set", "optim.lr=5e-4", *ours, "--set", "data.batch_size=8")
    text = Path("experiments/abl/deep/first.toml").read_text()
    assert 'extends = ["../../base/cpu.toml"]' in text and "lr = 5e-4" in text and "8                        #" in text
    call("new", "abl/deep/second", "--from", "t/rl", "--set", "trainer.optim.lr=3e-6")
    text = Path("experiments/abl/deep/second.toml").read_text()
    assert 'extends = ["../../base/cpu.toml"]' in text and "3e-6" in text
    assert project.plan("outputs/abl/deep/second/weights")["train"] == 2
    project.write("t/two.toml", '[experiment]\nkind = "data"\n[source]\ntype = "file"\npaths.train = "rows.jsonl"\n')
    call("new", "abl/held", "--from", "t/two", "--set", 'source.paths={test="rows.jsonl"}')
    assert Path("experiments/abl/held.toml").read_text().endswith('"}\n')
    for argv, words in (
        (["abl/deep/second"], "there already"),
        (["t/sft/inner"], "would lie inside experiments/t/sft.toml"),
        (["a b"], "is no safe name"),
        (["abl/suite", "--template", "suite"], "a suite lies below experiments/evals/"),
        (["evals/x", "--template", "rl"], "lie suites only"),
        (["evals/x", "--from", "t/rl"], "is no suite"),
        (["x", "--template", "imports"], "no such template; did you mean 'import'.; there are rl, sft, data, init"),
        (["abl/mine", "--template", "import"], "models/mine: no such file.*give --set source.path=VALUE"),
        (
            ["x", "--from", "t/sft", "--set", "optim.lrr=2"],
            "unknown key; did you mean 'lr'.*no plan would work with it$",
        ),
        (["abl/new/rows", "--template", "data"], "was not written.*--set source.paths.train=VALUE"),
        (["x", "--from", "t/rl", "--set", "orchestrator.train.source.1.env.id=x"], "a list of 1, there is no 1"),
        (["x", "--from", "t/rl", "--set", "orchestrator=3"], "is a table there"),
        (["x", "--from", "t/rl", "--set", "max_steps.x=3"], "max_steps is no table"),
        (["x", "--from", "t/stf"], "did you mean 't/sft'"),
    ):
        with pytest.raises(UserError, match=f"(?s){words}"):
            call("new", *argv)
    assert not Path("experiments/abl/new").exists(), "what would stop every plan leaves nothing behind"
    assert call("new", "small", "--template", "init", "--set", "tokenizer.text=outputs/t/data/data/train.jsonl")
    shutil.copytree(project.root / "site", "models/mine")
    Path("models/mine/config.json").write_text("{}")
    assert call("new", "mine", "--template", "import")[0].endswith("rlmake plan outputs/mine/weights")
    assert project.plan("outputs/small/weights", "outputs/mine/weights")["model"] == 2
    assert call("new", "rows", "--template", "data", "--set", "source.paths.train=rows.jsonl")[0].endswith("rows/data")


GRID = """
# of a grid
max_steps = 5  # few
trainer.optim.lr = 1e-5

[orchestrator.train]
group_size = 4

[[orchestrator.train.source]]
env.id = "a"  # the first

[[orchestrator.train.source]]
env.id = "b"

[experiment.grid]
"trainer.optim.lr" = [1e-5, 3e-5]
"""


@pytest.mark.parametrize(
    ("setting", "old", "new"),
    [
        ("max_steps=7", "max_steps = 5  # few", "max_steps = 7  # few"),
        ("trainer.optim.lr=3e-5", "trainer.optim.lr = 1e-5", "trainer.optim.lr = 3e-5"),
        ("trainer.loss.type=ppo", "lr = 1e-5\n", 'lr = 1e-5\ntrainer.loss.type = "ppo"\n'),
        ("orchestrator.batch-size=8", "lr = 1e-5\n", "lr = 1e-5\norchestrator.batch_size = 8\n"),
        ("orchestrator.train.num=1", "group_size = 4\n", "group_size = 4\nnum = 1\n"),
        ("orchestrator.train.source.0.env.id=c", 'env.id = "a"', 'env.id = "c"'),
        ("orchestrator.train.source.1.ratio=2", 'env.id = "b"\n', 'env.id = "b"\nratio = 2\n'),
        ("experiment.grid.trainer.optim.lr=[1e-4]", "[1e-5, 3e-5]", "[1e-4]"),
        ("experiment.manual=true", "3e-5]\n", "3e-5]\n"),
    ],
)
def test_a_key_is_set_where_it_belongs(setting, old, new):
    """All other lines stay as they are, blank ones too; the text says afterwards just what was asked for."""
    assert GRID.count(old) == 1
    if setting.startswith("experiment.manual"):  # `[experiment]` has no header of its own
        assert edited(GRID, setting) == GRID.replace("lr = 1e-5\n", "lr = 1e-5\nexperiment.manual = true\n")
    else:
        assert edited(GRID, setting) == GRID.replace(old, new)
