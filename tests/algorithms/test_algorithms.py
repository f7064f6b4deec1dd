"""Each algorithm on hand-made episodes: which tokens get which signal."""

import math
import re

import pytest
from aiohttp import web

from rlmake.algorithms import ALGORITHMS, AlgorithmContext, Endpoint, build
from rlmake.algorithms.prefill import Prefill
from rlmake.algorithms.traces import sampled_tokens, set_advantages, settle, trainable_traces
from rlmake.config import algo as configs
from rlmake.core.errors import RunFailed, UserError

FROZEN = {"name": "teacher", "base_url": "http://127.0.0.1:9/v1"}


def algorithm(config, policy="http://127.0.0.1:9/v1", tokenizer="", agents=("proposer", "solver")):
    return build(config, AlgorithmContext("env", Endpoint(policy, "model"), tokenizer, agents))


async def score(instance, episodes):
    for episode in episodes:
        settle(episode)
        if trainable_traces(episode):
            await instance.score_episode(episode)
    await instance.finish(episodes)


def advantages(episodes):
    return [n.advantages for e in episodes for t in e.traces for n in t.nodes if n.sampled]


def test_registry_and_configuration_agree():
    assert set(ALGORITHMS) == {"grpo", "max_rl", "rae", "hierarchical_grpo", "opd", "opsd", "sft", "echo"}
    for kind in configs.Algo.__origin__.__args__:
        name = kind.model_fields["type"].default
        assert ALGORITHMS[name].action_loss_type == kind.signal


async def test_grpo_broadcasts_to_every_sampled_token(make):
    episodes = [make.episode(make.simple(reward, tokens)) for reward, tokens in ((1.0, 3), (0.0, 1), (0.5, 2))]
    await score(algorithm(configs.GRPOConfig()), episodes)
    assert advantages(episodes) == [[0.5] * 3, [-0.5], [0.0, 0.0]]
    assert all(node.loss_weights is None for e in episodes for t in e.traces for node in t.nodes)


@pytest.mark.parametrize("reward", [1.0, 0.1, 1 / 3])
async def test_failed_rollouts_leave_before_the_mean(make, reward):
    """R01: `[r, error, error, error]` is a group of one."""
    episodes = [make.episode(make.simple(reward))]
    episodes.append(make.episode(make.simple(0.0, ok=False)))
    episodes.append(make.episode(make.simple(0.0), ok=False))
    episodes.append(make.episode(make.simple(math.nan)))
    await score(algorithm(configs.GRPOConfig()), episodes)
    assert advantages(episodes) == [[0.0, 0.0], None, None, None]
    assert [len(trainable_traces(e)) for e in episodes] == [1, 0, 0, 0]
    assert episodes[3].traces[0].errors[-1].type == "RewardError"
    await score(algorithm(configs.GRPOConfig()), [])


@pytest.mark.parametrize(
    "algo", [configs.GRPOConfig(), configs.MaxRLConfig(), configs.RAEConfig(decay=0.0)], ids=lambda a: a.type
)
async def test_unscored_and_timed_out_rollouts_give_no_credit(make, algo):
    """A reward that is no finite float32, a rollout or an episode out of time: none moves a mean or a baseline."""
    spoiled = [make.episode(make.simple(1.0)) for _ in range(6)]
    spoiled[0].traces[0].rewards["r"] = None
    spoiled[1].traces[0].rewards["r"].score = math.inf
    spoiled[2].traces[0].is_timeout = True
    spoiled[3].is_timeout = True
    spoiled[4].traces[0].agent.trainable = False
    spoiled[5].traces[0].rewards["r"].score = 1e39
    good = [make.episode(make.simple(0.25, 1)), make.episode(make.simple(0.75, 1))]
    mixed, alone = algorithm(algo), algorithm(algo)
    await score(mixed, [spoiled[0], good[0], *spoiled[1:], good[1]])
    with_spoiled = advantages(good)
    again = [make.episode(make.simple(0.25, 1)), make.episode(make.simple(0.75, 1))]
    await score(alone, again)
    assert with_spoiled == advantages(again) and mixed.state_dict() == alone.state_dict()
    assert advantages(spoiled) == [None] * 6


async def test_groups_keep_apart_however_they_arrive(make):
    """R04: two tasks whose rollouts came interleaved; credit is by group, so all four advantages are zero."""
    instance = algorithm(configs.GRPOConfig())
    a, b = ([make.episode(make.simple(reward, 1)) for _ in range(2)] for reward in (1.0, 0.0))
    arrived = [a[0], b[0], a[1], b[1]]
    for group in ([arrived[0], arrived[2]], [arrived[1], arrived[3]]):
        await score(instance, group)
    assert advantages(arrived) == [[0.0]] * 4


def test_one_failed_trace_fails_its_siblings(make):
    episode = make.episode(make.simple(1.0, agent="a"), make.simple(0.0, agent="b", ok=False))
    settle(episode)
    assert not episode.ok and trainable_traces(episode) == []


async def test_grpo_options(make):
    """Baseline over trainable tokens: (3·1 + 1·0)/4; per-prompt weights 1/T over the group's 4 tokens."""
    episodes = [make.episode(make.simple(1.0, 3)), make.episode(make.simple(0.0, 1))]
    config = configs.GRPOConfig(length_weighted_baseline=True, loss_aggregation="prompt")
    await score(algorithm(config), episodes)
    assert advantages(episodes) == [[0.25] * 3, [-0.75]]
    weights = [n.loss_weights["rl"] for e in episodes for t in e.traces for n in t.nodes if n.sampled]
    assert weights == [[0.0, 0.25, 0.25, 0.25], [0.0, 0.25]]

    episodes = [make.episode(make.simple(1.0, 4)), make.episode(make.simple(1.0, 2))]
    await score(algorithm(configs.GRPOConfig(length_penalty={})), episodes)
    # mean 1; frac = 0.25·out/4 + 0.1·in/4 + 0.1·1/1 with the four prompt tokens of each
    expected = ((1 - 0.45) - (1 - 0.325)) / 2
    assert advantages(episodes)[0][0] == pytest.approx(expected, abs=1e-15)


async def test_max_rl(make):
    episodes = [make.episode(make.simple(r, 1)) for r in (1.0, 0.0, 0.0, 0.0)]
    await score(algorithm(configs.MaxRLConfig()), episodes)
    assert advantages(episodes) == [[3.0], [-1.0], [-1.0], [-1.0]]


async def test_rae_keeps_a_baseline_per_agent_through_its_state(make):
    instance = algorithm(configs.RAEConfig(decay=0.5))
    first = make.episode(make.simple(1.0, 1, agent="a"), make.simple(-1.0, 1, agent="b"))
    await score(instance, [first])
    assert advantages([first]) == [[1.0], [-1.0]]
    resumed = algorithm(configs.RAEConfig(decay=0.5))
    resumed.load_state_dict(instance.state_dict())
    second = make.episode(make.simple(1.0, 1, agent="a"), make.simple(-1.0, 1, agent="b"))
    await score(resumed, [second])
    assert advantages([second]) == [[0.5], [-0.5]]
    failed = make.episode(make.simple(9.0, 1, agent="a", ok=False))
    await score(resumed, [failed])
    assert resumed.baselines == {"a": 0.75, "b": -0.75}


async def test_hierarchical(make):
    episodes = [
        make.episode(make.simple(0.5, 1, agent="proposer"), *(make.simple(r, 1, agent="solver") for r in solvers))
        for solvers in ((1.0, 0.0), (1.0, 1.0))
    ]
    episodes[1].traces[0].rewards["r"].score = 0.0
    await score(algorithm(configs.HierarchicalGRPOConfig(episode_agents=["solver"])), episodes)
    assert advantages(episodes) == [[0.25], [0.5], [-0.5], [-0.25], [0.0], [0.0]]


@pytest.mark.parametrize("agents", [("agent",), ("solver",), ("player0", "player1")])
def test_hierarchical_needs_a_role_beside_others(agents):
    with pytest.raises(UserError, match=rf"algo.episode_agents: no role 'solver' .*has {', '.join(agents)}"):
        algorithm(configs.HierarchicalGRPOConfig(episode_agents=["solver"]), agents=agents)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (configs.OPDConfig(teacher={"name": "t"}), "teacher"),
        (configs.SFTAlgoConfig(sampling={"source": {"name": "t"}}), "sampling.source"),
    ],
)
def test_a_frozen_model_needs_an_address_by_now(config, key):
    with pytest.raises(UserError, match=rf"algo.{key}.base_url of 'env' is missing"):
        algorithm(config)


def tool_trace(make, reward):
    """user(3) → assistant(2) → tool(4, first is scaffold) → assistant(2), and a second branch from the tool node."""
    nodes = [
        make.node("user", 3),
        make.node("assistant", 2, parent=0, sampled=True),
        make.node("tool", 4, parent=1),
        make.node("assistant", 2, parent=2, sampled=True),
        make.node("assistant", 1, parent=2, sampled=True),
    ]
    return make.trace(nodes, reward)


async def test_echo_weighs_observation_bodies(make):
    episodes = [make.episode(tool_trace(make, r)) for r in (1.0, 0.0)]
    await score(algorithm(configs.EchoConfig()), episodes)
    nodes = episodes[0].traces[0].nodes
    assert nodes[2].loss_weights == {"ce": [0.0, 0.1, 0.1, 0.1]}
    assert nodes[0].loss_weights is None and nodes[1].loss_weights is None
    assert nodes[1].advantages == [0.5, 0.5] and sampled_tokens(episodes[0].traces[0]) == 5

    config = configs.EchoConfig(roles={"user": {"alpha": 1.0}})
    episodes = [make.episode(tool_trace(make, 1.0))]
    await score(algorithm(config), episodes)
    assert all(node.loss_weights is None for node in episodes[0].traces[0].nodes)  # the initial prompt never trains


def narrow(trace, last):
    """A filter: of each branch only the token at index `last`."""
    return [[i == last for i in range(len(branch.token_ids))] for branch in trace.branches]


def too_short(trace):
    return [[True]]


async def test_echo_filter_narrows(make):
    config = configs.EchoConfig(filter={"import_path": f"{__file__}:narrow", "kwargs": {"last": 7}})
    episode = make.episode(tool_trace(make, 1.0))
    await score(algorithm(config), [episode])
    assert episode.traces[0].nodes[2].loss_weights == {"ce": [0.0, 0.0, 0.1, 0.0]}
    wrong = configs.EchoConfig(filter={"import_path": f"{__file__}:too_short"})
    with pytest.raises(UserError, match=r"masks of lengths \[1\], the branches have \[11, 10\] tokens"):
        await score(algorithm(wrong), [make.episode(tool_trace(make, 1.0))])
    with pytest.raises(UserError, match=r"algo.filter.import_path: cannot import"):
        algorithm(configs.EchoConfig(filter={"import_path": "nowhere.at_all"}))


async def test_sft_trains_every_sampled_token(make):
    episode = make.episode(make.simple(0.0, 2))
    await score(algorithm(configs.SFTAlgoConfig(sampling={"source": FROZEN})), [episode])
    reply = episode.traces[0].nodes[1]
    assert reply.loss_weights == {"ce": [0.0, 1.0, 1.0], "rl": [0.0, 0.0, 0.0]} and reply.advantages is None


class Scorer:
    """A server that gives token t at position i the logprob −(t + i/100); the first `broken` answers are 503."""

    def __init__(self, broken=0):
        self.seen, self.broken = [], broken

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def generate(self, request):
        body = await request.json()
        self.seen.append(body)
        if len(self.seen) <= self.broken:
            return web.Response(status=503)
        if body["model"] == "unknown":
            return web.json_response({"error": "no such model"}, status=404)
        rows = [{str(t): {"logprob": -(t + i / 100)}} for i, t in enumerate(body["token_ids"])]
        return web.json_response({"prompt_logprobs": [None, *rows[1:]], "choices": []})


async def test_opd_scores_by_prefill(make, monkeypatch):
    monkeypatch.setattr("asyncio.sleep", _no_sleep)
    async with Scorer(broken=1) as server:
        teacher = {"name": "teacher", "base_url": server.url}
        instance = algorithm(configs.OPDConfig(teacher=teacher))
        episode = make.episode(make.simple(0.0, 2))
        await score(instance, [episode])
        reply = episode.traces[0].nodes[1]
        assert reply.reference_logprobs == pytest.approx([-1.04, -2.05])
        assert reply.loss_weights == {"ref_kl": [0.0, 1.0, 1.0], "rl": [0.0, 0.0, 0.0]}
        assert server.seen[-1]["sampling_params"] == {
            "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1,
        }  # fmt: skip
        await instance.close()
        unknown = algorithm(configs.OPDConfig(teacher=teacher | {"name": "unknown"}))
        with pytest.raises(RunFailed, match=r"algo\.teacher at .* did not score 6 tokens: .*no such model"):
            await score(unknown, [make.episode(make.simple(0.0, 2))])
        await unknown.close()


async def _no_sleep(_seconds):
    return None


async def test_opsd_puts_the_hint_before_the_branch(make):
    async with Scorer() as server:
        instance = algorithm(configs.OPSDConfig(), policy=server.url)
        instance._hint_ids = lambda text: [900] * len(text)
        episode = make.episode(make.simple(0.0, 2, info={"demonstration": "abcd"}))
        await score(instance, [episode])
        assert server.seen[0]["token_ids"] == [900] * 4 + [0, 1, 2, 0, 1, 2] and server.seen[0]["model"] == "model"
        assert server.seen[0]["cache_salt"] == episode.id
        assert episode.traces[0].nodes[1].reference_logprobs == pytest.approx([-1.08, -2.09])
        with pytest.raises(UserError, match=r"algo\.demo_key 'demonstration'"):
            await score(instance, [make.episode(make.simple(0.0, 2))])
        await instance.close()


def test_a_list_must_have_one_value_per_sampled_token(make):
    trace = tool_trace(make, 1.0)
    set_advantages(trace, [1, 2, 3, 4, 5])
    assert [node.advantages for node in trace.nodes] == [None, [1, 2], None, [3, 4], [5]]
    with pytest.raises(ValueError, match="4 advantages for 5 sampled tokens"):
        set_advantages(trace, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("nothing", "no positions scored, 2 sent"),
        ([None], "1 positions scored, 2 sent"),
        ([None, None], "no log-probability of token 9 at position 1: None"),
        ([None, {}], "token 9 at position 1"),
        ([None, [-0.5]], "token 9 at position 1"),
        ([None, {"7": {"logprob": -0.5}}], "token 9 at position 1"),
        ([None, {"9": {"logprob": None}}], "token 9 at position 1"),
        ([None, {"9": {"logprob": float("nan")}}], "token 9 at position 1"),
        ([None, {"9": {"logprob": 0.5}}], "token 9 at position 1"),
    ],
)
async def test_scores_that_are_not_of_the_tokens_sent_are_none(monkeypatch, rows, fault):
    """A server that answers with something else must not train anybody."""
    monkeypatch.setattr("asyncio.sleep", _no_sleep)

    class Other(Scorer):
        async def generate(self, request):
            return web.json_response({"prompt_logprobs": rows})

    async with Other() as server:
        scorer = Prefill(Endpoint(server.url, "teacher"), "algo.teacher")
        with pytest.raises(RunFailed, match=re.escape(fault)):
            await scorer.logprobs([4, 9])
        await scorer.close()
