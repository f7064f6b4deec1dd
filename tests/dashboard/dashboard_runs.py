"""Run directories as the product writes them, small: metrics, traces, logs, configurations, reports."""

import json
import uuid
from pathlib import Path
from types import SimpleNamespace

from rlmake.core.rundir import RunContext
from rlmake.monitors import mark_attempt, setup
from rlmake.monitors.traces import Recorder, Work

FILE = SimpleNamespace(path=None, chunk_bytes=5 << 30, compress=True, float_decimals=4)
HOSTILE = '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1"> & \u202edlrow\u202c \ud83d'


class Episode:
    """Looks to the trace stream like an episode of verifiers."""

    def __init__(self, record, branches=()):
        self.record, self.traces = record, [SimpleNamespace(branches=branches)] if branches else []

    def to_record(self, float_decimals):
        return json.loads(json.dumps(self.record))


def record(reward=0.5, prompt="reverse: hello", reply="olleh", turns=1, start=1000.0, ok=True, error=None, nodes=None):
    """A record of `turns` turns with a tool result between them; six tokens a message, a reply's last two sampled."""
    messages, calls = [{"parent": None, "message": {"role": "system", "content": "You reverse text."}}], []
    if nodes is None:
        for turn in range(turns):
            role = "user" if turn == 0 else "tool"
            messages.append(
                {"parent": len(messages) - 1, "message": {"role": role, "content": prompt}, "name": "clock"}
            )
            message = {"role": "assistant", "content": reply, "reasoning_content": "Let me think."}
            if turn < turns - 1:
                message["tool_calls"] = [{"id": f"c{turn}", "name": "clock", "arguments": '{"at": 1}'}]
            calls.append(
                {"node": len(messages), "usage": {"prompt_tokens": 12 + 10 * turn, "completion_tokens": 2},
                 "finish_reason": "stop", "time": {"start": start + 3 * turn, "end": start + 3 * turn + 2}}
            )  # fmt: skip
            messages.append(
                {"parent": len(messages) - 1, "message": message, "sampled": True, "logprobs": [-0.5, -0.25]}
            )
        for number, node in enumerate(messages):
            sampled = bool(node.get("sampled"))
            node |= {
                "token_ids": [number, 1, 2, 3, 4, 5],
                "mask": [False] * 4 + [sampled] * 2,
                "timestamp": start + number,
            }
            node["is_content"] = [False, True, True, True, True, False]
    else:
        messages = nodes
    errors = [{"type": error, "message": "it broke", "traceback": "Traceback …"}] if error else []
    trace = {
        "id": uuid.uuid4().hex, "agent": {"name": "agent", "config": {}}, "nodes": messages, "calls": calls, "ok": ok,
        "rewards": {"similarity": {"score": reward, "weight": 1.0}}, "metrics": {"exact_match": float(reward == 1)},
        "stop_condition": "agent_completed", "errors": errors,
        "timing": {"start": start, "agent": {"start": start, "end": start + 3 * turns}},
    }  # fmt: skip
    return {
        "id": "x", "ok": ok, "env": {"name": "rev"}, "errors": [], "traces": [trace], "num_input_tokens": 12,
        "num_output_tokens": 2 * turns, "task": {"type": "T", "key": "task-1", "data": {"prompt": prompt}},
    }  # fmt: skip


def context(run: Path, attempt=1) -> RunContext:
    folder = f"attempt_{attempt}"
    return RunContext(run, "run-id", run.name, attempt, None, run / "configs" / folder, run / "logs" / folder)


def work(group, sample, step, kind="train", env="rev", at=1000.0) -> Work:
    name = f"{env}/{group}/{sample}" if kind == "train" else f"eval/{env}/v{step}/{group}/{sample}"
    return Work(kind, env, f"{env}/{group}", name, step, step - 1 if kind == "train" else step, at, group, sample)


class Made:
    """One run directory, written by the monitors themselves; `step` adds to it, so that it can grow."""

    def __init__(self, run: Path, attempt=1, start=0):
        self.run, self.ctx = run, context(run, attempt)
        configs(run, attempt)
        mark_attempt(self.ctx, start)
        table = SimpleNamespace(file=FILE)
        self.orch, self.trainer = setup(table, "orch", self.ctx), setup(table, "trainer", self.ctx)
        self.recorder, self.views = self.orch.recorder("run-id"), self.trainer.recorder("run-id")

    def step(self, step, groups=1, samples=4, **given):
        """Metrics of one step and its episodes, credited, shipped and trained on."""
        at = 1000.0 + 10 * step
        self.orch.log(step, {"reward/all/mean": 0.1 * step, "reward/rev/mean": 0.1 * step, "num_turns/all/mean": 1.0})
        self.trainer.log(
            step, {"loss/mean": 1.0 / step, "entropy/all/mean": 0.5, "optim/lr": 1e-4, "perf/throughput": 9.0}
        )
        for group in range(groups):
            for sample in range(samples):
                self.episode(
                    work(step * 100 + group, sample, step, at=at), record(reward=sample / 4, start=at, **given)
                )
        return self

    def episode(self, one: Work, made, trained=True):
        arrival = Episode(made)
        self.recorder.arrived(one, arrival, one.version)
        if one.kind == "train" and trained:
            spans = [[p, p + 2] for p in range(16, 6 * len(made["traces"][0]["nodes"]), 12)]
            count = 2 * len(spans)
            branch = {"index": 0, "spans": spans, "advantages": [one.sample - 1.5] * count}
            self.recorder._annotate(one.name, {"advantage": one.sample - 1.5}, [branch])
            self.recorder.shipped([one.name], one.step, one.step - 1)
            own = {"trainer_logprobs": [-0.4] * count, "entropies": [0.7] * count, "is_masked": [1, 0] * (count // 2)}
            self.views.trained(one.name, one.step, [{"index": 0, "spans": spans, **own}])
        return self

    def close(self, finished=False):
        self.orch.close(finished)
        self.trainer.close()
        return self


def configs(run: Path, attempt: int, **given):
    folder = run / "configs" / f"attempt_{attempt}"
    resolved = {
        "model": {"name": "tiny/model"},
        "max_steps": 10,
        "train": {"source": [{"name": "rev"}]},
        "lr": 1e-4 * attempt,
    }
    write(folder / "resolved/orchestrator.json", json.dumps(resolved | given))
    write(folder / "resolved/trainer.json", json.dumps({"max_steps": 10, "loss": {"type": "ipo"}}))
    write(folder / "command.txt", "rl @ rl.toml\n")
    write(folder / "rl.toml", f"max_steps = 10\n[trainer.optim]\nlr = {attempt}e-4\n")
    logs = run / "logs" / f"attempt_{attempt}"
    write(
        logs / "orchestrator.log",
        "10:00:01 INFO    orchestrator starts\n10:00:03 WARNING orchestrator \x1b[31mslow\x1b[0m\n",
    )
    write(logs / "trainer.log", "10:00:02 SUCCESS trainer Step 1 | Loss 1.0\n10:00:04 ERROR   trainer it broke\n")
    write(logs / "envs/train/rev.log", "10:00:05 INFO env up\n")
    for what in ("configs", "logs"):
        link = run / what / "latest"
        link.unlink(missing_ok=True)
        link.symlink_to(f"attempt_{attempt}")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def cite(**given) -> str:
    fixed = {
        "step": 1,
        "kind": "train",
        "subset": "effective",
        "episode": "rev/100/0",
        "quote": "olleh",
        "note": "it reverses",
    }
    return json.dumps({k: v for k, v in (fixed | given).items() if v is not None})


def report(run: Path, name="first.md", **cites) -> Path:
    lines = [
        "---",
        'title: "What it learns"',
        "---",
        "# Findings",
        "",
        "It reverses[^a] and **more**[^b].",
        "",
        "<b>raw</b> [x](javascript:alert(1)) [y](https://example.org/)",
        "",
    ]
    lines += [f"[^{key}]: {value}" for key, value in (cites or {"a": cite(), "b": cite(quote="never said")}).items()]
    return write(run / "reports" / name, "\n".join(lines))


__all__ = ["HOSTILE", "Episode", "Made", "Recorder", "cite", "configs", "context", "record", "report", "work", "write"]
