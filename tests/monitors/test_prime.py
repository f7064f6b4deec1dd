"""The platform's monitor with the real SDK against a local stand-in."""

import time
from types import SimpleNamespace

import pytest
import services
from verifiers.v1.episode import Episode

from rlmake import monitors
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.core.rundir import RunContext
from rlmake.monitors import prime, prime_evals
from rlmake.monitors.prime import Episodes
from rlmake.monitors.traces.records import Arrival, Work, annotation, trace_id

CONFIG = SimpleNamespace(file=None, wandb=None, prime=SimpleNamespace(name=None))


@pytest.fixture
def ctx(tmp_path, monkeypatch):
    for name in ("PRIME_API_KEY", "RUN_ID", "PRIME_RUNS_MODE", "PRIME_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PRIME_TEAM_ID", "team")
    monkeypatch.setenv("PRIME_TRACES_OPT_OUT", "true")
    run = tmp_path / "run"
    resolved = run / "configs" / "attempt_1" / "resolved"
    write_json(resolved / "orchestrator.json", {"max_steps": 20, "train": {"source": [{"name": "a"}]}})
    write_json(resolved / "trainer.json", {"model": {"name": "base"}})
    return RunContext(run, "rl-1", "my-run", 1, None, resolved.parent, run / "logs")


@pytest.fixture
def online(monkeypatch):
    with services.serving(services.Prime()) as service:
        monkeypatch.setenv("PRIME_API_KEY", "key")
        monkeypatch.setenv("PRIME_BASE_URL", service.url)
        monkeypatch.setenv("PRIME_API_BASE_URL", service.url)
        yield service


def test_registers_streams_and_closes(ctx, online):
    m = monitors.setup(CONFIG, "orch", ctx)
    for step in (1, 2):
        m.log(step, {"reward/all/mean": step / 2})
    m.close(finished=True)
    (registered,) = online.bodies("/external-runs")
    assert registered["base_model"] == "base" and registered["max_steps"] == 20 and registered["name"] == "my-run"
    assert registered["environments"] == [{"id": "a"}] and registered["team_id"] == "team"
    rows = [body["metrics"] for body in online.bodies("/rft/metrics")]
    assert [(row["step"], row["reward/all/mean"]) for row in rows] == [(1, 0.5), (2, 1.0)]
    assert online.bodies("/rft/finalize") == [{"run_id": "r1", "exit_code": 0}]
    assert read_json(ctx.run_dir / "monitors/prime/run.json")["id"] == "r1"


def test_a_training_s_evaluations_are_uploaded_each_as_one(ctx, online, warnings):
    online.refused = "my-run a v8"
    m = monitors.setup(CONFIG, "orch", ctx)
    recorder = m.recorder("rl-1")
    for env, version in (("a", 0), ("a", 4), ("b", 4)):
        for sample in range(2):
            work = Work("eval", env, f"{env}/g", f"eval/{env}/v{version}/{sample}", version, version, 0.0)
            recorder.arrived(work, Episode.model_construct(id=f"{env}{version}{sample}", traces=[]), version)
        m.log(version, {f"eval/{env}/policy_version": version, f"eval/{env}/avg@2": 0.25 * version})
    m.log(8, {"eval/a/policy_version": 8})
    m.close(finished=True)
    opened = online.bodies("/evaluations/", exact=True)
    assert [body["name"] for body in opened] == ["my-run a v0", "my-run a v4", "my-run b v4", "my-run a v8"]
    assert opened[1]["model_name"] == "base" and opened[1]["metadata"]["policy_version"] == 4
    assert opened[1]["metadata"]["training_run"] == "r1" and opened[0]["environments"]
    sent = [body["metrics"]["avg@2"] for body in online.bodies("/finalize") if "metrics" in body]
    assert sent == [0.0, 1.0, 1.0]
    assert online.bodies("/rft/finalize") == [{"run_id": "r1", "exit_code": 0}], "the training goes on and ends well"
    assert any("evaluation of a at v8 was not uploaded" in line for line in warnings)


def test_a_service_that_does_not_answer_any_more_holds_up_no_end(ctx, online, warnings, monkeypatch):
    monkeypatch.setattr(prime_evals, "CLOSE_SECONDS", 0.5)
    evaluations = prime_evals.Evaluations(prime._sdk(), "my-run", "r1", {"model": "base", "mode": "online"})
    online.silent.set()
    for version in (1, 2, 3):
        evaluations.row({"eval/a/policy_version": version})
    start = time.monotonic()
    evaluations.close()
    online.silent.clear()
    assert time.monotonic() - start < 5
    assert any("3 evaluations were not uploaded" in line for line in warnings)
    evaluations._thread.join(30)


@pytest.mark.parametrize(("status", "words"), [(401, "API key unauthorized"), (500, "500")])
def test_whatever_a_run_is_refused_with_is_one_line(ctx, online, status, words):
    online.status = status
    with pytest.raises(UserError, match=rf"monitors\.prime: .*{words}") as error:
        monitors.setup(CONFIG, "orch", ctx)
    assert "\n" not in str(error.value)


def test_a_service_that_dies_in_the_middle_costs_numbers_and_nothing_else(ctx, monkeypatch, warnings):
    with services.serving(services.Prime()) as service:
        monkeypatch.setenv("PRIME_API_KEY", "key")
        for name in ("PRIME_BASE_URL", "PRIME_API_BASE_URL"):
            monkeypatch.setenv(name, service.url)
        m = monitors.setup(CONFIG, "orch", ctx)
        m.log(1, {"x": 1.0})
        m._monitors["prime"]._run.flush()
        assert service.bodies("/rft/metrics")
    start = time.monotonic()
    for step in range(2, 200):
        m.log(step, {"x": 1.0})
    assert time.monotonic() - start < 5, "a step does not wait for it"
    m.close(finished=True)
    assert time.monotonic() - start < 120


def test_a_run_that_was_stopped_is_reported_as_such(ctx, online):
    monitors.setup(CONFIG, "orch", ctx).close()
    (status,) = online.bodies("/status")
    assert status["status"] == "failed" and "ended before the run" in status["error_message"]
    assert not online.bodies("/rft/finalize")


def test_attaches(ctx, online, monkeypatch):
    monkeypatch.setenv("RUN_ID", "given")
    m = monitors.setup(CONFIG, "orch", ctx)
    m.log(1, {"x": 1.0})
    m.close(finished=True)
    assert not online.bodies("/external-runs") and online.bodies("/rft/metrics")[0]["run_id"] == "given"


def test_a_missing_key_fails_the_launch(ctx):
    with pytest.raises(UserError, match=r"monitors\.prime: .*PRIME_API_KEY"):
        monitors.setup(CONFIG, "orch", ctx)


def test_a_team_that_is_not_enabled_fails_the_launch(ctx, online):
    online.status = 403
    with pytest.raises(UserError, match=r"monitors\.prime: .*not enabled"):
        monitors.setup(CONFIG, "orch", ctx)


def test_disabled_opens_nothing(ctx, monkeypatch):
    monkeypatch.setenv("PRIME_RUNS_MODE", "disabled")
    m = monitors.setup(CONFIG, "orch", ctx)
    m.log(1, {"x": 1.0})
    m.close(finished=True)
    assert read_json(ctx.run_dir / "monitors/prime/run.json")["mode"] == "disabled"


def test_effective_episodes_of_every_tenth_step():
    episodes = Episodes("rl-1", everything=False)
    made = {}
    for step in (9, 10, 20):
        for sample in (0, 1):
            name = f"a/{step}/{sample}"
            made[name] = Episode.model_construct(traces=[SimpleNamespace()])
            work = Work("train", "a", "g", name, step, step - 1, 0.0)
            episodes.arrived(Arrival(work, made[name], step, 1.0))
    shipped = {"ship": {"step": 0, "version": 0, "time": 0.0}}
    for name, step in (("a/9/0", 9), ("a/10/0", 10), ("a/20/1", 20)):
        info = shipped | {"ship": shipped["ship"] | {"step": step}}
        episodes.annotate(annotation(trace_id("rl-1", name), 1, info, ()))
    episodes.annotate(annotation(trace_id("rl-1", "a/10/1"), 1, {"advantage": 0.0}, ()))
    assert [episode.run.work.step for episode in episodes.take()] == [10, 20]
    assert episodes.take() == []
