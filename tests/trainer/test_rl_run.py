"""The RL loop against a small orchestrator in this process: real transport, real weights, real checkpoints.

The orchestrator's part is played by a thread that serves every version (so its log-probabilities come from the weights
that the trainer broadcast), ships one batch per step, and writes its half of the checkpoints.
"""

import json
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sft_run import ledger, tensors
from trainer_worlds import Ranks, one_rank
from transformers import AutoModelForCausalLM

from rlmake import checkpoint as records
from rlmake.config import TrainerConfig, parse
from rlmake.core.rundir import RunContext, step_dir
from rlmake.models import exact, loading, lora
from rlmake.models.logprobs import score
from rlmake.monitors import read
from rlmake.trainer import process, rl
from rlmake.transport import Batch, LossCounts, MicroBatch, WeightReceiver, open_sender

STEPS = 6


class Orchestrator(threading.Thread):
    """Serves versions and ships the batches of `first` … `last`; `spoil(step, micro_batch)` may change one."""

    def __init__(self, config: TrainerConfig, ranks: int, attempt: int, first: int, last: int, spoil=None):
        super().__init__(daemon=True)
        base = RunContext.from_env(config.output_dir)
        self.ctx = RunContext(**{**vars(base), "attempt": attempt})
        self.config, self.ranks, self.first, self.last, self.spoil = config, ranks, first, last, spoil
        self.model = loading.load(config.model.name, attn=exact.NAME)
        self.served: list[int] = []
        self.failure: BaseException | None = None
        self.stop = False

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    def _run(self) -> None:
        receiver, sender = (
            WeightReceiver(self.ctx.run_dir, self.ctx),
            open_sender(self.config.rollout_transport, self.ctx),
        )
        version = self.first - 2
        while not self.stop and version < self.last:
            if (offered := receiver.poll(version)) is None:
                time.sleep(0.005)
                continue
            if receiver.record(offered)["transport"] != "filesystem":
                receiver.refuse(offered, "another NCCL")
                continue
            receiver.ack(offered)
            while not (receiver.finished(offered) or self.stop):  # the trainer may have been killed in between
                time.sleep(0.005)
            if self.stop:
                break
            self.serve(receiver.wait_finished(offered))
            version = offered
            self.served.append(version)
            if version < self.last:
                sender.send([self.batch(version + 1, rank) for rank in range(self.ranks)])
                self.halve(version + 1)
        sender.close()

    def serve(self, folder: Path) -> None:
        """Full weights, or an adapter on top of the base."""
        tensors = loading.read_weights(folder)
        if self.config.model.lora is None:
            loading.assign(self.model, tensors, "broadcast")
            return
        if not lora.parameters(self.model):
            lora.inject(self.model, lora.read_config(folder), 0)
            self.model.eval()
        lora.assign(self.model, tensors, "broadcast")

    def halve(self, step: int) -> None:
        """Our half of every step: the trainer may be asked to save any."""
        with records.writing(step_dir(self.ctx.run_dir, step), "orchestrator") as half:
            (half / "state.json").write_text("{}")

    def batch(self, step: int, rank: int) -> Batch:
        whole = [[self.row(step, r, i) for i in range(2)] for r in range(self.ranks)]
        counts = LossCounts(rl=float(sum(int(row.loss_mask.sum()) for rows in whole for row in rows)))
        ids = [sample for rows in whole for row in rows for sample in row.sample_ids]
        context = self.ctx
        return Batch(1, context.run_id, context.attempt, step, rank, self.ranks, counts, ids, whole[rank])

    def row(self, step: int, rank: int, index: int) -> MicroBatch:
        """Three sequences with advantages; log-probabilities by the served weights."""
        g = np.random.default_rng([step, rank, index])
        lens = g.integers(5, 30, 3).tolist()
        ids = g.integers(3, 300, sum(lens)).astype(np.int32)
        positions = np.concatenate([np.arange(n) for n in lens]).astype(np.int32)
        mask = positions >= 3
        temperatures = np.full(len(ids), 0.8, dtype=np.float32)
        with torch.no_grad():
            row = torch.from_numpy(ids.astype(np.int64))
            hidden = exact.packed_forward(
                self.model, row[None], torch.from_numpy(positions.astype(np.int64))[None], lens
            )
            logp = score(hidden[:-1], self.model.lm_head.weight, row[1:], torch.from_numpy(temperatures)[1:])
        made = MicroBatch(
            input_ids=ids,
            position_ids=positions,
            loss_mask=mask,
            advantages=g.normal(size=len(ids)).astype(np.float32),
            inference_logprobs=np.where(mask, np.concatenate([[0.0], logp.numpy()]), 0.0).astype(np.float32),
            temperatures=temperatures,
            sequence_lengths=lens,
            env_names=["a", "b", "a"],
            sample_ids=[f"{step}/{rank}/{index}/{i}" for i in range(3)],
        )
        if self.spoil:
            self.spoil(step, made)
        return made


@pytest.fixture
def config(model_dir):
    def make(run_dir: Path, **keys) -> TrainerConfig:
        raw = {
            "model": {"name": str(model_dir)},
            "device": "cpu",
            "cpu_threads": 1,
            "optim": {"lr": 1e-2},
            "ckpt": {"interval": 2},
            "max_steps": STEPS,
            "output_dir": str(run_dir),
            "weight_broadcast": {"type": "filesystem", "timeout": 60},
            "rollout_transport": {"type": "filesystem"},
        }
        return parse(TrainerConfig, raw | keys)

    return make


def run(
    config: TrainerConfig, ranks: int = 1, attempt: int = 1, first: int = 1, code: int = 0, spoil=None, meanwhile=None
):
    process = Ranks(ranks, rl.train, config, attempt)
    orchestrator = Orchestrator(config, ranks, attempt, first, config.max_steps, spoil)
    orchestrator.start()
    try:
        if meanwhile:
            meanwhile(process)
        log = process.finish(code) if code is not None else process.kill()
    finally:
        orchestrator.stop = True
        orchestrator.join(timeout=30)
    assert orchestrator.failure is None, orchestrator.failure
    return log, orchestrator


def trace(run_dir: Path) -> list[tuple[float, ...]]:
    keys = ("loss/mean", "optim/grad_norm", "entropy/all/mean", "mismatch_kl/all/max", "is_masked/mean")
    rows = [row.metrics for row in read(run_dir) if row.producer == "trainer"]
    return [tuple(row[key] for key in keys) for row in rows if "loss/mean" in row]


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_is_the_uninterrupted_run(config, tmp_path, ranks):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    log, orchestrator = run(config(straight), ranks)
    assert orchestrator.served == list(range(STEPS + 1)), "every version once, v0 before the first batch"
    assert "exact with" in log and "NOT" not in log
    assert log.count("SUCCESS") == STEPS and "| Entropy " in log and "| Mismatch KL 0.0000" in log

    complete = killed / "checkpoints" / "step_2" / "COMPLETE"
    run(config(killed), ranks, code=None, meanwhile=lambda process: process.wait_until(complete.exists))
    step = records.newest(killed)
    assert step is not None and 2 <= step < STEPS
    records.prune_future(killed, step)
    resumed = config(killed, resume={"step": step})
    _, orchestrator = run(resumed, ranks, attempt=2, first=step + 1)
    assert orchestrator.served == list(range(step, STEPS + 1)), "the loaded version is offered before the first wait"

    a, b = tensors(straight, STEPS), tensors(killed, STEPS)
    assert [key for key in a if not torch.equal(a[key], b[key])] == []
    assert trace(straight) == trace(killed) and len(trace(killed)) == STEPS
    assert [row["ledger"] for row in ledger(straight).values()] == [row["ledger"] for row in ledger(killed).values()]
    assert all(kl == 0.0 for _, _, _, kl, _ in trace(straight)), "trainer and sampler agree bit for bit"


def test_an_adapter_is_trained_sent_and_saved_alone(config, tmp_path):
    """The sampler with the adapter on top agrees with the trainer bit for bit, at every version."""
    path = tmp_path / "run"
    run(config(path, max_steps=3, model={**config(path).model.model_dump(), "lora": {"rank": 4, "alpha": 16}}))
    assert all(kl == 0.0 for _, _, _, kl, _ in trace(path)) and len(trace(path)) == 3
    folder = path / "broadcasts" / "step_3"
    sent, saved = loading.read_weights(folder), tensors(path, 3)
    assert json.loads((folder / "version.json").read_text())["kind"] == "adapter"
    assert {f"model.{name.removeprefix(lora.FILE_PREFIX)}" for name in sent} == {
        key for key in saved if key.startswith("model.")
    }
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[f"model.{name.removeprefix(lora.FILE_PREFIX)}"])
    adapter = lora.read_config(folder)
    assert (adapter.rank, adapter.alpha) == (4, 16.0)


def test_what_is_broadcast_is_what_is_saved(config, tmp_path):
    run(config(tmp_path / "run", max_steps=2))
    folder = tmp_path / "run" / "broadcasts"
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"], "older ones are removed"
    saved = tensors(tmp_path / "run", 2)
    for name, tensor in loading.read_weights(folder / "step_2").items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, saved[f"model.{name}"])
    state = records.read(step_dir(tmp_path / "run", 2))
    assert state["policy_version"] == 2 and {entry["half"] for entry in state["files"]} == {"trainer", "orchestrator"}


def test_a_group_that_is_refused_is_replaced_by_files(config, tmp_path):
    wanted = {"type": "nccl", "host": "127.0.0.1", "port": 0, "timeout": 60}
    log, orchestrator = run(config(tmp_path / "run", max_steps=2, weight_broadcast=wanted))
    assert log.count("weights go by files from here: another NCCL") == 1
    assert orchestrator.served == [0, 1, 2] and all(kl == 0.0 for _, _, _, kl, _ in trace(tmp_path / "run"))


def test_metrics_have_the_pages_names(config, tmp_path):
    run(config(tmp_path / "run", max_steps=1))
    row = next(row.metrics for row in read(tmp_path / "run") if row.producer == "trainer")
    wanted = {"loss/mean", "loss/rl", "is_masked/mean", "kl_ent_ratio/mean", "optim/lr", "optim/grad_norm"}
    wanted |= {f"{name}/{env}/{stat}" for name in ("entropy", "mismatch_kl") for env in ("all", "a", "b")
               for stat in ("mean", "median", "std", "min", "max")}  # fmt: skip
    wanted |= {"perf/throughput", "perf/throughput_per_gpu", "perf/peak_memory", "unmasked_mismatch_kl/mean"}
    wanted |= {
        f"time/{name}" for name in ("step", "wait_for_batch", "load_data", "forward_backward", "broadcast_weights")
    }
    wanted |= {"time/save_ckpt"}
    assert wanted <= row.keys(), wanted - row.keys()


def test_the_values_of_a_step_are_those_of_plain_torch(config, tmp_path, model_dir):
    """Two ranks, a sampler that is off: numbers over tokens, loss and gradient norm, sequence by sequence
    in the model of transformers."""
    made: dict[str, MicroBatch] = {}

    def spoil(step: int, row: MicroBatch) -> None:
        noise = np.random.default_rng(len(row.input_ids)).normal(scale=1.5, size=len(row.input_ids))
        noise[::3] += 6.0  # far enough for the trust region: |π − μ| > eps
        row.inference_logprobs[:] = np.minimum(row.inference_logprobs + noise, -1e-3) * row.loss_mask
        made[row.sample_ids[0]] = row

    run(config(tmp_path / "run", max_steps=1, loss={"type": "ipo", "eps": 0.3}), ranks=2, spoil=spoil)
    found = next(row.metrics for row in read(tmp_path / "run") if row.producer == "trainer")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    loss, tokens = torch.zeros(()), []  # of each trained token: environment, entropy, mismatch KL, whether masked
    for row in made.values():
        ends = np.cumsum(row.sequence_lengths)
        for start, end, env in zip(ends - row.sequence_lengths, ends, row.env_names, strict=True):
            ids, mu, advantage, mask, temperature = (
                torch.from_numpy(values[start:end].copy())
                for values in (row.input_ids, row.inference_logprobs, row.advantages, row.loss_mask, row.temperatures)
            )
            logp = (model(input_ids=ids[None].long()).logits[0, :-1] / temperature[1:, None]).log_softmax(-1)
            pi, mu, mask = logp.gather(1, ids[1:, None].long())[:, 0], mu[1:], mask[1:]
            masked = (pi.exp() - mu.exp()).abs().detach() > 0.3
            loss = loss - (advantage[1:] * (pi - mu).exp())[mask & ~masked].sum()
            ratio, entropy = (pi - mu).detach().double(), -(logp.exp() * logp).sum(-1).detach()
            tokens += [
                (env, *x) for x in zip(entropy[mask], (ratio.exp() - 1 - ratio)[mask], masked[mask], strict=True)
            ]
    loss = loss / len(tokens)
    loss.backward()
    norm = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
    wanted = {"loss/mean": loss.item(), "loss/rl": loss.item(), "optim/grad_norm": norm.item(), "optim/lr": 1e-2}

    def describe(name: str, values: list) -> None:
        for stat in ("mean", "median", "std", "min", "max"):
            wanted[f"{name}/{stat}"] = float(getattr(np, stat)(np.array(values, float)))

    for env in ("all", "a", "b"):
        for number, name in ((1, "entropy"), (2, "mismatch_kl")):
            describe(f"{name}/{env}", [token[number] for token in tokens if env in ("all", token[0])])
    describe("is_masked", [token[3] for token in tokens])
    describe("masked_mismatch_kl", [token[2] for token in tokens if token[3]])
    describe("unmasked_mismatch_kl", [token[2] for token in tokens if not token[3]])
    wanted["kl_ent_ratio/mean"] = wanted["mismatch_kl/all/mean"] / wanted["entropy/all/mean"]
    assert 0 < wanted["is_masked/mean"] < 1
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    seconds = sum(found[f"time/{name}"] for name in ("load_data", "forward_backward", "optimizer"))
    total = sum(len(row.input_ids) for row in made.values())
    assert 0 < found["perf/throughput"] <= total / seconds
    assert found["perf/throughput_per_gpu"] == found["perf/throughput"] / 2


@pytest.mark.parametrize("loss", ["icepop", "ipo"])
def test_a_log_probability_that_is_not_a_number_stops_the_run(config, tmp_path, loss):
    """Also where the trust region would have masked the token away without a word."""

    def spoil(step: int, row: MicroBatch) -> None:
        if step == 3:
            row.inference_logprobs[np.flatnonzero(row.loss_mask)[0]] = np.nan

    path = tmp_path / "run"
    log, _ = run(config(path, loss={"type": loss}), code=76, spoil=spoil)
    assert json.loads((path / "diverged.json").read_text())["step"] == 3
    assert "step 3 diverged" in log and records.newest(path) == 2


def test_a_token_that_the_model_does_not_have(config, tmp_path):
    """Of a model with another tokenizer; on a GPU it would be an assertion of the device."""

    def spoil(step: int, row: MicroBatch) -> None:
        if step == 2:
            row.input_ids[0] = 1 << 20

    log, _ = run(config(tmp_path / "run"), code=2, spoil=spoil)
    assert "batch of step 2: token 1048576 is beyond the model's vocabulary of" in log and "Traceback" not in log


def test_asked_to_leave_it_saves_and_leaves_with_75(config, tmp_path):
    path = tmp_path / "run"
    metrics = path / "monitors" / "file" / "metrics.jsonl"

    def leave(process: Ranks) -> None:
        process.wait_until(lambda: metrics.exists() and metrics.read_text().count("loss/mean") >= 1)
        process.signal(signal.SIGUSR1)

    _, orchestrator = run(config(path, max_steps=200), code=75, meanwhile=leave)
    step = records.newest(path)
    assert step == max(ledger(path)) and orchestrator.served[-1] == step


def test_counts_that_do_not_fit_the_rows_are_refused(config, tmp_path):
    class Wrong(Orchestrator):
        def batch(self, step, rank):
            made = super().batch(step, rank)
            made.counts.rl += 1
            return made

    process = Ranks(1, rl.train, settings := config(tmp_path / "run", max_steps=1))
    orchestrator = Wrong(settings, 1, 1, 1, 1)
    orchestrator.start()
    log = process.finish(code=1)
    orchestrator.stop = True
    orchestrator.join(timeout=30)
    assert "its counts" in log and "Traceback" not in log


def test_made_up_batches_need_nobody_and_a_trace_is_written(config, tmp_path):
    path = tmp_path / "run"
    fake = {"fake": {"batch_size": 2, "generate_samples": True}}
    trace = tmp_path / "trace.json"
    Ranks(1, rl.train, config(path, data=fake, max_steps=2, ckpt={"interval": 2})).finish()
    rows = [row.metrics for row in read(path) if "loss/mean" in row.metrics]
    assert len(rows) == 2 and {"loss/rl", "loss/ce", "loss/ref_kl"} <= rows[0].keys()
    assert records.read(step_dir(path, 2))["step"] == 2 and not (path / "broadcasts").exists()
    with one_rank() as world, process.traced(str(trace), world):
        torch.ones(2) @ torch.ones(2)
    assert json.loads(trace.read_text())["traceEvents"]
