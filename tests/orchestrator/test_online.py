"""Evaluations beside an SFT trainer: one version at a time, given up or waited for, the last one always whole."""

import asyncio
from types import SimpleNamespace

import pytest

from rlmake.config import SFTConfig, parse
from rlmake.core.rundir import RunContext
from rlmake.orchestrator.online import OnlineEvaluation, evaluate
from rlmake.transport import WeightSender, broadcast

EVALUATED = {
    "model": {"name": "org/policy"},
    "data": {"name": "org/rows"},
    "renderer": {"name": "qwen3"},
    "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0},
    "max_steps": 10,
    "inference": {},
    "eval": {"interval": 5, "source": [{"name": "a", "env": {"taskset": {"id": "reverse-text"}}}]},
}


class Watcher:
    """Offers `versions` one after the other, the next as soon as the one before is installed."""

    def __init__(self, versions, log):
        self.left, self.log, self.version = list(versions), log, -1
        self.receiver = SimpleNamespace(poll=lambda after: self.left[0] if self.left else None)

    async def next(self):
        self.version = self.left.pop(0)
        self.log.append(f"install {self.version}")
        return self.version


class Evaluator:
    """An evaluation takes 0.2 s unless it is stopped."""

    stop = None

    def __init__(self, log):
        self.log = log

    async def on_version(self, version):
        self.log.append(f"begin {version}")
        try:
            await asyncio.wait_for(self.stop.wait(), 0.2)
            self.log.append(f"given up {version}")
        except TimeoutError:
            self.log.append(f"whole {version}")


@pytest.mark.parametrize("cancel", [True, False])
async def test_each_version_is_measured_alone_and_the_last_one_whole(cancel):
    log = []
    config = SimpleNamespace(max_steps=4, eval=SimpleNamespace(cancel_on_new_checkpoint=cancel))
    await asyncio.wait_for(OnlineEvaluation(config, Watcher([0, 2, 4], log), Evaluator(log)).run(), 10)
    end = "given up" if cancel else "whole"
    wanted = []
    for version in (0, 2):
        wanted += [f"install {version}", f"begin {version}", f"{end} {version}"]
    assert log == [*wanted, "install 4", "begin 4", "whole 4"]


async def test_the_process_installs_what_the_trainer_offers_and_measures_it(tmp_path, monkeypatch):
    """`evaluate` with its own watcher and receiver and a real sender; engines and evaluator only take notes."""
    log = []

    class Engines:
        model, base_url, adapter, check_files = "policy", "http://127.0.0.1:1/v1", None, False

        def __init__(self, *_):
            pass

        async def wait_ready(self):
            pass

        pause = resume = close = wait_ready

        async def update_weights(self, folder, version):
            log.append((version, (folder / "model.safetensors").read_bytes()))

    class Noted(Evaluator):
        def __init__(self, *_):
            super().__init__(log)

    async def handles(*_):
        return {}

    writer = SimpleNamespace(recorder=lambda run_id: None, close=lambda: None)
    monkeypatch.setattr("rlmake.orchestrator.online.monitors.setup", lambda *_: writer)
    monkeypatch.setattr("rlmake.orchestrator.engines.Engines", Engines)
    monkeypatch.setattr("rlmake.orchestrator.evaluation.Evaluator", Noted)
    monkeypatch.setattr("rlmake.envs.client.connect_all", handles)
    monkeypatch.setattr("rlmake.envs.client.engine_client", lambda *_: None)
    ctx = RunContext(tmp_path, "run", "run", 1, None, tmp_path / "configs/attempt_1", tmp_path / "logs")
    eval_ = EVALUATED["eval"] | {"cancel_on_new_checkpoint": False}
    config = parse(SFTConfig, EVALUATED | {"max_steps": 1, "eval": eval_}).online_eval("run", Engines.base_url)
    sender = WeightSender(tmp_path, ctx)

    def offer():
        for version in (0, 1):

            def write(folder, content=b"%d" % version):
                (folder / "model.safetensors").write_bytes(content)

            broadcast(sender, version, write, lambda action: action(), timeout=60)

    offered = asyncio.create_task(asyncio.to_thread(offer))
    await asyncio.wait_for(evaluate(config, ctx), 60)
    await offered
    assert log == [(0, b"0"), "begin 0", "whole 0", (1, b"1"), "begin 1", "whole 1"]


def test_the_process_is_told_what_the_run_says():
    raw = EVALUATED | {"model": {"name": "org/policy", "lora": {"rank": 8, "alpha": 16}}}
    config = parse(SFTConfig, raw)
    assert config.inference.vllm.model == "org/policy" and config.inference.vllm.enable_lora
    assert config.inference.device == "cpu" and config.inference.server.port == 0
    online = config.online_eval("run", "http://127.0.0.1:1/v1")
    assert online.model.lora.name == "r8-a16" and online.model.client.base_url == "http://127.0.0.1:1/v1"
    assert (
        online.eval.source[0].interval == 5 and online.weight_broadcast.type == "filesystem" and online.max_steps == 10
    )


@pytest.mark.parametrize(
    ("changes", "message"), [({"inference": None}, r"eval: needs \[inference\]"), ({"eval": None}, "inference: needs")]
)
def test_one_without_the_other_is_refused(changes, message):
    raw = {
        "model": {"name": "org/policy"}, "data": {"name": "org/rows"}, "renderer": {"name": "qwen3"}, "inference": {},
        "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0},
        "eval": {"source": [{"name": "a", "env": {"taskset": {"id": "reverse-text"}}}]},
    }  # fmt: skip
    with pytest.raises(Exception, match=message):
        parse(SFTConfig, {**raw, **changes})
