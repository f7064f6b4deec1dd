"""Components that are started by hand into one run directory share an attempt."""

import json

from rlmake.launch.attempt import join, record


def test_each_component_joins_once_and_a_second_round_is_the_next_attempt(tmp_path):
    first = [join(tmp_path, name) for name in ("envs/train/a", "trainer", "orchestrator", "envs/train/b")]
    assert [attempt.number for attempt in first] == [1, 1, 1, 1] and first[0].log_dir.is_dir()
    assert join(tmp_path, "trainer").number == 2
    assert join(tmp_path, "orchestrator").number == 2, "the newest attempt has none yet"
    assert (tmp_path / "configs/latest").readlink().name == "attempt_2"


def test_a_component_of_a_launch_stays_in_its_attempt(tmp_path, monkeypatch):
    monkeypatch.setenv("PRL_ATTEMPT_CONFIG_DIR", str(tmp_path / "configs/attempt_7"))
    monkeypatch.setenv("PRL_ATTEMPT_LOG_DIR", str(tmp_path / "logs/attempt_7"))
    assert [join(tmp_path, "trainer").number for _ in range(2)] == [7, 7]


def test_commands_of_one_attempt_stand_below_one_another(tmp_path):
    config = tmp_path / "env.json"
    config.write_text(json.dumps({"name": "a"}))
    attempt = join(tmp_path, "envs/train/a")
    record(attempt, "envs/train/a", ["env-server", "@", "a b.json"], [config])
    record(join(tmp_path, "trainer"), "trainer", ["trainer", "@", "t.toml"], [])
    lines = (attempt.config_dir / "command.txt").read_text().splitlines()
    assert lines == ["env-server @ 'a b.json'", "trainer @ t.toml"]
    assert (attempt.config_dir / "envs/train/a.json").read_text() == config.read_text()
