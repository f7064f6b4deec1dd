"""The contract of new weights and adapters, against the real server process; the same tests for every engine."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from contract import PROMPT, flat, scored
from safetensors.torch import save_file

from rlmake.core.rundir import RunContext
from rlmake.models import exact, loading, lora
from rlmake.models.digest import digest
from rlmake.transport import WeightSender
from rlmake.transport.collective import Sender, plan_of


@pytest.fixture
def restore(server, models):
    """The weights served before the test are served after it."""
    yield
    server.post("/resume", {})
    server.post("/update_weights", {"weight_dir": str(models["a"]), "version": 0})


def offered(model, run_dir, version):
    """A version as the trainer offers it."""
    sender = WeightSender(run_dir, RunContext.from_env(run_dir))
    folder = sender.prepare(version)
    shutil.copy(model / "model.safetensors", folder)
    sender.offer(version)
    return folder


def test_pause_update_resume_with_requests_in_flight(server, models, tmp_path, restore):
    alone = flat(server.generate(PROMPT, seed=2, logprobs=1, ignore_eos=True, max_tokens=300))
    found = {}

    def request():
        found["reply"] = server.generate(PROMPT, seed=2, logprobs=1, ignore_eos=True, max_tokens=300)

    thread = threading.Thread(target=request)
    start = server.metric("vllm:generation_tokens_total")
    thread.start()
    while server.metric("vllm:generation_tokens_total") < start + 20:
        time.sleep(0.001)
    server.post("/pause", {"mode": "keep"})
    made = server.metric("vllm:generation_tokens_total") - start
    assert made < 300, "the request was over before the pause: no test of it"
    time.sleep(0.3)
    assert server.metric("vllm:generation_tokens_total") == start + made and server.metric("rlmake:paused") == 1
    assert server.metric("vllm:num_requests_running") == 1 and server.client.get("/liveness").status_code == 200
    folder = offered(models["b"], tmp_path, 1)
    checksum = json.loads((folder / "version.json").read_text())["checksum"]
    asked = {"weight_dir": str(folder), "version": 1, "checksum": checksum}
    assert server.post("/update_weights", asked)["version"] == 1
    assert server.metric("rlmake:policy_version") == 1
    server.post("/resume", {})
    thread.join(60)
    ids, values = flat(found["reply"])
    made = int(made)
    assert len(ids) == 300 and server.same((ids[:made], values[:made]), (alone[0][:made], alone[1][:made]))
    assert ids[made:] != alone[0][made:], "it goes on with the new weights"
    new = flat(server.generate(PROMPT, seed=2, logprobs=1, max_tokens=8))
    assert new[1] != alone[1][:8]
    server.post("/update_weights", {"weight_dir": str(models["a"]), "version": 2})
    assert server.same(flat(server.generate(PROMPT, seed=2, logprobs=1, max_tokens=300, ignore_eos=True)), alone)


def test_bad_updates_leave_the_old_weights(server, models, tmp_path, restore):
    before = flat(server.generate(PROMPT, seed=2, logprobs=1, max_tokens=20))
    good = offered(models["b"], tmp_path, 4)

    def damaged(name, change):
        folder = tmp_path / name
        shutil.copytree(good, folder)
        change(folder)
        return folder

    def flip(folder):
        raw = bytearray((folder / "model.safetensors").read_bytes())
        raw[-1] ^= 1
        (folder / "model.safetensors").write_bytes(raw)

    record = json.loads((good / "version.json").read_text())

    def write(content):
        return lambda folder: (folder / "version.json").write_text(json.dumps(content))

    def into_folder(folder):
        (folder / "version.json").unlink()
        (folder / "version.json").mkdir()

    bare = damaged("bare", lambda folder: (folder / "version.json").unlink())
    cases = {
        "weight_dir: no such directory": tmp_path / "nowhere",
        "weight_dir: no such directory: xxx": "x" * 5000,
        "weight_dir: no such directory: a": "a\0b",
        "weight_dir: not a directory": good / "version.json",
        "shape": models["c"],
        "missing or damaged": damaged("flipped", flip),
        "checksum": damaged("record", write(record | {"files": []})),
        "version.json: schema None is unknown": damaged("list", write([])),
        "version.json: damaged: ": damaged("less", write({"schema": 1, "version": 4})),
        "version.json: not readable as JSON": damaged("folder", into_folder),
        "not part of": damaged("extra", lambda f: shutil.copy(f / "model.safetensors", f / "model-2.safetensors")),
        "schema 99": damaged("schema", write(record | {"schema": 99})),
        "holds version 4": good,
    }
    for message, folder in cases.items():
        asked = 5 if folder == good else 4
        error = server.post("/update_weights", {"weight_dir": str(folder), "version": asked}, 400)["error"]
        assert message in error["message"] and "\n" not in error["message"] and len(error["message"]) < 500
    for message, folder in {"version.json: no such file": bare, "not the record of what was offered": good}.items():
        asked = {"weight_dir": str(folder), "version": 4, "checksum": "0" * 64}
        assert message in server.post("/update_weights", asked, 400)["error"]["message"]
    server.post("/update_weights", {"version": 5}, 400)
    assert server.same(flat(server.generate(PROMPT, seed=2, logprobs=1, max_tokens=20)), before)
    assert server.metric("rlmake:policy_version") == 0


def lead(server, model):
    """The trainer's side of a group with a server's workers, the tensors of `model`, the body of `/update_weights`."""
    if server.device != "cpu":
        pytest.skip("a group of a CPU")
    sender = Sender("gloo", torch.device("cpu"), "localhost", 0, 300)
    workers = server.client.get("/broadcaster").json()["workers"]
    at = sender.rendezvous
    body = {"host": at["host"], "port": at["port"], "session_id": at["session"], "backend": "gloo", "rank_offset": 1}
    body |= {"inference_world_size": len(workers), "timeout": 300}
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(server.post, "/init_broadcaster", body)
        sender.form([f"worker {worker['rank']}" for worker in workers])
        assert joined.result() == {"status": "joined"}
    tensors = loading.read_weights(model)
    plan, digests = plan_of(tensors.items()), {name: digest(tensor) for name, tensor in tensors.items()}
    return sender, tensors, {"weight_dir": None, "plan": plan, "dtype": "float32", "digests": digests}


def test_no_prefix_outlives_its_weights(server, models, restore):
    """With a salt for each version and without one, also where the prompt is cached."""
    prompt = [10 + i * 7 % 250 for i in range(300)]
    for version, name in enumerate("abab"):
        server.post("/update_weights", {"weight_dir": str(models[name]), "version": version})
        model = loading.load(models[name], attn=exact.NAME).eval()
        for salt in (str(version), str(version), None, None):
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 4, "logprobs": 1}}
            ids, values = flat(server.post("/inference/v1/generate", body | ({"cache_salt": salt} if salt else {})))
            assert server.same((ids, values), (ids, scored(model, [*prompt, *ids])[len(prompt) - 1 :]))
    if server.engine == "vllm":
        assert server.metric("vllm:prefix_cache_hits_total") > 0, "nothing was cached: no test of it"


def test_a_group_brings_what_files_bring(server, models, restore):
    asked = {"seed": 2, "logprobs": 1, "max_tokens": 20}
    server.post("/update_weights", {"weight_dir": str(models["b"]), "version": 1})
    expected = flat(server.generate(PROMPT, **asked))
    sender, tensors, body = lead(server, models["b"])
    for version in (3, 4):
        server.post("/update_weights", {"weight_dir": str(models["a"]), "version": 2})
        assert flat(server.generate(PROMPT, **asked)) != expected
        with ThreadPoolExecutor() as pool:
            sent = pool.submit(sender.send, version, tensors.items(), body["plan"], torch.float32)
            assert server.post("/update_weights", body | {"version": version})["version"] == version
            sent.result()
        assert server.same(flat(server.generate(PROMPT, **asked)), expected)
        assert server.metric("rlmake:policy_version") == version
    told = [line for line in server.log.read_text().splitlines() if "check_weights: all" in line]
    assert f"all {len(tensors)} tensors are those of " in told[-1]


def test_an_engine_comes_back_with_what_the_run_has_now(models, start, engine, tmp_path):
    """Weights that are not those that were sent end an engine, and those that came in part are never served. Started
    again, it has the newest version that the run has committed before it answers."""
    folder, asked = tmp_path / "run", {"max_tokens": 5, "seed": 1, "logprobs": 1}
    sender = WeightSender(folder, RunContext.from_env(folder))

    def offer(version, model):
        shutil.copy(models[model] / "model.safetensors", sender.prepare(version))
        sender.offer(version)

    offer(3, "b")
    sender.finish()
    offer(4, "a")  # announced and not committed
    server = start(folder, engine=engine, check_weights=True).wait()
    assert server.metric("rlmake:policy_version") == 3
    mine = flat(server.generate(PROMPT, **asked))
    server.post("/update_weights", {"weight_dir": str(models["b"]), "version": 3})
    assert server.same(flat(server.generate(PROMPT, **asked)), mine)
    group, tensors, body = lead(server, models["a"])
    name = next(reversed(body["digests"]))
    body["digests"][name] = "0" * len(body["digests"][name])
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(group.send, 4, tensors.items(), body["plan"], torch.float32)
        error = server.post("/update_weights", body | {"version": 4}, 503)["error"]
        sent.result()
    assert f"check_weights: {name} is not what" in error["message"]
    assert server.process.wait(300) == 1 and error["message"] in server.log.read_text()

    sender.finish()
    server = start(folder, engine=engine).wait()
    assert server.metric("rlmake:policy_version") == 4
    mine = flat(server.generate(PROMPT, **asked))
    group, tensors, body = lead(server, models["b"])
    with ThreadPoolExecutor() as pool:
        left = pool.submit(server.client.post, "/update_weights", json=body | {"version": 5}, timeout=400)
        group.group = None  # the trainer is gone
        reply = left.result()
    assert "v5 did not come from the trainer" in reply.json()["error"]["message"]
    if engine == "vllm":  # which loads what comes while it comes
        assert reply.status_code == 503 and server.process.wait(300) == 1
    else:
        assert reply.status_code == 400 and flat(server.generate(PROMPT, **asked)) == mine
        assert "the group is spent" in server.post("/update_weights", body | {"version": 6}, 400)["error"]["message"]


def test_an_adapter_is_loaded_replaced_and_exact(start, models, engine, device, tmp_path):
    if engine == "vllm" and device != "cpu":
        pytest.skip("its adapters on a GPU are of 16 bits")
    base = loading.load(models["a"], attn=exact.NAME)
    adapter = lora.inject(base, lora.Adapter(str(models["a"]), 4, 16.0, 0.0, ["q_proj", "down_proj"]), 0)
    folders = []
    for version in range(2):
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(version)
        tensors = {
            lora.FILE_PREFIX + name: torch.randn(p.shape, generator=generator) * 0.1
            for name, p in lora.parameters(base)
        }
        save_file(tensors, folder / lora.WEIGHTS)
        lora.write_config(adapter, folder)
        folders.append(folder)
    server = start(tmp_path / "server", engine=engine, vllm={"enable_lora": True}).wait()
    plain = flat(server.generate(PROMPT, max_tokens=12, logprobs=1, temperature=0))
    error = server.post("/load_lora_adapter", {"lora_name": "r4-a16", "lora_path": str(tmp_path / "nowhere")}, 400)
    assert "lora_path: no such directory" in error["error"]["message"]
    for folder in folders:
        server.post("/load_lora_adapter", {"lora_name": "r4-a16", "lora_path": str(folder), "load_inplace": True})
        body = {"token_ids": PROMPT, "model": "r4-a16", "sampling_params": {"max_tokens": 12, "logprobs": 1}}
        ids, values = flat(server.post("/inference/v1/generate", body))
        lora.assign(base.eval(), loading.read_weights(folder), "here")
        assert server.same((ids, values), (ids, scored(base, [*PROMPT, *ids])[len(PROMPT) - 1 :]))
        assert (ids, values) != plain
    assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["policy", "r4-a16"]
    refused = {
        "and cannot run": ("/inference/v1/generate", {"model": "policy", "token_ids": PROMPT}),
        "load_inplace": ("/load_lora_adapter", {"lora_name": "r4-a16", "lora_path": str(folders[0])}),
        "one at a time": ("/load_lora_adapter", {"lora_name": "other", "lora_path": str(folders[0])}),
        "runs an adapter": ("/update_weights", {"weight_dir": str(models["b"])}),
    }
    for message, (path, body) in refused.items():
        assert message in server.post(path, body, 400)["error"]["message"]
