"""The values of a run's metrics, computed once more from its records: episodes of the trace stream and the trainer's
batches. Plain numpy, nothing of the orchestrator's own sums.

Two sources: `one` has a single agent, gates, a difficulty pool, and rollouts that fail without a trace. `two` has two
turns, a judge that does not train, two parts of a reward of which one may be missing, truncated and failed traces, and
replies beyond `seq_len`. Groups may have equal rewards, batches cut groups in two, and train one version late.
"""

import asyncio
from math import comb

import numpy as np
import pytest
import verifiers.v1 as vf

from rlmake.monitors import read
from rlmake.monitors.traces import layout
from rlmake.monitors.traces import read as traces

GROUP, SEQ_LEN, STEPS, BATCH = 4, 12, 6, 12
GATES = {"flat": (0.0, 0.0), "small": (-0.2, 0.2)}
REWARDS = (0.0, 0.25, 1.0)
SIZES = ("num_total_tokens", "num_input_tokens", "num_output_tokens", "num_turns", "num_branches")


def reward(task, ids):
    return 0.0 if task % 3 == 0 else REWARDS[ids[0] % 3]


def failing(task, ids):
    return None if ids[0] % 10 == 9 else reward(task, ids)


def conversation(name, task, reply, reward):
    """Two turns and a judge's word on them."""
    ids, logprobs, data = reply["ids"], reply["logprobs"], {"type": "Toy", "data": {"idx": task.index, "prompt": "p"}}

    def said(parent, prompt, scaffold):
        mask = [False] * len(scaffold) + [True] * len(ids)
        user = {"message": {"role": "user", "content": "p"}, "token_ids": prompt, "mask": [False] * len(prompt)}
        answer = {"message": {"role": "assistant", "content": "a"}, "sampled": True, "token_ids": [*scaffold, *ids]}
        answer |= {"mask": mask, "logprobs": logprobs, "parent": parent + 1}
        return [user | ({"parent": parent} if parent >= 0 else {}), answer]

    def call(node, prompt):
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids)}
        return {"node": node, "usage": usage, "finish_reason": "length" if len(ids) == 6 else "stop"}

    bad = ids[0] % 10 == 9
    rewards = {"r": {"score": reward, "weight": 1.0}, "bonus": {"score": 0.5, "weight": 0.5}}
    trace = {
        "task": data, "agent": {"config": {}, "name": "agent"}, "ok": not bad, "is_completed": not bad,
        "nodes": said(-1, [1, 2, 3], [3]) + said(1, [4], [3]), "calls": [call(1, 4), call(3, 6 + len(ids))],
        "rewards": {} if bad else rewards if task.index % 2 else {"r": rewards["r"]},
        "metrics": {"length": len(ids)}, "stop_condition": "error" if bad else "agent_completed",
        "errors": [{"type": "ToolError", "message": "scripted"}] if bad else [],
        "timing": {"agent": {"start": 1.0, "end": 1.0 + len(ids)}},
    }  # fmt: skip
    judge = trace | {"agent": {"config": {}, "name": "judge", "trainable": False}, "nodes": said(-1, [1, 2], [3])}
    judge |= {"calls": [call(1, 3)], "rewards": {}, "metrics": {}}
    return vf.WireEpisode.model_validate(
        {"task": data, "ok": not bad, "traces": [trace, judge], "env": {"name": name}, "errors": []}
    )


def toy(make_run):
    gates = {name: {"type": "advantage_range", "reject_min": a, "reject_max": b} for name, (a, b) in GATES.items()}
    one = {"gates": gates, "sampler": {"type": "difficulty_pool"}}
    sources = {"one": {"curriculum": one}, "two": {}}
    env = {name: {"name": name, "env": {"taskset": {"id": name}}} for name in ("one", "two", "held")}
    return make_run(
        max_steps=STEPS, batch_size=BATCH, seq_len=SEQ_LEN, lag=1, max_off_policy_steps=2,
        rewards={"one": (7, failing), "two": (5, reward, conversation), "held": (5, failing)},
        train={"group_size": GROUP, "source": [env[name] | more for name, more in sources.items()]},
        eval={"interval": 2, "group_size": 3, "source": [env["held"]]},
    )  # fmt: skip


def stats(values, names=("mean", "max", "min", "p10", "p90")):
    found = {
        "mean": np.mean, "max": np.max, "min": np.min, "p10": lambda v: np.percentile(v, 10),
        "p90": lambda v: np.percentile(v, 90),
    }  # fmt: skip
    return {name: float(found[name](values)) for name in names}


class Rollout:
    """A trace of an episode; `trace` is None for an episode without any."""

    def __init__(self, record, number):
        self.env, self.record, self.number = record["env"]["name"], record, number
        self.trace = record["traces"][number] if record["traces"] else None
        self.name = f"{record['name']}/{number}" if len(record["traces"]) > 1 else record["name"]
        self.agent = self.trace["agent"]["name"] if self.trace else "agent"
        self.trains = self.trace is not None and self.trace["agent"]["trainable"]
        self.ok = record["ok"] and self.trace is not None and self.trace["ok"]
        self.admitted = self.useful = False
        errors = (self.trace["errors"] if self.trace else []) + (record["errors"] if number == 0 else [])
        self.errors = {error["type"] for error in errors}
        parts = self.trace["rewards"].items() if self.trace else ()
        self.scores = {name: part["score"] for name, part in parts}
        self.reward = sum(part["score"] * part["weight"] for _, part in parts)

    def size(self, name):
        nodes = self.trace["nodes"]
        total, sampled = sum(len(n["token_ids"]) for n in nodes), sum(sum(n["mask"]) for n in nodes)
        turns = sum(n["sampled"] for n in nodes)
        return dict(zip(SIZES, (total, total - sampled, sampled, turns, 1), strict=True))[name]

    def flag(self, name):
        trace = self.trace or {}
        cut = bool(trace) and trace["calls"][-1]["finish_reason"] == "length"
        return {
            "is_truncated": cut, "is_completed": trace.get("is_completed", False), "is_timeout": False,
            "is_trainable": self.useful, "is_admitted": self.useful and self.admitted, "has_error": not self.ok,
        }[name]  # fmt: skip


FLAGS = ("is_truncated", "is_completed", "is_timeout", "is_trainable", "is_admitted", "has_error")


class Groups:
    """Groups of rollouts by (env, draw), with their credit (GRPO: reward less the group's mean) and gates."""

    def __init__(self, records):
        self.groups = {}
        for record in records:
            found = [Rollout(record, number) for number in range(max(1, len(record["traces"])))]
            self.groups.setdefault(record["group"]["id"], []).extend(found)
        self.refused = {}
        for key, rollouts in self.groups.items():
            scored = [r for r in rollouts if r.ok and r.trains]
            credit = [r.reward - np.mean([s.reward for s in scored]) for r in scored]
            gates = GATES if key.startswith("one/") and credit else {}
            self.refused[key] = {g for g, (a, b) in gates.items() if all(a <= c <= b for c in credit)}
            for rollout, advantage in zip(scored, credit, strict=True):
                rollout.useful, rollout.admitted = advantage != 0, not self.refused[key]

    def of(self, step, scope):
        """{group: rollouts} that were started, and in lock-step ended, for `step`."""
        here = {k: v for k, v in self.groups.items() if v[0].record["dispatch"]["step"] == step}
        return {k: v for k, v in here.items() if scope in ("agg", v[0].env)}


def of_agent(prefix, mine, timing):
    clean, row = [r for r in mine if r.ok], {}

    def add(name, values):
        row.update({f"{prefix}/{name}/{k}": v for k, v in stats(values).items()} if values else {})

    add("reward", [r.reward for r in clean])
    row |= {f"{prefix}/{flag}/mean": np.mean([r.flag(flag) for r in mine]) for flag in FLAGS}
    for part in {name for r in mine for name in r.scores}:
        envs = {r.env for r in mine if part in r.scores}
        add(f"rewards/{part}", [r.scores.get(part, 0.0) for r in clean if r.env in envs])
    for name in {name for r in mine if r.trace for name in r.trace["metrics"]}:
        add(f"metrics/{name}", [r.trace["metrics"][name] for r in clean if name in r.trace["metrics"]])
    for stage in ("boot", "setup", "agent", "finalize", "scoring") if timing else ():
        spans = [r.trace["timing"][stage] for r in clean]
        add(f"timing/{stage}", [span["end"] - span["start"] for span in spans])
    for name in {r.trace["stop_condition"] for r in mine if r.trace} - {None}:
        share = np.mean([r.trace is not None and r.trace["stop_condition"] == name for r in mine])
        row[f"{prefix}/stop_condition/{name}/mean"] = share
    for name in {name for r in mine for name in r.errors}:
        row[f"{prefix}/error/{name}/mean"] = np.mean([name in r.errors for r in mine])
    return row


def expected_rollouts(groups, step, shipped):
    """`train/*` and the page's names."""
    row = {}
    for scope in ("agg", "one", "two"):
        mine = groups.of(step, scope)
        every = [r for rollouts in mine.values() for r in rollouts]
        effective = [r for r in shipped if scope in ("agg", r.env)]
        for subset, chosen in (("all", every), ("effective", effective)):
            for size in SIZES:
                if values := [r.size(size) for r in chosen if r.trace]:
                    row |= {f"train/{scope}/{subset}/{size}/{k}": v for k, v in stats(values).items()}
            for agent in {r.agent for r in chosen}:
                prefix = f"train/{scope}/{subset}/{agent}"
                row |= of_agent(prefix, [r for r in chosen if r.agent == agent], subset == "all")
        marks = [[r.reward >= 1 for r in g if r.ok and r.trains] for g in mine.values()]
        marks = [np.mean(m) for m in marks if m]
        for name, share in (("none", [m == 0 for m in marks]), ("all", [m == 1 for m in marks])):
            row[f"train/{scope}/all/solved_{name}"] = np.mean(share)
        row[f"train/{scope}/all/solved_some"] = np.mean([0 < m < 1 for m in marks])
        page = "all" if scope == "agg" else scope
        clean, first = [r for r in every if r.ok], [r for r in every if r.number == 0]
        row[f"errored_rollouts/{page}"] = np.mean([not r.record["ok"] for r in first])
        row |= {f"empty_rollouts/{page}": 0.0, f"cancelled_rollouts/{page}": 0.0, f"is_timeout/{page}/mean": 0.0}
        row[f"reward/{page}/mean"] = np.mean([r.reward for r in clean if r.trains])
        row[f"is_truncated/{page}/mean"] = np.mean([r.flag("is_truncated") for r in clean])
        for name, size in (("seq_len", SIZES[0]), ("num_turns", SIZES[3]), ("num_branches", SIZES[4])):
            row[f"{name}/{page}/mean"] = np.mean([r.size(size) for r in clean])
    return row


def expected_counts(groups, step, shipped, batches, useful):
    """What is counted: the batch, staleness, totals, dispatcher, curriculum, queue."""
    here, row = groups.of(step, "agg"), {}
    row |= {f"batch/{env}": np.mean([r.env == env for r in shipped]) for env in ("one", "two")}
    row |= {"batch/trainable": BATCH, "batch/samples": BATCH, "batch/rollouts": GROUP * len(here)}
    row["window/useful"] = sum(r.flag("is_admitted") for g in here.values() for r in g)
    row |= {"queue/traces": useful - step * BATCH, "off_policy/dropped": 0}
    ages = [step - 1 - r.record["dispatch"]["version"] for r in shipped]
    flight = [r.record["arrival"]["version"] - r.record["dispatch"]["version"] for r in shipped]
    for name, values in (("", ages), ("in_flight/", flight), ("in_queue/", np.subtract(ages, flight))):
        row |= {f"off_policy/{name}{k}": v for k, v in stats(values, ("mean", "max")).items()}
    for k, upto in (("", [step]), ("total_", range(1, step + 1))):
        rows = [m for s in upto for rank in batches[s] for m in rank.micro_batches if m.sample_ids != [""]]
        names = [name.split("/") for s in upto for name in batches[s][0].sample_ids]
        sampled = sum(int(m.loss_mask.sum()) for m in rows)
        tokens = sum(len(m.input_ids) for m in rows)
        found = {"tokens": tokens, "output_tokens": sampled, "input_tokens": tokens - sampled}
        found |= {"rollouts": len({(*n[:3],) for n in names}), "tasks": len({(*n[:2],) for n in names})}
        row |= {f"progress/{k}{name}": value for name, value in found.items()}
    episodes = [r for g in here.values() for r in g if r.number == 0]
    for scope in ("train", "one", "two"):
        mine = [r.record["ok"] for r in episodes if scope in ("train", r.env)]
        row |= {f"dispatcher/{k}/{scope}": v for k, v in (("finished", sum(mine)), ("started", len(mine)))}
        row |= {f"dispatcher/errored/{scope}": len(mine) - sum(mine), f"dispatcher/cancelled/{scope}": 0}
    for env in ("one", "two"):
        if refused := [groups.refused[k] for k in groups.of(step, env)]:
            row[f"curriculum/{env}/admission_rate"] = np.mean([not gates for gates in refused])
        if env == "one":
            row |= {f"curriculum/one/gate/{g}/rejected": sum(g in gates for gates in refused) for g in GATES}
    return row


def pools(groups, step):
    """Of `one`: shares of its tasks by the last mean reward that they were seen with."""
    seen = {}
    for key in sorted((k for k in groups.groups if k.startswith("one/")), key=lambda k: int(k[4:])):
        rollouts = groups.groups[key]
        scored = [r.reward for r in rollouts if r.ok]
        if rollouts[0].record["dispatch"]["step"] <= step and scored:
            seen[rollouts[0].record["task_index"]] = np.mean(scored)
    return 1 - len(seen) / 7


def expected_eval(records):
    tasks = {}
    for record in records:
        tasks.setdefault(record["task_index"], []).append(sum(Rollout(record, 0).scores.values()))
    means, k = [np.mean(rewards) for rewards in tasks.values()], len(records)
    half = 2.7764451051977987 * np.std(means, ddof=1) / np.sqrt(len(means))  # Student's t of 4 degrees
    row = {"reward/mean": np.mean(means), "avg@3": np.mean(means), "num_episodes": k, "num_planned": 15}
    row |= {"reward/ci95_low": np.mean(means) - half, "reward/ci95_high": np.mean(means) + half}
    row |= {"has_error/mean": np.mean([not r["ok"] for r in records]), "is_timeout/mean": 0, "is_truncated/mean": 0}
    lengths = [sum(sum(n["mask"]) for t in r["traces"] for n in t["nodes"]) for r in records]
    row |= {"num_output_tokens/mean": np.mean(lengths), "policy_version": records[0]["dispatch"]["version"]}
    wins = [sum(reward == 1 for reward in rewards) for rewards in tasks.values()]
    for k in (1, 2, 3):
        row[f"pass@{k}"] = np.mean([1 - comb(3 - c, k) / comb(3, k) for c in wins])
        row[f"pass^{k}"] = np.mean([comb(c, k) / comb(3, k) for c in wins])
    return {f"eval/held/{name}": value for name, value in row.items()}


def records_of(run):
    root = run.folder / "monitors/file/traces"
    rows = [row for _, row in traces.Tail(layout.index(root)).rows()]
    heads = {row["id"]: row for row in rows}
    found = [traces.record_at(layout.stream(root), r["chunk"], r["offset"], r["length"]) for r in heads.values()]
    return [record | {"task_index": heads[record["id"]]["task_index"]} for record in found]


def families(row, *prefixes):
    return {name: value for name, value in row.items() if name.startswith(prefixes)}


async def test_every_value_of_a_run(make_run):
    run = toy(make_run)
    _, trainer, _, _ = await run.finish()
    records = records_of(run)
    groups = Groups([r for r in records if r["kind"] == "train"])
    by_name = {r.name: r for rollouts in groups.groups.values() for r in rollouts}
    rows = [row for row in run.rows() if row["producer"] == "orch"]
    steps = {row["step"]: row for row in rows if "time/step" in row}
    assert sorted(steps) == [*range(1, STEPS + 1)]
    useful = 0
    for step, row in steps.items():
        shipped = [by_name[name] for name in trainer.batches[step][0].sample_ids]
        wanted = expected_rollouts(groups, step, shipped)
        pages = [name.partition("/")[0] + "/" for name in wanted]
        assert families(row, *pages) == pytest.approx(wanted)
        useful += sum(r.flag("is_admitted") for g in groups.of(step, "agg").values() for r in g)
        wanted = expected_counts(groups, step, shipped, trainer.batches, useful)
        assert {name: row.get(name) for name in wanted} == pytest.approx(wanted)
        assert families(row, "batch/", "off_policy/", "progress/").keys() <= wanted.keys()
        assert row["curriculum/one/sampler/pool/unseen"] == pytest.approx(pools(groups, step))
    evaluated = {row["step"]: families(row, "eval/") for row in rows if "eval/held/policy_version" in row}
    assert sorted(evaluated) == [0, 2, 4, 6]
    for version, row in evaluated.items():
        mine = [r for r in records if r["kind"] == "eval" and r["dispatch"]["version"] == version]
        wanted = expected_eval(mine)
        assert row.pop("eval/held/time", "dispatcher/errored/eval") > 0 and row == pytest.approx(wanted)
    # the mixture is there
    every = by_name.values()
    assert {r.agent for r in every} == {"agent", "judge"} and any(r.trace is None for r in every)
    assert any(r.flag("is_truncated") for r in every) and set().union(*groups.refused.values()) == set(GATES)
    assert any(r.useful and not r.admitted for r in every) and any(r.ok and r.trains and not r.useful for r in every)
    assert steps[STEPS]["progress/total_tasks"] < sum(row["progress/tasks"] for row in steps.values())
    assert max(row["off_policy/max"] for row in steps.values()) > 0
    assert any(r.size("num_total_tokens") > SEQ_LEN for r in every if r.useful and r.admitted)


# what differs from run to run; the evaluation of v2 may have ended before the kill, and is counted in no row then
CLOCKS = (
    "time",
    "timing/",
    "event_loop_lag/",
    "inference/",
    "watcher/",
    "concurrency/",
    "attempt",
    "eval/held/time",
    "dispatcher/errored/eval",
)


async def test_a_resumed_run_reports_what_an_uninterrupted_one_does(make_run):
    """Totals go on and count nothing twice, also of a group that the checkpoint cuts in two."""
    whole, resumed = toy(make_run), toy(make_run)
    await whole.finish()
    async with resumed.attempt() as (_, trainer, _, _):
        while trainer.step < 3 and trainer.error is None:
            await asyncio.sleep(0.002)
    await resumed.finish(number=2, resume=2)

    def values(run):
        rows = {row.step: row.metrics for row in read(run.folder) if row.producer == "orch"}
        return {
            step: {k: v for k, v in row.items() if not k.startswith(CLOCKS) and "/timing/" not in k}
            for step, row in rows.items()
        }

    first, second = values(whole), values(resumed)
    assert sorted(first) == sorted(second)
    for step in (1, 2, 4, 5, 6):
        assert second[step] == first[step]
    shipped = families(second[3], "train/agg/effective/", "off_policy/", "batch/one", "batch/two")
    assert shipped and shipped.items() <= first[3].items()  # collected before the checkpoint
