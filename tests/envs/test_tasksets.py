"""Every environment that ships, played by a scripted model through verifiers: tokens, turns, roles and rewards."""

import json
import math
import re
import ssl
from contextlib import asynccontextmanager

import pytest
import verifiers.v1 as vf
from env_fakes import FakeEngine, serving
from fastapi import Request

from rlmake.build.revisions import TASKSETS
from rlmake.build.rows import COMMON, ENV, OPTIONS
from rlmake.config.renderer import RendererConfig
from rlmake.envs import plugins
from rlmake.envs.made import alphabet_sort, kuhn_poker, phone_book
from rlmake.models.renderer import CHATML, typed_config

RENDERER = typed_config(RendererConfig(name="custom", import_path=CHATML))


class Scripted(FakeEngine):
    """Replies to the whole prompt as text; gives every prompt token the logprob −1/100."""

    async def generate(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        prompt = self.tokenizer.decode(body["token_ids"], skip_special_tokens=False)
        ids = [*self.tokenizer.encode(self.reply(prompt), add_special_tokens=False), self.tokenizer.eos_token_id]
        content = [{"token": f"token_id:{t}", "logprob": -0.25, "top_logprobs": []} for t in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        scored = [None, *({str(t): {"logprob": -0.01}} for t in body["token_ids"][1:])]
        return {"request_id": "r", "choices": [choice], "prompt_logprobs": scored}


@asynccontextmanager
async def playing(env, tokenizer, tokenizer_dir, reply):
    """`(tasks, play)`; `await play(task)` is the episode."""
    plugins.light_tokenizers()
    plugins.own_seeds()
    loaded = vf.load_environment(plugins.resolve(env))
    with serving(engine := Scripted(tokenizer, reply)) as url:
        client = vf.TrainClientConfig(
            base_url=url, api_key_var="NONE", renderer=RENDERER, renderer_model_name=tokenizer_dir
        )
        sampling = vf.SamplingConfig(temperature=1.0, max_tokens=128, seed=7)
        context = vf.ModelContext(client=client, model="m", sampling=sampling)

        async def play(task):
            (slot,) = loaded.slots(task)
            episode = await loaded.run_slot(slot, context)
            assert episode.ok, [*episode.errors, *(e for t in episode.traces for e in t.errors)]
            return episode

        play.requests = engine.requests
        async with loaded.serving():
            yield list(loaded.taskset), play


def written(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def last_user(prompt):
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


async def test_alphabet_sort_takes_all_its_turns_in_one_branch(tmp_path, tokenizer, tokenizer_dir):
    turns = [["Zoe", "Ben"], ["Kim"], ["Ada", "Leo"]]
    replies = iter(["Ben Zoe", "Ben Kim Zoe", "Ada Leo"])
    env = {"taskset": {"id": "alphabet-sort", "path": written(tmp_path, [{"id": "a", "turns": turns}])}}
    async with playing(env, tokenizer, tokenizer_dir, lambda prompt: next(replies)) as ((task,), play):
        assert (task.key, task.data.prompt) == ("a", "Sort: Zoe Ben")
        (trace,) = (await play(task)).traces
    assert [m.content for m in trace.messages if m.role == "user"] == ["Sort: Zoe Ben", "Add: Kim", "Add: Ada Leo"]
    # third turn: 2 of the names in "Ada Ben Kim Leo Zoe" match, 2·2/(2 + 5)
    assert trace.reward == pytest.approx((1 + 1 + 4 / 7) / 3) and trace.metrics == {"all_right": 0.0}
    (branch,) = trace.branches
    assert trace.num_turns == 3 and sum(branch.sampled_mask) == len(branch.logprobs) - branch.logprobs.count(0.0)


async def test_phone_book_calls_its_tool_over_mcp(tmp_path, tokenizer, tokenizer_dir, monkeypatch):
    name = "Ada Fox"
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        if "<|im_start|>tool" not in prompt:
            return f'<tool_call>\n{{"name": "look_up", "arguments": {{"name": "{name}"}}}}\n</tool_call>'
        return prompt.rpartition(": ")[2].partition("<|im_end|>")[0]

    rows = [{"id": n, "name": n, "prompt": phone_book.QUESTIONS[0].format(n)} for n in (name, "Ben Fox")]
    env = {"taskset": {"id": "phone-book", "path": written(tmp_path, rows)}}
    read, made = ssl.create_default_context, []
    monkeypatch.setattr(ssl, "create_default_context", lambda *args, **kw: made.append(1) or read(*args, **kw))
    async with playing(env, tokenizer, tokenizer_dir, reply) as (tasks, play):
        await play(tasks[0])
        made.clear()
        (trace,) = (await play(tasks[0])).traces
        other = (await play(tasks[1])).traces[0]
    assert not made  # the system's certificates are read once, not for every episode
    assert [node.message.role for node in trace.nodes] == ["user", "assistant", "tool", "assistant"]
    assert trace.nodes[2].message.content == phone_book.look_up(name) != "not found"
    assert trace.last_reply == phone_book.number_of(name)
    assert trace.reward == 1.0 and trace.metrics["looked_up"] == 1.0
    assert (other.reward, other.metrics["looked_up"]) == (0.0, 0.0)  # asked for Ada all the same
    # What a warm start has seen is what is asked here, token by token: the tools are those of the rows.
    row = phone_book.rows(1, False, 0, 0.0)[0]
    from renderers import create_renderer

    head = create_renderer(tokenizer, RENDERER).render_ids(
        [{"role": "user", "content": rows[0]["prompt"]}], tools=row["tools"], add_generation_prompt=True
    )
    assert tokenizer.decode(head) == prompts[0]
    assert len(trace.branches) == 1 and trace.branches[0].token_ids[: len(head)] == head


async def test_kuhn_poker_pays_out_between_two_seats(tokenizer, tokenizer_dir):
    moves = {"You start": "check", "They check": "bet", "They bet": "call"}

    def reply(prompt):
        ask = last_user(prompt)
        return next(move for start, move in moves.items() if start in ask)

    async with playing({"taskset": {"id": "kuhn-poker"}}, tokenizer, tokenizer_dir, reply) as (tasks, play):
        assert [task.key for task in tasks] == list(kuhn_poker.DEALS)
        episode = await play(tasks[kuhn_poker.DEALS.index("KJ")])
        moves["They bet"] = "nonsense"  # counts as fold
        folded = await play(tasks[kuhn_poker.DEALS.index("KJ")])
    by_name = {trace.agent.name: trace for trace in episode.traces}
    assert {name: trace.reward for name, trace in by_name.items()} == {"player0": 2.0, "player1": -2.0}
    assert (by_name["player0"].num_turns, by_name["player1"].num_turns) == (2, 1)
    assert all(trace.agent.trainable and trace.metrics["legal"] == 1.0 for trace in episode.traces)
    rewards = {trace.agent.name: (trace.reward, trace.metrics["legal"]) for trace in folded.traces}
    assert rewards == {"player0": (-1.0, 0.0), "player1": (1.0, 1.0)}


async def test_kuhn_exploitability_is_that_of_the_scored_probabilities(tokenizer, tokenizer_dir):
    env = {"taskset": {"id": "kuhn-exploitability"}}
    async with playing(env, tokenizer, tokenizer_dir, lambda prompt: "bet") as ((task,), play):
        episode = await play(task)
    lengths = {word: len(tokenizer.encode(word, add_special_tokens=False)) + 1 for word in ("bet", "call")}
    policy = {
        (card, history): math.exp(-0.01 * lengths[kuhn_poker.PASSIVE_ACTIVE[history][1]])
        for card, history in kuhn_poker.INFOSETS
    }
    expected = kuhn_poker.exploitability(policy)
    assert len(episode.traces) == 12
    for trace, (key, probability) in zip(episode.traces, policy.items(), strict=True):
        assert trace.metrics[f"active/{key[0]}{key[1]}"] == pytest.approx(probability)
        assert trace.reward == pytest.approx(-expected)


async def test_proposer_solver_plays_roles_and_attempts(tokenizer, tokenizer_dir):
    replies = iter(["abc", "cba", "abc", "xbc"])
    env = {"taskset": {"id": "proposer-solver"}, "attempts": 2}
    async with playing(env, tokenizer, tokenizer_dir, lambda prompt: next(replies)) as (tasks, play):
        episode = await play(tasks[0])
        invalid = await play(tasks[0])
    *seeds, again = [request["sampling_params"]["seed"] for request in play.requests]
    assert len({7, *seeds}) == 4 and again == seeds[0]  # every run draws for itself, an episode draws the same again
    assert [(t.agent.name, t.reward) for t in episode.traces] == [
        ("proposer", 1.0),  # half of the attempts succeeded
        ("solver", 1.0),
        ("solver", pytest.approx(1 / 3)),
    ]
    assert [(t.agent.name, t.reward, t.metrics["valid"]) for t in invalid.traces] == [("proposer", 0.0, 0.0)]


async def test_reasoning_gym_scores_by_the_package_s_rule(tokenizer, tokenizer_dir):
    pytest.importorskip("reasoning_gym", reason="optional extra")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    taskset = {"id": "reasoning-gym", "dataset": "chain_sum", "options": options, "size": 20}

    def reply(prompt):
        return str(eval(last_user(prompt).rpartition(":")[2].removesuffix("="), {}))

    async with playing({"taskset": taskset}, tokenizer, tokenizer_dir, reply) as (tasks, play):
        assert len({task.key for task in tasks}) == 20
        assert (await play(tasks[3])).traces[0].reward == 1.0
    sides = [
        {t.data.prompt for t in plugins_taskset(taskset | {"split": side, "size": size})}
        for side, size in (("train", 100), ("heldout", 15))
    ]
    assert sides[0].isdisjoint(sides[1])


def plugins_taskset(taskset):
    return vf.load_environment(plugins.resolve({"taskset": taskset})).taskset


@pytest.mark.parametrize(
    ("taskset", "message"),
    [
        ({"id": "reasoning-gym", "dataset": "chain_sums"}, "no 'chain_sums'.*chain_sum"),
        ({"id": "reasoning-gym", "dataset": "chain_sum", "options": {"min_term": 1}}, "options: .*min_term"),
        ({"id": "reasoning-gym", "dataset": "chain_sum", "options": {"max_digits": 1}, "size": 10**6}, "about"),
    ],
)
def test_a_wrong_reasoning_gym_is_one_line(taskset, message):
    pytest.importorskip("reasoning_gym", reason="optional extra")
    taskset.setdefault("options", {}).update({"min_terms": 2, "max_terms": 2} if "max_digits" in str(taskset) else {})
    with pytest.raises(ValueError, match=message):
        list(plugins_taskset(taskset))


def test_alphabet_sort_scores():
    turns = [["b", "a"], ["c"]]
    assert alphabet_sort.answers(turns) == ["a b", "a b c"]
    assert alphabet_sort.score(["a b", "a b c"], turns) == 1.0
    assert alphabet_sort.score(["a b"], turns) == 0.5 and alphabet_sort.score([], turns) == 0.0


def test_the_plan_knows_the_keys_of_every_taskset_that_ships():
    plugins.register()
    from verifiers.v1.utils import loaders

    fields = {name: loaders.taskset_config_type(name).model_fields for name in TASKSETS}
    assert {name: set(found) for name, found in fields.items()} == {
        name: {*own, *COMMON} for name, own in OPTIONS.items()
    }
    needed = {name: [key for key, field in found.items() if field.is_required()] for name, found in fields.items()}
    assert needed == {name: list(own[:1]) for name, own in OPTIONS.items()}
    env = vf.SingleAgentEnvConfig
    agent = env.model_fields["agent"].annotation
    models = {"": env, "timeout": env.model_fields["timeout"].annotation, "agent": agent}
    models["agent.timeout"] = agent.model_fields["timeout"].annotation
    assert {place: set(model.model_fields) for place, model in models.items()} == {k: set(v) for k, v in ENV.items()}


def test_a_package_that_imports_what_is_not_there_says_which(tmp_path, monkeypatch):
    """Not that the package itself is missing."""
    (tmp_path / "own_taskset_of_test.py").write_text("\nimport no_such_package_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, said in (
        ("own_taskset_of_test", r"^No module named 'no_such_package_here' \(.*own_taskset_of_test\.py:2\)$"),
        ("no_taskset_of_test", "'no_taskset_of_test' not found"),
    ):
        with pytest.raises(ModuleNotFoundError) as missing:
            plugins.resolve({"taskset": {"id": name}})
        assert re.search(said, plugins.reason(missing.value))
