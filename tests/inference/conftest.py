"""A tiny model, and the real server process over it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from rlmake.config import InitConfig

# `make test-vllm` sets them: the same tests against vLLM, in its own environment. On a GPU: RLMAKE_TEST_DEVICE=cuda.
ENGINES = os.environ.get("RLMAKE_TEST_ENGINES", "transformers").split(",")
VLLM_PYTHON = os.environ.get("RLMAKE_VLLM_PYTHON", str(Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"))
DEVICE = os.environ.get("RLMAKE_TEST_DEVICE", "cpu")
TOLERANCE = {"transformers": 0.0, "vllm": 1e-4}  # of a logprob in fp32, between runs of different batches


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Two models of one shape, `a` and `b`; `c` has another shape."""
    from rlmake.models import init

    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text("hello world, the quick brown fox jumps over the lazy dog\n" * 30)
    made = {}
    for name, seed, width in (("a", 0, 64), ("b", 1, 64), ("c", 0, 32)):
        architecture = {"hidden_size": width, "intermediate_size": 160, "max_position_embeddings": 512}
        architecture |= {"initializer_range": 0.2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        tokenizer = {"text": str(root / "text.txt"), "vocab_size": 300}
        cfg = InitConfig(architecture=architecture, tokenizer=tokenizer, seed=seed, dtype="float32")
        init.make(cfg, root / name)
        made[name] = root / name
    return made


def config(model: Path, folder: Path, engine: str = "transformers", **changes) -> Path:
    """A resolved configuration for `rlmake.inference.server`."""
    table = {
        "engine": engine, "device": DEVICE, "cpu_threads": 1, "server": {"port": 0}, "seed": 3,
        "output_dir": str(folder),
        "vllm": {"model": str(model), "max_model_len": 320, "served_model_name": "policy"},
    }  # fmt: skip
    if engine == "vllm":
        table["vllm"] |= {"dtype": "float32", "enforce_eager": True, "max_logprobs": -1, "gpu_memory_utilization": 0.1}
    table["vllm"] |= changes.pop("vllm", {})
    path = folder / "inference.json"
    path.write_text(json.dumps(table | changes))
    return path


class Server:
    """A server process; `client` speaks to it."""

    def __init__(self, path: Path, **env: str):
        table = json.loads(path.read_text())
        self.engine, self.device = table["engine"], table["device"]
        python = VLLM_PYTHON if self.engine == "vllm" else sys.executable
        self.address = path.parent / "inference.address"
        self.address.unlink(missing_ok=True)
        command = [python, "-m", "rlmake.inference.server", "@", str(path), "--address-file", str(self.address)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        self.log = path.parent / "stderr.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, text=True)

    def wait(self, seconds: float = 600) -> "Server":
        deadline = time.monotonic() + seconds
        while not self.address.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)
        self.url = self.address.read_text()
        self.client = httpx.Client(base_url=self.url, timeout=60)
        return self

    def post(self, path: str, body, status: int = 200):
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def generate(self, prompt, status: int = 200, **sampling):
        return self.post("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling}, status)

    def metric(self, name: str) -> float:
        """The value of `name`, or of `name{label="value"}`, whatever other labels there are."""
        name, _, label = name.partition("{")
        lines = self.client.get("/metrics").text.splitlines()
        found = (line for line in lines if line.startswith(name + "{") and label.rstrip("}") in line)
        return float(next(found).rpartition(" ")[2])

    def same(self, left, right) -> bool:
        """Whether `(ids, logprobs)` of two replies agree: bit for bit, or as well as the engine promises."""
        if self.engine == "transformers":
            return left == right
        return left[0] == right[0] and np.allclose(left[1], right[1], rtol=0, atol=TOLERANCE[self.engine])

    def stop(self, seconds: float = 60) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return code, self.log.read_text()


@pytest.fixture
def vllm_python() -> str:
    """An interpreter with vLLM; where there is none the test is left to `make test-vllm`."""
    if "vllm" not in ENGINES:
        pytest.skip("make test-vllm")
    return VLLM_PYTHON


@pytest.fixture(params=ENGINES)
def engine(request) -> str:
    return request.param


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session", params=ENGINES)
def server(request, models, tmp_path_factory):
    path = config(models["a"], tmp_path_factory.mktemp("server"), request.param, check_weights=True)
    one = Server(path, PRL_RUN_ID="run-7").wait()
    yield one
    code, log = one.stop()
    assert code == 0, log
    assert "Traceback" not in log, log


@pytest.fixture
def start(models):
    """Starts further servers of model `a`: `start(folder, **changes of the configuration)`. None outlives its test."""
    started: list[Server] = []

    def one(folder: Path, **changes) -> Server:
        folder.mkdir(exist_ok=True)
        started.append(Server(config(models["a"], folder, **changes)))
        return started[-1]

    yield one
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
