"""A made-up run: metrics of an SFT and an RL training, manifests, evaluations, episodes."""

import json
import math
import random
from pathlib import Path

from rlmake.core.jsonio import write_json
from rlmake.evals.records import EpisodeRecord
from rlmake.report.facts import ReportFacts

NASTY = "<script>alert('x')</script> & \"quotes\""


def metrics(run: Path, rl: bool, steps: int, seed: int = 0) -> None:
    dice = random.Random(seed)
    path = run / "monitors" / "file" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        part = step / steps
        head = {"step": step, "time": 1_760_000_000.0 + step, "attempt": 1 if part < 0.6 else 2}
        trainer = {
            "loss/mean": (0.02 * dice.gauss(0, 1)) if rl else 3.1 * math.exp(-3 * part) + 0.05 * dice.gauss(0, 1),
            "entropy/all/mean": 0.9 - 0.6 * part + 0.02 * dice.gauss(0, 1),
            "mismatch_kl/all/mean": 3.1e-7 * (1 + dice.random()),
            "optim/grad_norm": 0.8 + 0.3 * dice.random(),
            "optim/lr": 1e-4 * min(1.0, step / 5),
            "perf/throughput": 5200 + 300 * dice.random(),
            "time/step": 2.0, "time/forward_backward": 1.2, "time/wait_for_batch": 0.6, "time/broadcast_weights": 0.1,
            "time/save_ckpt": 0.05,
        }  # fmt: skip
        if not rl:
            trainer = {k: v for k, v in trainer.items() if "kl" not in k and "entropy" not in k}
        rows.append({**head, "producer": "trainer", **trainer})
        if rl:
            reward = 0.55 + 0.4 * (1 - math.exp(-3 * part)) + 0.015 * dice.gauss(0, 1)
            orch = {"time/step": 9.0, "reward/all/mean": reward, "train/agg/all/num_output_tokens/mean": 31 - 5 * part}
            rows.append({**head, "producer": "orch", **orch, "time/wait_for_policy": 0.4, "time/pack": 0.02})
            if step % 10 == 0:
                rows.append({**head, "producer": "eval", "eval/reverse-text/all/agent/avg@1": reward - 0.03})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(folder: Path, mean: float, seed: int, tasks: int = 64) -> Path:
    dice = random.Random(seed)
    folder.mkdir(parents=True)
    episodes = []
    for task in range(tasks):
        phrase = f"the quick brown fox number {task} jumps" if task else NASTY
        reward = min(1.0, max(0.0, mean + 0.1 * dice.gauss(0, 1)))
        said = phrase[::-1] if reward > 0.9 else phrase[::-1][: len(phrase) // 2] + "…"
        row = EpisodeRecord(
            env="reverse-text", task=task, key=f"t{task}", sample=0, seed=task, prompt=phrase,
            reply=f"<answer>{said}</answer>", reward=reward, truncated=reward < 0.4, timeout=False, error=None,
        )  # fmt: skip
        episodes.append(row.to_json())
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    shown = sum(row["reward"] for row in episodes) / tasks
    summary = {
        "num_tasks": tasks, "group_size": 1, "num_episodes": tasks, "failed": 0, "truncated": 2, "timeouts": 0,
        "errors": {}, "reward": {"mean": shown, "ci95": [shown - 0.025, shown + 0.025]}, "avg@1": shown, "pass@1": 0.25,
    }  # fmt: skip
    write_json(folder / "report.json", {"schema": 1, "suite": "reverse-text", "envs": {"reverse-text": summary}})
    return folder / "report.json"


def manifest(path: Path, start: float, seconds: float, **facts) -> str:
    write_json(path, {
        "schema": 1, "content": "ab12" * 16, "started": start, "ended": start + seconds, "gpu_hours": 0,
        "code": {"commit": "0123456789abcdef0123", "dirty": "ab7a95ec015249dd"}, "seconds": seconds,
        "versions": {"rlmake": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.9"},
        "hardware": {"cpu": "AMD EPYC 9654, 2 cores", "memory": "8 GiB", "gpus": []}, **facts,
    })  # fmt: skip
    return str(path)


def make_facts(root: Path, name: str = "reverse-text/rl", steps: int = 60) -> ReportFacts:
    store = root / "outputs" / ".store"
    rl, sft = store / "train-aaaabbbbccccdddd", store / "train-1111222233334444"
    metrics(sft, False, 120, 1)
    metrics(rl, True, steps)
    start = 1_760_000_000.0
    lineage = [
        {"name": "reverse-text/data", "stage": "data", "kind": "data", "fingerprint": "9f8e7d6c5b4a3f2e", "step": None,
         "manifest": manifest(store / "data-9f8e7d6c5b4a3f2e" / "manifest.json", start, 3.2)},
        {"name": "reverse-text/model", "stage": "model", "kind": "init", "fingerprint": "0a1b2c3d4e5f6071",
         "step": None, "manifest": manifest(store / "model-0a1b2c3d4e5f6071" / "manifest.json", start + 4, 5.5)},
        {"name": "reverse-text/sft", "stage": "train", "kind": "sft", "fingerprint": "1111222233334444", "step": 120,
         "manifest": manifest(sft / "manifests" / "step_120.json", start + 10, 48)},
        {"name": name, "stage": "train", "kind": "rl", "fingerprint": "aaaabbbbccccdddd", "step": steps,
         "manifest": manifest(rl / "manifests" / f"step_{steps}.json", start + 70, 156)},
    ]  # fmt: skip
    manifest(rl / "exports" / f"step_{steps}" / "weights.json", start + 230, 2.1)
    evals = [
        {"suite": "reverse-text", "of": name, "step": steps, "report": evaluation(store / "eval-2", 0.91, 4)},
        {
            "suite": "reverse-text",
            "of": "reverse-text/sft",
            "step": 120,
            "report": evaluation(store / "eval-1", 0.58, 3),
        },
    ]
    optim = {"lr": 1e-4, "betas": [0.9, 0.999]}
    train = {"group_size": 8, "source": [{"name": "reverse-text", "env": {"taskset": {"id": NASTY}}}]}
    spec = {
        "schema": 1, "stage": "train", "kind": "rl", "fingerprint": "aaaabbbbccccdddd",
        "config": {"max_steps": steps, "seed": 0, "trainer": {"optim": optim, "log": {"level": None}}},
        "semantic": {"seed": 0, "trainer": {"optim": optim}, "orchestrator": {"batch_size": 64, "train": train}},
        "defaults": {"trainer.optim.betas": [0.9, 0.999]},
        "revisions": {"envs": "reverse-text-1", "losses": "1"},
    }  # fmt: skip
    return ReportFacts(name=name, run_dir=rl, step=steps, spec=spec, lineage=lineage, evals=evals)
