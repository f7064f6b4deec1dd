"""Runs that are broken, or that lead elsewhere: what of them can't be shown is named, and nothing else is touched."""

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from dashboard_runs import Made, write

from rlmake.dashboard import reports
from rlmake.dashboard.metrics import Metrics
from rlmake.dashboard.runs import Runs

NAMES = ("reports", "configs", "monitors", "logs", "attempt", "metrics", "stream")
RIGHTS = "-dac_override,-dac_read_search"
NO_RIGHTS = ("setpriv", "--bounding-set", RIGHTS, "--inh-caps", RIGHTS)
GOOD = b'{"step":1,"producer":"t","r":0.5}\n'


@pytest.fixture
def listed(client):
    def listed():
        answer = client.get("/api/runs")
        assert answer.status_code == 200, answer.text
        return {row["id"]: row for row in answer.json()["runs"]}

    return listed


def bare(outputs, name, metrics=GOOD):
    run = outputs / name
    write(run / "logs/attempt_1/trainer.log", "hello\n")
    (run / "monitors/file").mkdir(parents=True)
    (run / "monitors/file/metrics.jsonl").write_bytes(metrics)
    return run


@pytest.mark.parametrize(
    ("file", "text"),
    [("eval.json", '{"inference": "x"}'), ("eval.json", '{"inference": {"vllm": [1]}, "eval": 3}'),
     ("orchestrator.json", '{"train": {"source": 5}, "data": "x"}'),
     ("orchestrator.json", '{"max_steps": 1' + "0" * 400 + "}"),
     ("sft.json", '{"model": {"name": [1]}, "monitors": {"file": "x"}}')],
)  # fmt: skip
def test_a_strange_configuration_is_a_row_as_others(listed, run, outputs, file, text):
    write(bare(outputs, "odd") / "configs/attempt_1/resolved" / file, text)
    found = listed()
    assert found["odd"]["last_step"] == 1 and found["odd"]["error"] is None and found["demo"]["last_step"] == 3


def test_without_metrics_the_checkpoints_say_how_far_a_run_is(listed, run, outputs):
    for name, step in (("whole", 4), ("half", 2)):
        write(outputs / name / "logs/attempt_1/trainer.log", "hello\n")
        write(outputs / name / "configs/attempt_1/resolved/sft.json", '{"max_steps": 4, "monitors": {"file": null}}')
        write(outputs / name / f"checkpoints/step_{step}/COMPLETE", "{}")
        (outputs / name / "checkpoints/step_9").mkdir()
    found = listed()
    assert [(found[name]["state"], found[name]["last_step"]) for name in ("whole", "half")] == [
        ("finished", 4), ("running", 2),
    ]  # fmt: skip


def test_metrics_that_are_no_file_are_named_and_hold_nobody_up(listed, ask, run, outputs):
    for name, make in (("folder", os.mkdir), ("pipe", os.mkfifo)):
        path = bare(outputs, name) / "monitors/file/metrics.jsonl"
        path.unlink()
        make(path)
    write(bare(outputs, "config") / "configs/attempt_1/resolved/orchestrator.json", "{broken")
    found = listed()
    for name in ("folder", "pipe"):
        assert found[name]["error"] == "metrics.jsonl: not a regular file" and not found[name]["has_metrics"]
        assert ask("keys", name=name)["fault"] == "metrics.jsonl: not a regular file"
        assert ask("metrics", name=name)["rows"] == [] and ask("panels", name=name)["sections"] == []
    assert found["config"]["error"] == "orchestrator.json: no configuration can be read there"
    assert found["demo"]["error"] is None and ask("keys")["fault"] is None


def test_pipes_anywhere_in_a_run_block_no_reader(ask, client, run):
    places = ["logs/attempt_1/trainer.log", "configs/attempt_1/resolved/trainer.json", "reports/first.md",
              "configs/attempt_1/resolved/orchestrator.json", "monitors/file/traces/stream.index.jsonl",
              "monitors/file/traces/annotations/orch.index.jsonl", "monitors/file/traces/plan.json"]  # fmt: skip
    for place in places:
        (run / place).unlink(missing_ok=True)
        os.mkfifo(run / place)
    for place in ("live/abc.jsonl", "live/pending/q.json"):
        (run / "monitors/file/traces" / place).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(run / "monitors/file/traces" / place)

    def all_of_it():
        assert client.get("/api/runs").json()["runs"][0]["error"] == "stream.index.jsonl: not a regular file"
        ask("log", status=404, file="trainer.log")
        ask("config", status=404, file="resolved/trainer.json")
        ask("report", status=404, file="first.md")
        assert ask("reports")["reports"] == [] and len(ask("logfiles")["files"]) == 2
        assert ask("episodes")["total"] == 0 and "not a regular file" in ask("rollouts")["fault"]
        assert ask("live")["torn"] == 2 and ask("live/abc", status=404)
        done.append(True)

    done = []
    thread = threading.Thread(target=all_of_it, daemon=True)
    thread.start()
    thread.join(20)
    assert done


def test_a_run_that_fails_for_an_unforeseen_reason_is_a_row(listed, run, outputs, monkeypatch):
    bare(outputs, "bad")
    facts = Runs._facts

    def failing(self, one):
        if one.id == "bad":
            raise KeyError("some\nthing")
        return facts(self, one)

    monkeypatch.setattr(Runs, "_facts", failing)
    found = listed()
    assert found["bad"]["state"] == "broken" and found["bad"]["error"] == r"KeyError: 'some\nthing'"
    assert found["demo"]["state"] == "running"


def test_what_may_not_be_read_is_left_out(listed, run, outputs, request, tmp_path):
    probe = tmp_path / "probe"
    probe.touch(mode=0)
    if os.access(probe, os.R_OK):  # root may read everything: once more, without that right
        if "RLMAKE_TEST_RIGHTS" in os.environ or subprocess.run([*NO_RIGHTS, "true"], check=False).returncode:
            pytest.skip("root can't be made to lack rights here")
        again = [*NO_RIGHTS, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.node.nodeid]
        again += ["--rootdir", str(request.config.rootpath), "--basetemp", str(tmp_path / "again")]
        env = {**os.environ, "RLMAKE_TEST_RIGHTS": "dropped"}
        done = subprocess.run(again, cwd=request.config.rootpath, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.startswith("."), done.stdout + done.stderr
        return
    closed, file = bare(outputs, "closed"), bare(outputs, "file") / "monitors/file/metrics.jsonl"
    file.chmod(0)
    closed.chmod(0)
    try:
        found = listed()
        assert "Permission" in found["file"]["error"] and "demo" in found and "closed" not in found
    finally:
        closed.chmod(0o755)


def test_links_that_lead_out_are_not_followed(listed, ask, client, outputs, tmp_path):
    secret = tmp_path / "secret"
    write(secret / "metrics.jsonl", '{"step": 7, "producer": "t", "SECRET": 1}\n')
    write(secret / "file/metrics.jsonl", '{"step": 7, "producer": "t", "SECRET": 1}\n')
    write(secret / "s.md", "---\ntitle: SECRET\n---\n")
    write(secret / "attempt_1/resolved/sft.json", '{"model": {"name": "SECRET"}, "max_steps": 3}')
    write(secret / "attempt_1/trainer.log", "SECRET\n")
    write(secret / "episodes.jsonl", '{"traces": [{"nodes": [{"message": {"content": "SECRET"}}]}]}\n')
    for name in ("reports", "configs", "monitors"):
        run = bare(outputs, f"l-{name}")
        if name == "monitors":
            (run / "monitors").rename(run / "old")
        (run / name).symlink_to(secret)
    run = bare(outputs, "l-logs")
    (run / "logs").rename(run / "old")
    (run / "configs/attempt_1").mkdir(parents=True)
    (run / "logs").symlink_to(secret)
    run = bare(outputs, "l-attempt")
    (run / "configs").mkdir()
    (run / "configs/attempt_1").symlink_to(secret / "attempt_1")
    metrics = bare(outputs, "l-metrics") / "monitors/file/metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to(secret / "metrics.jsonl")
    traces = bare(outputs, "l-stream") / "monitors/file/traces"
    write(traces / "stream.index.jsonl", '{"chunk": 0, "offset": 0, "length": 63, "id": "a"}\n')
    (traces / "stream").mkdir()
    (traces / "stream/00000.jsonl").symlink_to(secret / "episodes.jsonl")
    found = listed()
    del found["demo"]
    assert set(found) == {f"l-{name}" for name in NAMES}
    assert "leads out" in found["l-metrics"]["error"] and "leads out" in found["l-monitors"]["error"]
    texts = [json.dumps(found)]
    for name in found:
        for route in ("reports", "keys", "metrics", "panels", "episodes", "rollouts", "configs", "logfiles", "live"):
            texts.append(client.get(f"/api/runs/{name}/{route}").text)
    for name, route, pairs in (
        ("l-reports", "report", {"file": "s.md"}), ("l-configs", "config", {"file": "resolved/sft.json"}),
        ("l-attempt", "config", {"file": "resolved/sft.json"}), ("l-logs", "log", {"file": "trainer.log"}),
    ):  # fmt: skip
        assert ask(route, status=404, name=name, **pairs)
    assert "leads out" in ask("episodes/0", status=422, name="l-stream")["error"]
    assert not [text for text in texts if "SECRET" in text]


def test_links_within_a_run_and_into_the_store_are_followed(ask, run, outputs):
    kept = write(outputs / ".store/train-0123456789abcdef/reports/kept.md", "# Kept\n")
    (run / "reports/kept.md").symlink_to(kept)
    (run / "logs/attempt_1/node.log").symlink_to("trainer.log")
    assert ask("report", file="kept.md")["body"] and "it broke" in ask("log", file="node.log")["text"]


def test_metrics_are_followed_to_where_the_configuration_puts_them(listed, ask, outputs, tmp_path):
    def at(name, path):
        made = bare(outputs, name, b"")
        monitors = {"monitors": {"file": {"path": str(path)}}}
        write(made / "configs/attempt_1/resolved/trainer.json", json.dumps(monitors))
        return made

    at("inner", "own/place")
    (outputs / "inner/own/place").mkdir(parents=True)
    (outputs / "inner/own/place/metrics.jsonl").write_bytes(GOOD)
    at("beside", "../shared")
    (outputs / "shared").mkdir()
    (outputs / "shared/metrics.jsonl").write_bytes(GOOD)
    at("outer", tmp_path / "away")
    write(tmp_path / "away/metrics.jsonl", '{"step": 1, "producer": "t", "SECRET": 1}\n')
    found = listed()
    for name in ("inner", "beside"):
        assert (
            found[name]["last_step"] == 1 and found[name]["error"] is None and ask("keys", name=name)["keys"] == ["r"]
        )
    words = f"metrics are written to {tmp_path}/away, outside of this run and its project (monitors.file.path)"
    assert found["outer"]["error"] == words and ask("panels", name="outer")["fault"] == words
    assert ask("keys", name="outer")["keys"] == []


@pytest.mark.parametrize(
    "row",
    ['{"step":6,"producer":"t","r":1%s}', '{"step":1%s,"producer":"t","r":1}',
     '{"step":6,"time":1%s,"producer":"t","r":1}', '{"step":6,"attempt":1%s,"producer":"t","r":1}'],
)  # fmt: skip
def test_a_number_that_no_chart_holds_is_an_unreadable_row(listed, ask, outputs, row):
    lines = GOOD + (row % ("0" * 400)).encode() + b"\n"
    bare(outputs, "big", lines + b'{"step":7,"producer":"t","r":0.7}\n')
    assert listed()["big"]["last_step"] in (6, 7)
    for _ in range(2):
        keys = ask("keys", name="big")
        assert (keys["torn"], keys["whole"], keys["progress"]) == (1, True, 1.0)
    found = ask("series", name="big", key="r")["series"]["r"]
    assert found["step"] == [1, 7] and found["value"] == [0.5, 0.7]
    assert ask("metrics", name="big")["rows"]


def test_series_keep_their_digits(ask, outputs):
    bare(outputs, "digits", b'{"step":1,"producer":"t","n":123456789,"v":0.1,"w":1e300}\n')
    found = ask("series", name="digits", key=["n", "v", "w"])["series"]
    assert [found[key]["value"] for key in "nvw"] == [[123456789], [0.1], [1e300]]


def test_a_line_without_an_end_is_torn_once_the_file_rests(run):
    path = run / "monitors/file/metrics.jsonl"
    path.write_bytes(GOOD + b'{"step":2,"producer":"t","a":"' + b"x" * 18_000_000)
    metrics = Metrics(path)
    metrics.refresh(10)
    columns, whole = metrics.best()
    assert whole and metrics.progress == 1 and metrics.torn == 0 and columns.series("r")["step"].tolist() == [1]
    os.utime(path, (1000, 1000))
    assert metrics.torn == 1
    with open(path, "ab") as file:
        file.write(b'"}\n{"step":3,"producer":"t","r":1}\n')
    metrics.refresh(10)
    assert metrics.torn == 0 and metrics.columns.series("r")["step"].tolist() == [1, 3]
    os.truncate(path, len(GOOD))
    metrics.refresh(10)
    assert metrics.columns.series("r")["step"].tolist() == [1]


def test_a_torn_end_that_is_cut_off_costs_no_new_reading(run):
    path = run / "monitors/file/metrics.jsonl"
    path.write_bytes(GOOD + b'{"step":2,"prod')
    metrics = Metrics(path)
    metrics.refresh(10)
    columns = metrics.columns
    os.truncate(path, len(GOOD))
    metrics.refresh(10)
    with open(path, "ab") as file:
        file.write(b'{"step":2,"producer":"t","r":1}\n')
    metrics.refresh(10)
    assert metrics.columns is columns and columns.series("r")["step"].tolist() == [1, 2]


def test_reports_are_cut_and_their_marks_are_bounded(ask, run):
    write(run / "reports/big.md", "word *it* `x`\n\n" * 60_000 + "[^end]\n\n[^end]: {}\n")
    write(run / "reports/line.md", "![" * 60_000)
    found = ask("report", file="big.md")
    assert found["body"][0]["children"][1]["tag"] == "em" and "plain text" in found["cut"]
    assert found["body"][-1]["tag"] == "pre" and "[^end]" in found["body"][-1]["children"][0]
    assert found["citations"]["end"]["fault"] == "step is missing"
    assert len(json.dumps(found["body"])) > 800_000, "nothing of it is lost"
    assert ask("report", file="line.md")["body"][0]["children"] == ["![" * 60_000]
    assert ask("report", file="first.md")["cut"] is None
    assert max(reports.RENDERED, reports.PARAGRAPH) <= 256 << 10


def test_broken_links_and_definitions_are_text_and_faults(ask, run):
    deep = '{"step":' + "[" * 50_000 + "}"
    write(
        run / "reports/x.md",
        f'[b](http://[bad) [c](https://x.org)[^a] [^n]\n\n[^a]: {deep}\n[^n]: {{"step": 1{"0" * 400}}}\n',
    )
    found = ask("report", file="x.md")
    assert "nested too deeply" in found["citations"]["a"]["fault"] and "fault" in found["citations"]["n"]
    assert '"href": "https://x.org"' in json.dumps(found["body"]) and '"href": "http://[' not in json.dumps(
        found["body"]
    )
    assert not ask("check", file="x.md", id="a")["ok"]


def test_attempts_that_are_no_numbers(ask):
    for attempt in ("²", "1²", "x", "-1", "9" * 5000, ""):
        assert "attempt: expected latest or a number" in ask("logfiles", status=422, attempt=attempt)["error"]
    ask("logfiles", status=404, attempt="2")


@pytest.mark.parametrize("steps", [(1, 2, 3), (1, 2, 3, 4, 5)])
def test_a_run_that_was_removed_and_made_again_is_read_from_its_start(ask, run, steps):
    """Also one that is as long as what was read before it, or longer."""
    before = ask("episodes")["episodes"]
    assert ask("episodes/0")["traces"][0]["nodes"][2]["content"] == "olleh" and ask("series", key="loss/mean")
    shutil.rmtree(run)
    made = Made(run)
    made.trainer.log(0, {"new/name": 7.0})
    for step in steps:
        made.step(step, reply="OLLEH")
    made.close()
    found = ask("episodes")
    assert (found["total"], found["torn"]) == (4 * len(steps), 0)
    assert not {row["arrival"] for row in before} & {row["arrival"] for row in found["episodes"]}
    assert ask("episodes/0")["traces"][0]["nodes"][2]["content"] == "OLLEH"
    assert ask("episodes/0/tokens")["torn"] == 0
    assert "new/name" in ask("keys")["keys"] and ask("keys")["torn"] == 0
    assert ask("series", key="loss/mean")["series"]["loss/mean"]["step"] == list(steps)
