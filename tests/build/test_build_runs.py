"""The whole way through Snakemake with toy workers: every row of the table of what must run, and what must not."""

import os
import shutil
import time
from pathlib import Path

import pytest
from build_snakemake import dry_run

from rlmake.build import explain, store
from rlmake.cli import verbs
from rlmake.core.errors import UserError

pytestmark = pytest.mark.timeout(1200)  # dozens of processes; on an idle machine each of these takes well below 60 s
WORK = {"data", "model", "train", "export", "evaluate", "report"}


def test_what_runs_after_what(project):
    """First build; then edit, revert, extend, rename, touch, loss of .snakemake: the least possible runs each time."""
    assert project.plan("all") == {
        "data": 1, "model": 1, "train": 2, "export": 2, "evaluate": 2, "report": 2,
        "publish_data": 1, "publish_weights": 3, "publish_evaluation": 2, "publish_report": 2,
    }  # fmt: skip
    assert not Path("outputs").exists(), "a dry run writes nothing"
    done = project.build("all")
    assert sorted(done) == [
        "eval held t/rl", "eval held t/sft", "export step_4", "export step_5", "model",
        "train t/rl from 0 to 5 ", "train t/sft from 0 to 4 ",
    ]  # fmt: skip
    weights = Path("outputs/t/rl/weights")
    assert weights.is_symlink() and not os.readlink(weights).startswith("/")
    assert (weights / "model.safetensors").read_text() == "rl 5"
    assert not Path("outputs/t/rl").is_symlink()
    assert all(Path("outputs/t/rl", name).is_symlink() for name in ("logs", "configs", "monitors"))
    first = os.readlink(weights)

    assert project.plan("all") == {}
    code, output = project.snakemake("-n", "all")
    assert code == 0 and "Nothing to be done" in output

    project.edit("t/sft.toml", "# supervised", "# another comment")
    project.edit("t/rl.toml", "max_steps = 5", 'max_steps = 5\nlog.level = "debug"')
    for path in Path("experiments").rglob("*.toml"):
        os.utime(path)
    for path in Path("outputs").rglob("*"):
        os.utime(path, follow_symlinks=False)
    assert project.plan("all") == {}, "comment, log level, touch"
    shutil.rmtree(".snakemake")
    assert project.plan("all") == {}, ".snakemake lost"

    project.edit("t/rl.toml", "lr = 1e-5", "lr = 3e-5")
    edited = {
        "train": 1, "export": 1, "evaluate": 1, "report": 1,
        "publish_weights": 1, "publish_evaluation": 1, "publish_report": 1,
    }  # fmt: skip
    assert project.plan("all") == edited
    assert project.build("all") == ["train t/rl from 0 to 5 ", "export step_5", "eval held t/rl"]
    assert os.readlink(weights) != first

    project.edit("t/rl.toml", "lr = 3e-5", "lr = 0.00001")
    shutil.rmtree(".snakemake")
    back = {"publish_weights": 1, "publish_evaluation": 1, "publish_report": 1}
    assert project.plan("all") == back, "put back: links only, though Snakemake remembers nothing"
    assert project.build("all") == []
    assert os.readlink(weights) == first

    os.rename("experiments/t/rl.toml", "experiments/t/renamed.toml")
    assert project.plan("all") == back, "renamed"
    os.rename("experiments/t/renamed.toml", "experiments/t/rl.toml")
    assert project.plan("all") == {}

    project.edit("t/sft.toml", "max_steps = 4", "max_steps = 6")
    assert project.plan("all") == {
        "train": 2, "export": 2, "evaluate": 2, "report": 2,
        "publish_weights": 2, "publish_evaluation": 2, "publish_report": 2,
    }  # fmt: skip
    assert "train t/sft from 4 to 6 " in project.build("all"), "extended: it goes on; its child trains anew"


def test_damage_and_lost_manifests(project, capsys):
    project.build("outputs/t/sft/weights")
    store = Path("outputs/.store")
    (manifest,) = store.glob("train-*/exports/step_4/weights.json")
    manifest.unlink()
    assert project.plan("outputs/t/sft/weights") == {"export": 1, "publish_weights": 1}
    assert project.build("outputs/t/sft/weights") == [], "the done file stands in, nothing is computed"
    assert manifest.is_file()

    weights = Path("outputs/t/sft/weights/model.safetensors")
    weights.write_text("truncated")
    jobs, driver = dry_run(["outputs/t/sft/weights"])
    assert [job.rule for job in jobs] == ["export"]
    (row,) = project.document("outputs/t/sft/weights")["jobs"]
    assert row["reason"].startswith("damaged: ") and "model.safetensors: 9 bytes, expected 5" in row["reason"]
    assert "model.safetensors: 9 bytes, expected 5" in next(iter(driver.needs.stale.values()))
    assert project.build("outputs/t/sft/weights") == ["export step_4"]
    assert weights.read_text() == "sft 4"

    (checkpoint,) = store.glob("train-*/checkpoints/step_4")
    (checkpoint / "trainer" / "weights").unlink()
    assert project.plan("outputs/t/sft/weights") == {}, "weights are whole, nobody asks for the checkpoint"
    assert project.plan("outputs/t/sft/checkpoints/step_4") == {"train": 1, "publish_checkpoint": 1}
    assert project.build("outputs/t/sft/checkpoints/step_4") == ["train t/sft from 2 to 4 "]
    assert project.plan("outputs/t/sft/checkpoints/step_4") == {}

    # a flipped bit, and half a file of a checkpoint that is kept and nobody's target
    for step, text, fault, reuses, done in (
        (4, "sft_4", "content differs from its hash", "resumes from step 2", "train t/sft from 2 to 4 "),
        (2, "s", "1 bytes, expected 5", "step 4 was reached before", "train t/sft from 0 to 2 aside"),
    ):
        target, file = (
            f"outputs/t/sft/checkpoints/step_{step}",
            checkpoint.with_name(f"step_{step}") / "trainer/weights",
        )
        file.write_text(text)
        capsys.readouterr()
        assert verbs.load("verify")([]) == 1
        said = capsys.readouterr().out.splitlines()
        assert said[0] == f"damaged: {file}: {fault}" and said[-1].endswith("1 damaged and to be made again")
        for again in ([], [target]):
            assert verbs.load("verify")(again) == 1
            assert f"{fault}; found before, not made again yet" in capsys.readouterr().out
        project.plan(target)
        row = project.document(target)["jobs"][0]
        assert (row["rule"], row["reason"]) == ("train", f"damaged: {file}: {fault}") and row["hours"] > 0
        assert reuses in row["reuses"] and "its own" in row["rate"]
        assert project.build(target) == [done] and project.plan(target) == {}
    assert verbs.load("verify")([]) == 0

    link = Path("outputs/t/sft/weights")
    link.unlink()
    os.symlink("../../.store/nowhere", link)
    shutil.rmtree(".snakemake")
    assert project.plan("outputs/t/sft/weights") == {"publish_weights": 1}


def test_a_plan_reads_each_manifest_once_and_snakemake_is_asked_for_what_is_left(project, monkeypatch):
    project.build("outputs/t/sft/weights", "outputs/t/model/weights")
    read, whole = [], store.read_manifest
    monkeypatch.setattr(store, "_briefs", {})
    monkeypatch.setattr(store, "read_manifest", lambda path: read.append(os.stat(path).st_ino) or whole(path))
    assert project.document("all")["totals"]["reused"] == 4, "the data and the checkpoint too"
    assert read and len(read) == len(set(read))

    _, driver = dry_run(["all"])
    assert "outputs/t/sft/weights" in driver.declared and "outputs/t/sft/weights" not in driver.left
    assert "outputs/t/sft/evals/held" in driver.left
    code, output = project.snakemake("--summary", "all")
    assert code == 0 and "outputs/t/sft/weights" in output and "outputs/t/sft/evals/held" in output


def test_steps_of_one_training(project):
    """One job trains to the highest step asked for; a step that was passed and not kept is made again beside it."""
    targets = ["outputs/t/sft/exports/step_3/weights", "outputs/t/sft/evals/held@step_1", "outputs/t/sft/weights"]
    exported = "outputs/t/sft/exports/step_2/weights"
    planned = project.plan(*targets)
    assert planned["train"] == 1 and planned["export"] == 3
    done = project.build(*targets)
    assert [line for line in done if line.startswith("train")] == [
        "train t/sft from 0 to 1 ", "train t/sft from 1 to 3 ", "train t/sft from 3 to 4 ",
    ]  # fmt: skip
    assert project.plan(*targets) == {}
    assert (Path(targets[0]) / "model.safetensors").read_text() == "sft 3"

    rows = [row for row in project.document(exported)["jobs"] if row["rule"] == "export"]
    assert [row["reason"] for row in rows] == ["not built yet"], "never made, though another step is published"
    (step_3,) = Path("outputs/.store").glob("train-*/checkpoints/step_3")
    shutil.rmtree(step_3)
    assert project.plan("outputs/t/sft/checkpoints/step_3") == {"train": 1, "publish_checkpoint": 1}
    assert project.build("outputs/t/sft/checkpoints/step_3") == ["train t/sft from 2 to 3 aside"]
    assert (step_3 / "COMPLETE").is_file() and not (step_3.parents[1] / "aside" / "step_3").exists()
    assert project.plan("outputs/t/sft/checkpoints/step_3", *targets) == {}


def test_checkpoints_of_its_own_are_taken_as_a_training_passes(project):
    """In one launch, whatever retention says; one that diverges behind such a step has made it all the same."""
    project.edit("t/sft.toml", "ckpt.interval = 2", "ckpt.interval = 1\nckpt.keep_last = 1")
    targets = [f"outputs/t/sft/exports/step_{step}/weights" for step in (1, 2)]
    done = project.build(*targets, "outputs/t/sft/weights")
    assert [line for line in done if line.startswith("train")] == ["train t/sft from 0 to 4 "]
    assert sorted(path.name for path in Path("outputs/.store").glob("train-*/checkpoints/*")) == [
        "step_1", "step_2", "step_4",
    ]  # fmt: skip
    assert [(Path(target) / "model.safetensors").read_text() for target in targets] == ["sft 1", "sft 2"]
    project.edit("t/sft.toml", "optim.lr = 1e-3", "optim.lr = 2e-3")
    code, _ = project.snakemake("-c", "2", *targets, "outputs/t/sft/weights", TOY_DIVERGE="t/sft 3")
    assert code == 1
    (failed,) = Path("outputs/.store").glob("train-*/diverged.json")
    assert sorted(path.name for path in failed.parent.glob("manifests/done_*.json")) == ["done_1.json", "done_2.json"]
    assert [line for line in project.log() if line.startswith("train")][-1] == "train t/sft from 0 to 4 "


def test_a_step_inside_the_warm_up(project):
    """A build may stop there; a run of a user's that ends there is refused when it is planned."""
    project.edit(
        "t/sft.toml", "ckpt.interval", "scheduler = {type = 'linear', warmup_steps = 3, decay_steps = 0}\nckpt.interval"
    )
    assert project.build("outputs/t/sft/checkpoints/step_2")[-1] == "train t/sft from 0 to 2 "
    assert project.build("outputs/t/sft/weights") == ["train t/sft from 2 to 4 ", "export step_4"]
    project.edit("t/sft.toml", "warmup_steps = 3", "warmup_steps = 5")
    (line,) = project.refused("outputs/t/sft/weights")
    assert line.endswith("experiments/t/sft.toml: scheduler: warmup_steps = 5 exceeds max_steps = 4")


def test_another_length_of_a_schedule_that_depends_on_it(project):
    """A run that cannot be continued says so; its cost, and that of a fork, is known from the one that is there."""
    project.edit("t/sft.toml", "ckpt.interval", "scheduler = {type = 'cosine', warmup_steps = 1}\nckpt.interval")
    project.build("outputs/t/sft/checkpoints/step_4")
    (step_2,) = Path("outputs/.store").glob("train-*/checkpoints/step_2")
    shutil.rmtree(step_2)
    early = "outputs/t/sft/checkpoints/step_2"
    assert project.build(early) == ["train t/sft from 0 to 4 aside"], "no schedule of this length ends at 2"
    assert (step_2 / "COMPLETE").is_file() and project.plan(early, "outputs/t/sft/checkpoints/step_4") == {}
    sft = (project.root / "experiments/t/sft.toml").read_text()
    fork = "resume.dir = 'outputs/t/sft/checkpoints/step_4'\nmax_steps = 8"
    project.write("t/fork.toml", sft.replace("max_steps = 4", fork).replace("cosine', warmup_steps = 1", "constant'"))
    project.edit("t/sft.toml", "max_steps = 4", "max_steps = 6")
    (row,) = [row for row in project.document("outputs/t/sft/weights")["jobs"] if row["rule"] == "train"]
    told = [str(explain.Change(**change)) for change in row["changes"]]
    assert told == [f"max_steps 4 → 6 (experiments/t/sft.toml): {explain.LENGTH}"]
    assert row["hours"] > 0 and "as 1 earlier built alike" in row["rate"]
    project.edit("t/sft.toml", "max_steps = 6", "max_steps = 4")
    (row,) = [row for row in project.document("outputs/t/fork/weights")["jobs"] if row["rule"] == "train"]
    assert row["run"] == "t/fork" and row["hours"] > 0 and "as 1 earlier built alike" in row["rate"]


def test_failure_and_kill_keep_checkpoints(project):
    """A job that fails or is killed leaves its checkpoints; the same command goes on from the last one (K02)."""
    target = "outputs/t/sft/weights"
    code, output = project.snakemake("-c", "2", target, TOY_FAIL="t/sft 3")
    assert code == 1 and "the toy failed" in output and "Traceback" not in output
    assert not list(Path("outputs/.store").glob("train-*/manifests/step_*.json"))
    assert project.plan(target)["train"] == 1
    with pytest.raises(UserError, match="was never built to its end, there is nothing to accept"):
        verbs.load("accept")([target, "--reason", "none"])
    code, _ = project.snakemake("-c", "2", target, TOY_KILL="t/sft 3")
    assert code == 1
    done = project.build(target)
    assert done[0] == "train t/sft from 2 to 4 "
    steps = [line for line in project.log() if line.startswith("step")]
    assert steps == [f"step t/sft {step}" for step in (1, 2, 3, 3, 3, 4)]


def test_what_never_trained_is_no_earlier_build(project):
    """Its logs are linked from the start; compared is with what was built before."""
    project.build("outputs/t/sft/report.html")
    project.edit("t/sft.toml", "optim.lr = 1e-3", "optim.lr = 2e-3")
    assert project.snakemake("-c", "2", "outputs/t/sft/report.html", TOY_FAIL="t/sft 1")[0] == 1
    project.edit("t/sft.toml", "optim.lr = 2e-3", "optim.lr = 3e-3")
    (row,) = [row for row in project.document("outputs/t/sft/weights")["jobs"] if row["rule"] == "train"]
    assert [(change["before"], change["after"]) for change in row["changes"]] == [(1e-3, 3e-3)]


def test_diverged_is_not_tried_again(project):
    target = "outputs/t/sft/weights"
    code, _ = project.snakemake("-c", "2", target, TOY_DIVERGE="t/sft 3")
    assert code == 1
    code, output = project.snakemake("-c", "2", target)
    assert code == 2
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "t/sft diverged at step 3: loss nan" in line and "retry_failed" in line
    code, output = project.snakemake("-n", "all")
    assert code == 0 and "failed: t/sft diverged at step 3" in output
    assert "train" not in output.split("Job stats:")[1].split("total")[0], "what rests on it is left out of all"
    code, output = project.snakemake("-c", "2", target, "--config", "retry_failed=1")
    assert code == 0, output
    assert project.plan(target) == {}


def test_a_second_driver_that_waited_does_not_repeat_a_diverged_training(project):
    target = "outputs/t/sft/weights"
    env = {"TOY_GATE": "t/sft 2", "TOY_DIVERGE": "t/sft 2"}
    first = project.start("-c", "2", target, **env)
    try:
        while first.poll() is None and "step t/sft 2" not in project.log():
            time.sleep(0.05)
        second = project.start("-c", "2", target, **env)
        said = ""
        while second.poll() is None and "waiting for it" not in said:
            said += second.stdout.readline()
        project.go()
        said += second.communicate(timeout=900)[0]
        first.communicate(timeout=900)
    finally:
        first.kill()
    assert (first.returncode, second.returncode) == (1, 1)
    assert "waiting for it" in said and "t/sft diverged at step 2: loss nan; it is not tried again" in said
    assert [line for line in project.log() if line.startswith("step")] == ["step t/sft 1", "step t/sft 2"]


def test_a_started_job_trains_what_was_planned(project):
    """Jobs read specifications only: the experiment file is broken and gone while the first job runs."""
    process = project.start("-c", "2", "outputs/t/sft/weights", TOY_SECONDS="0.1")
    try:
        spec = None
        while process.poll() is None and not spec:
            spec = list(Path("outputs/.store").glob("train-*/spec.json"))
        for path in Path("experiments/t").glob("*.toml"):
            path.write_text("broken [")
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "train t/sft from 0 to 4 " in project.log()
    assert Path("outputs/t/sft/weights/model.safetensors").read_text() == "sft 4"


def test_one_line_per_mistake(project):
    """Unknown targets, real directories in a link's place, direct runs: one line each, nothing is touched (O06)."""

    def line(*targets: str) -> str:
        (found,) = project.refused(*targets)
        return found

    code, output = project.snakemake("-c", "1", "outputs/t/stf/weights")
    assert code == 2 and "Traceback" not in output and len(output.splitlines()) == 2, output
    elsewhere = project.root.parent / "elsewhere"
    elsewhere.mkdir()
    code, output = project.snakemake("-s", str(project.root / "Snakefile"), "-d", str(elsewhere), "-n", "all")
    assert code == 2 and f"no experiments/ in {elsewhere}: run it in {project.root}, or with -d" in output, output
    assert "did you mean 't/sft'?" in line("outputs/t/stf/weights")
    assert "the run ends at step 4" in line("outputs/t/sft/checkpoints/step_9")
    assert "there is no suite experiments/evals/hold.toml; did you mean 'held'?" in line("outputs/t/sft/evals/hold")
    assert "run 't/data' (data) has none; it yields data" in line("outputs/t/data/weights")
    real = Path("outputs/t/sft/weights")
    real.mkdir(parents=True)
    (real / "precious").touch()
    assert "is a real directory" in line("outputs/t/sft/weights")
    assert (real / "precious").exists()
    shutil.rmtree("outputs")
    Path("outputs/t/sft").mkdir(parents=True)
    Path("outputs/t/sft/run.json").write_text("{}")
    assert "started directly (run.json)" in line("outputs/t/sft/weights")


def test_bad_files_are_all_reported_at_once(project):
    project.write("t/my run.toml", FRAGMENT)
    project.write("t/a;touch PWNED.toml", FRAGMENT)
    project.write("t/it's.toml", FRAGMENT)
    project.write("t/naïve.toml", FRAGMENT)
    project.write("t/-x.toml", FRAGMENT)
    project.write("t/a{b}.toml", FRAGMENT)
    project.write("t/sft/inner.toml", FRAGMENT.replace("../base", "../../base"))
    project.write("t/weights.toml", FRAGMENT)
    project.write("t/broken.toml", "a = [")
    project.write("t/unknown.toml", FRAGMENT + "max_stepz = 1\n")
    project.write("t/orphan.toml", FRAGMENT.replace("outputs/t/data/data", "outputs/t/dota/data"))
    project.write("t/missing.toml", FRAGMENT.replace("outputs/t/data/data", "./rows.parquet"))
    lines = project.refused("all")
    for words in (
        "my run.toml", "PWNED.toml", "it's.toml", "naïve.toml", "-x.toml", "a{b}.toml", "inside run", "reserved",
        "not readable as TOML", "did you mean 'max_steps'?", "did you mean 't/data'?", "./rows.parquet: no such file",
    ):  # fmt: skip
        assert sum(words in line for line in lines) == 1, (words, lines)
    assert len(lines) == 12
    assert not Path("PWNED").exists()


FRAGMENT = """
max_steps = 4
model.name = "outputs/t/model/weights"
data.name = "outputs/t/data/data"
renderer.name = "qwen3"
experiment.kind = "sft"
experiment.extends = ["../base/cpu.toml"]
"""


def test_shell_lines_carry_fingerprints_and_steps_only(project):
    code, output = project.snakemake("-n", "-p", "all")
    assert code == 0
    lines = [line.strip() for line in output.splitlines() if "rlmake.cli.job" in line]
    assert len(lines) == 18
    for text in lines:
        arguments = text.split("rlmake.cli.job ")[1].split()
        assert arguments[0] in {*WORK - {"evaluate"}, "eval", "publish"}
        assert all(set(word) <= set("0123456789abcdef") or word == "weights" for word in arguments[1:]), text


def test_a_killed_driver_leaves_one_training(project):
    """The driver is killed, its job lives on: a second driver waits for it, and nothing is trained twice."""
    target = "outputs/t/sft/weights"
    project.build("outputs/t/model/weights")
    driver = project.start("-c", "2", target, TOY_SECONDS="1.5")
    while driver.poll() is None and "step t/sft 1" not in project.log():
        time.sleep(0.05)
    driver.kill()
    driver.wait(timeout=60)
    code, output = project.snakemake("-c", "2", target)
    driver.stdout.close()
    assert code == 0, output
    steps = [line for line in project.log() if line.startswith("step t/sft")]
    assert steps == [f"step t/sft {step}" for step in (1, 2, 3, 4)]
