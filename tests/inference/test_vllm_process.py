"""vLLM's own processes: its arguments, its start and its end. `make test-vllm` runs them."""

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

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


def test_an_engine_that_is_killed_ends_its_server(start, tmp_path):
    server = start(tmp_path, engine="vllm").wait()
    os.kill(descendants(server.process.pid)[-1], signal.SIGKILL)
    assert server.process.wait(300) == 1
    assert "error: the engine has failed" in server.log.read_text()


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
