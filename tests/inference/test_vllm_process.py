"""vLLM's own processes: its arguments, its start and its end. `make test-vllm` runs them."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

INFERENCE = """
engine = "vllm"
python = "{python}"
server.port = 0
[vllm]
model = "{model}"
served_model_name = "policy"
max_model_len = 64
enforce_eager = true
max_num_seqs = 8
"""

pytestmark = pytest.mark.usefixtures("vllm_python")


def test_every_argument_arrives(vllm_python):
    script = Path(__file__).with_name("vllm_passes.py")
    done = subprocess.run([vllm_python, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == {} and found["tried"] > 250


def test_what_does_not_start_is_one_line(start, tmp_path):
    cases = {
        "max_model_len": {"max_model_len": 4096},
        "--kv-cache-dtype": {"arguments": {"kv_cache_dtype": "fp9"}},
        "has no such argument; did you mean 'max_num_seqs'": {"arguments": {"max_num_seq": 4}},
        "not enough memory": {"arguments": {"kv_cache_memory_bytes": 4096}},
    }
    started = [
        (message, start(tmp_path / str(i), engine="vllm", vllm={"max_logprobs": 20} | change))
        for i, (message, change) in enumerate(cases.items())
    ]
    for message, server in started:
        code, log = server.process.wait(600), server.log.read_text()
        said = [line for line in log.splitlines() if line.startswith("error:")]
        assert code == 2 and len(said) == 1 and message in said[0], log
        assert not server.address.exists()


def test_bfloat16_has_a_float32_head_and_no_process_is_left(start, tmp_path):
    server = start(tmp_path, engine="vllm", vllm={"dtype": "bfloat16"}).wait()
    reply = server.generate([72, 101], max_tokens=1, logprobs=-1, seed=1)
    row = [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    assert len(row) == 300 and math.isclose(sum(map(math.exp, row)), 1, rel_tol=1e-5)
    assert len(set(row)) > 290, "logits were rounded to 8 bits"
    family = descendants(server.process.pid)
    names = [Path(f"/proc/{pid}/comm").read_text() for pid in family]
    assert sum("VLLM" in name for name in names) == 2, names
    server.process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while left := [pid for pid in family if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_inference_starts_it_and_ends_when_its_engine_is_killed(models, vllm_python, tmp_path):
    (tmp_path / "inference.toml").write_text(INFERENCE.format(python=vllm_python, model=models["a"]))
    command = [sys.executable, "-c", "from rlmake.cli.main import inference; inference()", "@", "inference.toml"]
    log = tmp_path / "log"
    with open(log, "w") as file:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 600
        while not (found := re.search(r"serving policy on (http://\S+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        client = httpx.Client(base_url=found[1], timeout=60)
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        assert client.get("/version").json()["version"].startswith("0.")
        assert client.get("/liveness").status_code == 200
        os.kill(descendants(server.pid)[-1], signal.SIGKILL)
        assert server.wait(300) == 1 and "error: the engine has failed" in log.read_text()
    finally:
        server.kill()


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, children before their children."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
