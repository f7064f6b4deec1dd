"""The routes: what each answers about a run that the product's own monitors wrote."""

import json
import os
import shutil
import time

import msgspec
import pytest
from dashboard_runs import HOSTILE, Made, cite, configs, record, report, work, write

from rlmake.dashboard.metrics import Metrics, sample, thin


def test_runs_with_their_facts(client, run, outputs):
    found = client.get("/api/runs").json()
    (meta,) = found["runs"]
    assert (meta["id"], meta["type"], meta["model"], meta["state"]) == ("demo", "rl", "tiny/model", "running")
    assert (meta["last_step"], meta["max_steps"], meta["train_envs"]) == (3, 10, ["rev"])
    assert meta["has_metrics"] and meta["has_traces"] and found["dirs"] == [str(outputs)]


def test_states(client, run, outputs):
    def state():
        return client.get("/api/meta", params={"run": "demo"}).json()["state"]

    old = time.time() - 3600
    for path in run.rglob("*"):
        os.utime(path, (old, old), follow_symlinks=False)
    assert state() == "stopped"
    Made(run, 2, 3).step(10).close()
    assert state() == "finished"
    write(run / "failure.json", "{}")
    assert state() == "failed"


def test_runs_are_found_by_what_they_hold(client, outputs):
    Made(outputs / "deep/er/one").close()
    Made(outputs / ".hidden").close()
    (outputs / "nothing/here").mkdir(parents=True)
    assert [row["id"] for row in client.get("/api/runs").json()["runs"]] == ["deep/er/one"]
    assert client.get("/api/runs/deep/er/one/configs").status_code == 200


def test_a_run_of_the_build_is_read_in_the_store_and_its_evaluations_are_runs(client, outputs):
    store = outputs / ".store/train-0123456789abcdef"
    Made(store).step(1).close()
    Made(outputs / ".store/eval-0123456789abcdef").close()
    named = outputs / "a/b"
    (named / "evals").mkdir(parents=True)
    for what in ("configs", "logs"):
        (named / what).symlink_to(f"../../.store/train-0123456789abcdef/{what}")
    (named / "evals/suite").symlink_to("../../../.store/eval-0123456789abcdef")
    configs(store, 1, model={"name": "/x/outputs/.store/train-0000000000000000/exports/step_4/weights"})
    parent = {"stage": "train", "fingerprint": "0000000000000000", "ref": "outputs/a/warm/weights"}
    write(store / "spec.json", json.dumps({"parents": [{"ref": None}, parent]}))
    found = {row["id"]: row for row in client.get("/api/runs").json()["runs"]}
    assert set(found) == {"a/b", "a/b/evals/suite"} and found["a/b"]["last_step"] == 1
    assert found["a/b"]["model"] == "a/warm/weights", "the name that it was given, not where it lies in the store"
    assert client.get("/api/runs/a/b/logfiles").json()["files"]
    assert client.get("/api/runs/a/b/evals/suite/configs").json()["attempt"] == 1


def test_two_directories_with_one_run_name(tmp_path):
    from starlette.testclient import TestClient

    from rlmake.dashboard.app import create

    dirs = [tmp_path / "x/outputs", tmp_path / "y/outputs", tmp_path / "z/other"]
    for folder in dirs:
        Made(folder / "same").close()
    found = TestClient(create(dirs), base_url="http://localhost").get("/api/runs").json()["runs"]
    assert {row["id"] for row in found} == {"same", f"{dirs[1]}:same", "other:same"} or len(found) == 3
    assert len({row["id"] for row in found}) == 3


def test_series_of_metrics(ask):
    assert "reward/all/mean" in ask("keys")["keys"]
    found = ask("series", key=["reward/all/mean", "loss/mean", "no/such"])
    assert found["whole"] and found["series"]["reward/all/mean"]["step"] == [1, 2, 3]
    assert found["series"]["loss/mean"]["value"] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert found["series"]["no/such"]["value"] == []
    sections = {part["section"]: part["panels"] for part in ask("panels")["sections"]}
    assert ["reward/all/mean"] in [panel["keys"] for panel in sections["train"]], (
        "of one environment the scopes are one"
    )


def test_the_latest_attempt_wins_and_an_abandoned_future_is_gone(ask, run):
    made = Made(run, 2, start=1)
    made.trainer.log(2, {"loss/mean": 7.0})
    made.close()
    assert ask("series", key="loss/mean")["series"]["loss/mean"]["value"] == [1.0, 7.0], "O01"
    assert ask("series", key="reward/all/mean")["series"]["reward/all/mean"]["step"] == [1]


def test_metrics_follow_growth_tears_and_a_new_file(run, tmp_path):
    metrics = Metrics(run / "monitors/file/metrics.jsonl")
    metrics.refresh(5)
    before = len(metrics.columns.series("loss/mean")["step"])
    with open(metrics.path, "ab") as file:
        file.write(b'{"step":4,"producer":"trainer","loss/mean":0.25}\n{"step":5,"produ')
    metrics.refresh(5)
    assert len(metrics.columns.series("loss/mean")["step"]) == before + 1 and metrics.torn == 0
    with open(metrics.path, "ab") as file:
        file.write(
            b'cer":"trainer","loss/mean":0.2}\nnonsense\n{"step":"x","a":1}\n{"step":6,"producer":"t","s":"text"}\n'
        )
    metrics.refresh(5)
    assert metrics.columns.series("loss/mean")["value"][-1] == pytest.approx(0.2) and metrics.torn == 1
    metrics.path.write_text('{"step":1,"producer":"trainer","loss/mean":9}\n')
    metrics.refresh(5)
    assert metrics.columns.series("loss/mean")["value"].tolist() == [9]


def test_a_sample_of_a_large_file_spans_all_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    keys = {f"k/{n}": float(n) for n in range(100)}
    with open(path, "w") as file:
        for step in range(5000):
            file.write(json.dumps({"step": step, "time": step, "producer": "trainer", **keys}) + "\n")
    columns = sample(path, path.stat().st_size)
    steps = columns.series("k/7")["step"]
    assert 200 < len(steps) < 600 and steps[0] == 0 and steps[-1] > 4900 and max(steps[1:] - steps[:-1]) < 60


def test_thinning_keeps_extremes_and_ends():
    import numpy as np

    values = np.zeros(100_000)
    values[54_321], values[77] = 5, -3
    kept = thin({"step": np.arange(100_000), "value": values}, 500)
    assert len(kept["step"]) <= 520 and {0, 77, 54_321, 99_999} <= set(kept["step"].tolist())


def test_episodes_table(ask):
    found = ask("episodes")
    assert found["total"] == found["lines"] == 12 and found["whole"]
    first = found["episodes"][0]
    assert first["name"] == "rev/300/3" and first["reward"] == 0.75 and first["advantage"] == 1.5 and first["effective"]
    assert ask("episodes", etag=found["etag"]) == {"unchanged": True, "etag": found["etag"]}
    assert ask("episodes", step=2, kind="train", subset="effective")["total"] == 4
    assert [row["reward"] for row in ask("episodes", sort="reward", order="asc", limit=4)["episodes"]] == [
        0,
        0,
        0,
        0.25,
    ]
    assert ask("episodes", q="rev/200/", low=0.5)["total"] == 2 and ask("episodes", group="rev/100")["total"] == 4
    assert ask("episodes", errors_only=1)["total"] == 0 and ask("episodes", limit=5, offset=10)["total"] == 12
    assert ask("episodes", status=400, step="x")["error"].startswith("step: expected a number")
    assert ask("episodes", status=400, low="nan")
    assert {row["step"]: row["effective"] for row in ask("rollouts")["cohorts"]} == {1: 4, 2: 4, 3: 4}
    bins = ask("episodes/histogram", key="reward", bars=10)
    assert bins["total"] == 12 and sum(count for _, count in bins["bins"]) == 12 and bins["bin"] == 0.1
    columns = ask("episodes/series", step=1)["series"]
    assert columns["rewards/similarity"] == [0, 0.25, 0.5, 0.75] and columns["metrics/exact_match"] == [0] * 4


def test_one_episode_with_its_tokens(ask):
    line = ask("episodes/find", episode="rev/100/2", step=1, kind="train", subset="effective")["line"]
    one = ask(f"episodes/{line}")
    (trace,) = one["traces"]
    assert [node["role"] for node in trace["nodes"]] == ["system", "user", "assistant"]
    assert trace["branches"] == [[0, 1, 2]] and one["streams"] == ["orch", "trainer"]
    found = ask(f"episodes/{line}/tokens", trace=0, node=2)
    (node,) = found["nodes"]
    assert found["status"] == "tokenizer_unavailable" and node["texts"] is None
    assert node["mask"] == [0, 0, 0, 0, 1, 1] and node["logprobs"] == [None] * 4 + [-0.5, -0.25]
    assert node["advantages"] == [None] * 4 + [0.5] * 2 and node["trained"] == [None] * 4 + [1, 1]
    assert node["mismatch"][4:] == pytest.approx([0.1, -0.15]) and node["is_masked"][4:] == [1, 0]
    assert node["content"] == [0, 1, 1, 1, 1, 0] and node["entropies"][4:] == [0.7, 0.7]
    assert len(ask(f"episodes/{line}", tokens=1)["tokens"][0]["nodes"]) == 3
    assert ask("episodes/9999", status=404) and ask(f"episodes/{line}/tokens", status=404, node=77)


def test_timeline_and_graph(ask, run):
    Made(run, 2, 3).episode(work(900, 0, 4), record(turns=3)).close()
    line = ask("episodes", q="rev/900/0")["episodes"][0]["line"]
    times = ask(f"episodes/{line}/timeline")
    assert times["end"] - times["start"] == 9 and [stage["label"] for stage in times["stages"]] == ["agent"]
    assert [bar["kind"] for bar in times["lanes"][0]["bars"]] == ["model", "tool", "model", "tool", "model"]
    graph = times["semantic"]
    assert [turn["prompt"] for turn in graph["turns"]] == [12, 22, 32]
    assert [edge["type"] for edge in graph["edges"]] == ["continuation"] * 2
    assert graph["contexts"] == [{"context": 0, "latest": 32, "peak": 32, "cumulative": 72, "turns": 3}]


def test_a_torn_record_answers_422_and_the_rest_stands(ask, run):
    path = run / "monitors/file/traces/stream/00000.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    assert "torn" in ask("episodes/11", status=422)["error"]
    assert ask("episodes/10")["name"] == "rev/300/2" and ask("episodes")["total"] == 12
    path.write_bytes(data.replace(b'"nodes"', b'"n\xff\xfee"', 1))
    assert ask("episodes/0", status=422)


def test_damaged_rows_of_the_index_are_left_out(ask, run):
    with open(run / "monitors/file/traces/stream.index.jsonl", "ab") as file:
        file.write(b'{"chunk":0}\nnull\n{"chunk":0,"offset":0,"length":10,"reward":"high"}\n{"chunk":')
    found = ask("episodes")
    assert found["total"] == 12 and found["torn"] == 3


def test_annotations_belong_to_the_newest_record_that_their_attempt_has_seen(ask, run):
    """After a resume a rollout is made again under the same name."""
    Made(run, 2, 1).episode(work(200, 0, 2), record(reward=1.0), trained=False).close()
    rows = [row for row in ask("episodes", q="rev/200/0")["episodes"]]
    assert [(row["attempt"], row["effective"]) for row in rows] == [(2, False), (1, True)]
    third = Made(run, 3, 1)
    third.recorder.shipped(["rev/200/0"], 2, 1)
    third.close()
    rows = [row for row in ask("episodes", q="rev/200/0")["episodes"]]
    assert [(row["attempt"], row["effective"], row["superseded"]) for row in rows] == [
        (2, True, False),
        (1, True, True),
    ]
    assert ask("episodes/find", episode="rev/200/0", step=2, kind="train", subset="effective")["line"] == 12


def test_what_a_resume_made_again_is_counted_once(ask, run):
    made = Made(run, 2, 1)
    made.step(2).step(3).close()
    cohorts = {one["step"]: (one["all"], one["effective"]) for one in ask("rollouts")["cohorts"]}
    assert cohorts == {1: (4, 4), 2: (4, 4), 3: (4, 4)}
    for subset in ("all", "effective"):
        found = ask("episodes", step=2, kind="train", subset=subset)
        assert found["total"] == 4 and {row["attempt"] for row in found["episodes"]} == {2}
    assert ask("episodes")["total"] == 20 and ask("episodes", subset="effective")["total"] == 12


def test_after_a_resume_the_step_is_that_of_the_new_attempt(client, run):
    """Not the last one that the killed attempt had come to."""
    step = lambda: client.get("/api/meta?run=demo").json()["last_step"]  # noqa: E731
    assert step() == 3
    made = Made(run, 2, 1)
    assert step() == 1, "behind the checkpoint"
    made.step(2).close()
    assert step() == 2


def test_what_is_left_follows_from_the_pace_of_the_newest_attempt(client, run):
    """The hours between a kill and a resume are no work."""
    rows = [(1, 1, 100.0), (1, 2, 110.0), (2, 1, 90_000.0), (2, 2, 90_010.0), (2, 4, 90_030.0)]
    lines = [{"step": step, "producer": "orch", "attempt": attempt, "time": time} for attempt, step, time in rows]
    lines.insert(2, {"step": 1, "producer": "launcher", "attempt": 2, "time": 89_000.0})
    write(run / "monitors/file/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    found = client.get("/api/meta?run=demo").json()
    assert (found["last_step"], found["max_steps"], found["left"]) == (4, 10, 60.0)


def test_requests_side_by_side_read_every_row_once(run):
    """A report asks for all its citations at once."""
    from concurrent.futures import ThreadPoolExecutor

    from rlmake.dashboard.episodes import Episodes

    for _ in range(20):
        episodes = Episodes(run / "monitors/file/traces")
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: episodes.refresh(5.0), range(64)))  # noqa: B023
        assert len(episodes.table) == 12 and sum(len(episodes.line(n).notes) for n in range(12)) == 24


def test_live_traces(ask, run):
    made = Made(run, 2, 3)
    delta = {
        "trace": "abc",
        "open": {"task": {}},
        "nodes": [{"message": {"role": "user", "content": "hi"}, "token_ids": [1]}],
    }
    with made.recorder.episode(work(500, 0, 4)) as on_delta, made.recorder.episode(work(500, 1, 4)):
        on_delta(msgspec.msgpack.encode(delta))
        on_delta(msgspec.msgpack.encode({"trace": "abc", "pending": [{"role": "tool", "content": "42"}]}))
        deadline = time.monotonic() + 10
        while len(ask("live")["traces"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = ask("live")
        assert sorted((row["state"], row["name"]) for row in found["traces"]) == [
            ("live", "rev/500/0"),
            ("pending", "rev/500/1"),
        ]
        assert ask("live", etag=found["etag"])["unchanged"]
        one = ask("live/abc")
        assert one["nodes"][0]["message"]["content"] == "hi" and one["pending"][0]["content"] == "42"
    made.recorder.arrived(work(500, 0, 4), made_episode(), 3)
    made.recorder.arrived(work(500, 1, 4), made_episode(), 3)
    made.close()
    assert ask("live")["traces"] == [] and ask("live/abc", status=404)
    assert ask("live/..%2f..%2fx", status=404)


def made_episode():
    from dashboard_runs import Episode

    return Episode(record())


def test_logs_by_bytes_without_colours(ask, run):
    found = ask("logfiles")
    assert {row["file"]: row["component"] for row in found["files"]} == {
        "orchestrator.log": "orch", "trainer.log": "trainer", "envs/train/rev.log": "env:rev",
    }  # fmt: skip
    part = ask("log", file="orchestrator.log")
    assert part["text"].endswith("orchestrator slow\n") and part["end"] == part["size"]
    with open(run / "logs/attempt_1/orchestrator.log", "a") as file:
        file.write("10:00:06 INFO    half")
    assert ask("log", file="orchestrator.log", start=part["end"])["text"] == "", "a line that isn't whole yet waits"
    with open(run / "logs/attempt_1/orchestrator.log", "a") as file:
        file.write(" a line\n")
    assert ask("log", file="orchestrator.log", start=part["end"])["text"] == "10:00:06 INFO    half a line\n"
    (run / "logs/attempt_1/big.log").write_text("x" * 99 + "\n" + "y" * 5_000_000)
    assert len(ask("log", file="big.log")["text"]) <= 2_000_000 and ask("log", file="big.log", tail=-5)["text"] == ""


def test_configurations_of_all_attempts(ask, run):
    configs(run, 2)
    found = ask("configs")
    assert found["attempt"] == 2 and found["attempts"] == [1, 2]
    assert [row["file"] for row in found["files"]][:2] == ["command.txt", "rl.toml"]
    assert json.loads(ask("config", file="resolved/orchestrator.json", attempt=1)["text"])["lr"] == 1e-4
    assert ask("configs", status=404, attempt=7) and ask("configs", status=404, attempt="../..")


def test_reports_and_checked_citations(ask, run):
    assert [(row["file"], row["title"]) for row in ask("reports")["reports"]] == [("first.md", "What it learns")]
    found = ask("report", file="first.md")
    text = json.dumps(found["body"])
    assert "<b>raw</b> [x](javascript" in text, "as text"
    assert '"href": "https://example.org/"' in text and '"href": "javascript' not in text
    good = ask("check", file="first.md", id="a")
    assert good["ok"] and (good["line"], good["trace"], good["node"], good["field"]) == (0, 0, 2, "content")
    assert ask("check", file="first.md", id="b") == {
        "run": "demo",
        "line": 0,
        "ok": False,
        "fault": "the quote is not in this episode",
    }
    assert ask("check", status=404, file="first.md", id="zzz")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (cite(step="1"), "step must be a number"), (cite(step=True), "step must be a number"),
        (cite(note=None), "note is missing"), (cite(extra=1), "extra is unknown"),
        (cite(kind="x"), "kind must be train or eval"), (cite(quote="  "), "the quote is empty"),
        ("{broken", "not JSON"), (cite(episode="rev/9/9"), "not in this cohort"), (cite(quote="e"), "stands"),
        (cite(run="nope"), "not there"), (cite(field="reasoning"), "is not in this episode"),
        (cite(subset="some"), "subset must be"), (cite(trace=4), "is not in this episode"),
    ],
)  # fmt: skip
def test_broken_citations_say_what_is_wrong(ask, run, text, fault):
    report(run, "second.md", a=text if text.startswith("{") and text.endswith("}") else "{broken}")
    answer = ask("check", file="second.md", id="a")
    assert not answer["ok"] and fault in answer["fault"]


def test_quotes_match_over_white_space_and_by_their_surroundings(ask, run):
    text = "one  two\nthree; one two three! One two three"
    Made(run, 2, 3).episode(work(700, 0, 4), record(reply=text)).close()
    common = {"step": 4, "episode": "rev/700/0"}
    cases = [
        ({"quote": "one two three"}, False), ({"quote": "one two three", "suffix": "!"}, True),
        ({"quote": "two\tthree", "prefix": "One "}, True), ({"quote": "ONE two"}, False),
        ({"quote": "Let me think.", "field": "reasoning"}, True),
    ]  # fmt: skip
    for number, (given, ok) in enumerate(cases):
        report(run, f"q{number}.md", a=cite(**common, **given))
        assert ask("check", file=f"q{number}.md", id="a")["ok"] is ok, given


def test_nothing_outside_of_a_run_is_read(ask, client, run, outputs, tmp_path):
    secret = write(tmp_path / "secret.log", "secret\n")
    write(tmp_path / "secret.md", "secret")
    (run / "logs/attempt_1/link.log").symlink_to(secret)
    (run / "reports/link.md").symlink_to(tmp_path / "secret.md")
    (run / "configs/attempt_1/resolved/link.json").symlink_to(secret)
    for file in ("link.log", "../../../../secret.log", str(secret), "a\0b", "..", ""):
        ask("log", status=404, file=file)
        ask("config", status=404, file=file)
        ask("report", status=404, file=file)
    assert "link" not in json.dumps([ask("logfiles"), ask("configs"), ask("reports")])
    outside = tmp_path / "elsewhere"
    Made(outside).close()
    (outputs / "linked").symlink_to(outside)
    linked = outputs / "half"
    linked.mkdir()
    (linked / "configs").symlink_to(outside / "configs")
    time.sleep(2.1)
    assert [row["id"] for row in client.get("/api/runs").json()["runs"]] == ["demo"]
    for path in ("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/etc/passwd"):
        assert client.get(path).status_code == 404


def test_hostile_content_stays_data(ask, run, client):
    Made(run, 2, 3).episode(work(800, 0, 4), record(prompt=HOSTILE, reply="x" * 10_000_000)).close()
    row = ask("episodes", q="rev/800/0")["episodes"][0]
    start = time.monotonic()
    one = ask(f"episodes/{row['line']}")
    assert time.monotonic() - start < 5
    nodes = one["traces"][0]["nodes"]
    assert nodes[1]["content"] == HOSTILE.replace("\ud83d", "?") and nodes[2]["cut"] == 10_000_000
    assert len(ask(f"episodes/{row['line']}/message", trace=0, node=2, start=100_000)["text"]) == 1_000_000
    answer = client.get(f"/api/runs/demo/episodes/{row['line']}")
    assert (
        answer.headers["content-type"] == "application/json" and answer.headers["x-content-type-options"] == "nosniff"
    )
    assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_broken_files_take_nothing_down(ask, client, run):
    for path in ("configs/attempt_1/resolved/orchestrator.json", "configs/attempt_1/resolved/trainer.json"):
        (run / path).write_bytes(b"[" * 100_000)
    (run / "monitors/file/traces/plan.json").write_bytes(b"\xff\xfe{")
    write(run / "reports/deep.md", "> " * 3000 + "x\n" + "[^a]" * 5000)
    assert client.get("/api/runs").json()["runs"][0]["id"] == "demo"
    assert ask("report", file="deep.md")["body"] is not None
    shutil.rmtree(run / "monitors")
    assert ask("keys")["keys"] == [] or (ask("keys") and ask("episodes")["lines"] >= 0)
    shutil.rmtree(run / "configs")
    assert client.get("/api/runs").status_code == 200
