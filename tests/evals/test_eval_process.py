"""`eval` as it runs: its process, a real env server, a fake engine on loopback."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "envs"))
from env_fakes import FakeEngine, load_tokenizer, save_tokenizer, serving

from rlmake.config import EnvServerConfig, EvalConfig, dump
from rlmake.core import procs
from rlmake.core.jsonio import write_json
from rlmake.evals import report
from rlmake.evals.records import read


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def evaluated(run_dir, config, identity):
    """Run env servers and the evaluation of `config` to the end; returns (exit code, what it said)."""
    config = EvalConfig.model_validate(config | {"output_dir": str(run_dir)})
    configs = run_dir / "configs/attempt_1"
    resolved = configs / "resolved"
    write_json(resolved / "eval.json", dump(config))
    write_json(resolved / "identity.json", identity)
    environ = os.environ | {"PRL_RUN_ID": "run-1", "PRL_ATTEMPT_CONFIG_DIR": str(configs), "OMP_NUM_THREADS": "1"}
    servers = []
    try:
        for source in config.source:
            path = resolved / "envs/eval" / f"{source.name}.json"
            write_json(path, dump(EnvServerConfig.of_source(source, output_dir=str(run_dir))))
            with open(run_dir / f"{source.name}.log", "wb") as log:
                command = [sys.executable, "-m", "rlmake.envs.server", "@", str(path)]
                servers.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        command = [sys.executable, "-m", "rlmake.evals.main", "@", str(resolved / "eval.json")]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        codes = [server.wait(20) for server in servers]
    assert codes == [0] * len(servers)
    return done.returncode, done.stderr


def test_two_sources_from_process_to_report(tmp_path, tokenizer):
    rows = [{"id": f"r{n}", "prompt": f"phrase {n}", "target": f"phrase {n}"[::-1]} for n in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def reply(prompt):
        if prompt == "phrase 3":
            raise ValueError("the engine is out of memory")
        return prompt[::-1] if prompt.endswith(("0", "2", "4")) else "no"

    env = {"taskset": {"id": "reverse-text", "path": str(data)}}
    identity = {"suite": "toy", "run": "a/b", "model_fingerprint": "0123456789abcdef", "model_step": 20}
    config = {
        "model": "m", "seed": 5, "sampling": {"temperature": 0.0, "max_completion_tokens": 64},
        "source": [{"name": "one", "env": env, "group_size": 2}, {"name": "two", "env": env, "select": {"limit": 3}}],
    }  # fmt: skip
    engine = FakeEngine(tokenizer, reply)
    with serving(engine) as url:
        code, said = evaluated(tmp_path / "run", config | {"client": {"base_url": url}}, identity)
    assert code == 0, said[-3000:]
    assert "Evaluated one (Step 0) | " in said and "Evaluated two (Step 0) | " in said
    made = report.read(tmp_path / "run")
    assert {key: made[key] for key in identity} == identity and made["seed"] == 5 and not made["partial"]
    one, two = made["envs"]["one"], made["envs"]["two"]
    assert (one["num_tasks"], one["num_episodes"], one["failed"]) == (12, 24, 2)
    assert one["pass@1"] == one["pass@2"] == pytest.approx(4 / 12)  # phrases 0, 2, 4 and 10
    assert (two["num_episodes"], two["reward"]["mean"] > 0.6, two["metrics"]["exact_match"]) == (3, True, 2 / 3)
    records = read(tmp_path / "run/episodes.jsonl")
    assert [(r.env, r.key, r.sample) for r in records[:3]] == [("one", "r0", 0), ("one", "r0", 1), ("one", "r1", 0)]
    assert "out of memory" in next(record.error for record in records if record.key == "r3")
    assert (tmp_path / "run/report.html").stat().st_size > 2000
    seeds = {record.seed for record in records}
    assert len(seeds) == 27 and {body["seed"] for body in engine.requests} == seeds
    metrics = [json.loads(line) for line in (tmp_path / "run/monitors/file/metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["eval/one/reward/mean"] == pytest.approx(one["reward"]["mean"])
    assert [row["producer"] for row in metrics] == ["eval", "eval"]


def command(*args):
    """The `eval` console script."""
    return [sys.executable, "-c", "from rlmake.cli.main import eval; eval()", *args]


@pytest.mark.timeout(240)
def test_killed_and_resumed_nothing_is_lost_or_repeated(tmp_path, tokenizer):
    data = tmp_path / "rows.jsonl"
    rows = [{"id": f"r{n}", "prompt": f"phrase {n}", "target": f"phrase {n}"[::-1]} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def reply(prompt):
        await asyncio.sleep(0.25)
        return prompt[::-1]

    engine = FakeEngine(tokenizer, reply)
    with serving(engine) as url:
        config = tmp_path / "suite.toml"
        config.write_text(f'''
            model = "m"
            group_size = 2
            concurrency.max_inflight = 2
            [client]
            base_url = "{url}"
            [[source]]
            name = "one"
            env.taskset = {{ id = "reverse-text", path = "{data}" }}
            [[source]]
            name = "two"
            env.taskset = {{ id = "reverse-text", path = "{data}" }}
            select.limit = 3
        ''')
        args = ["@", str(config), "--output-dir", str(tmp_path / "out"), "--run.name", "mine"]
        run_dir = tmp_path / "out/mine"
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        first = subprocess.Popen(command(*args), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while len(engine.requests) < 7:
            assert first.poll() is None, first.stdout.read().decode()
            time.sleep(0.02)
        first.kill()
        first.wait()
        deadline = time.monotonic() + 20
        while (left := procs.find("PRL_ATTEMPT_LOG_DIR", lambda value: value.startswith(str(run_dir)))) != []:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        kept = read(run_dir / "checkpoints/eval/episodes.jsonl")
        before = len(engine.requests)
        assert 4 <= len(kept) < 22
        refused = subprocess.run(command(*args), env=environ, capture_output=True, text=True, timeout=100, check=False)
        assert refused.returncode == 2 and "use --resume" in refused.stderr and len(engine.requests) == before
        again = [*args, "--resume"]
        done = subprocess.run(command(*again), env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seeds = [body["seed"] for body in engine.requests]
    assert len(seeds) - before == 22 - len(kept)
    assert not {record.seed for record in kept} & set(seeds[before:])
    made = report.read(run_dir)
    assert (made["envs"]["one"]["num_episodes"], made["envs"]["two"]["num_episodes"]) == (16, 6) and not made["partial"]
    assert made["envs"]["one"]["pass^2"] == 1.0
