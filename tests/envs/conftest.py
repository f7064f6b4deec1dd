"""A toy tokenizer, a fake engine and a real env server process, shared by the tests of this folder."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from env_fakes import FakeEngine, load_tokenizer, save_tokenizer, serving

from rlmake.core.rundir import RunContext


def rows(count=24):
    phrases = [f"the words of phrase number {index}" for index in range(count)]
    return [{"id": f"r{index}", "prompt": text, "target": text[::-1]} for index, text in enumerate(phrases)]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer, lambda prompt: prompt[::-1])


@pytest.fixture
def base_url(engine):
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="session")
def env_server(tmp_path_factory):
    """A running server of reverse-text: `.source`, `.ctx`, `.address_file`, `.process`, `.log`."""
    run_dir = tmp_path_factory.mktemp("run")
    data = run_dir / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    env = {"taskset": {"id": "reverse-text", "path": str(data)}}
    ctx = RunContext(run_dir, "run-1", "run", 1, None, run_dir / "configs/attempt_1", run_dir / "logs/attempt_1")
    config = ctx.config_dir / "resolved" / "envs" / "train" / "rev.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"name": "rev", "split": "train", "env": env, "output_dir": str(run_dir)}))
    environ = os.environ | {
        "PRL_RUN_ID": "run-1",
        "PRL_ATTEMPT_CONFIG_DIR": str(ctx.config_dir),
        "OMP_NUM_THREADS": "1",
    }
    with open(run_dir / "server.log", "wb") as log:
        command = [sys.executable, "-m", "rlmake.envs.server", "@", str(config)]
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    source = SimpleNamespace(name="rev", env=env)
    yield SimpleNamespace(
        source=source, ctx=ctx, address_file=config.with_suffix(".address"), process=process, log=run_dir / "server.log"
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, (run_dir / "server.log").read_text()[-2000:]
