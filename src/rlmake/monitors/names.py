"""The names of an RL run's metrics, in one list: what is logged under which name, by whom, when, and what it says.

Whoever shows metrics (dashboard, W&B's saved view, docs) takes them from here; a test compares the list with the rows
of a real run. A pattern has these placeholders:

    {scope}    all, or a training environment            {agg}     agg, or a training environment
    {env}      a training environment                    {eval}    an evaluation environment
    {subset}   all (finished), effective (trained on)    {stat}    mean, max, min, p10, p90
    {token_stat}  mean, median, std, min, max over tokens
    {agent}    a role of an environment                  {k}       samples per task: powers of two, and the group's size
    {name}     whatever an environment or a configuration names
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

Producer = str  # "orch", "trainer" or "eval"
STATS = ("mean", "max", "min", "p10", "p90")
TOKEN_STATS = ("mean", "median", "std", "min", "max")
SUBSETS = ("all", "effective")
SECTIONS = ("train", "eval", "stability", "inference", "performance")


@dataclass(frozen=True)
class Metric:
    """One name. `when` is empty for what every run has (its placeholders filled), else says what it takes.

    `overview`: one of the handful that the first page of a run shows. `on_page`: named by the training page.
    """

    pattern: str
    producer: Producer
    section: str
    text: str
    when: str = ""
    overview: bool = False
    on_page: bool = False


def _page(pattern: str, producer: Producer, section: str, text: str, when: str = "", overview: bool = True) -> Metric:
    return Metric(pattern, producer, section, text, when, overview, on_page=True)


METRICS = (
    # progress
    _page("reward/{scope}/mean", "orch", "train", "Mean reward of the rollouts that ended well."),
    _page("seq_len/{scope}/mean", "orch", "train", "Tokens of a rollout, prompt and replies."),
    _page("is_truncated/{scope}/mean", "orch", "train", "Share of rollouts cut at the token limit."),
    _page("is_timeout/{scope}/mean", "orch", "train", "Share of rollouts stopped by a stage's deadline."),
    _page("num_turns/{scope}/mean", "orch", "train", "Turns of a rollout.", overview=False),
    _page("empty_rollouts/{scope}", "orch", "train", "Share of rollouts without a sampled token.", overview=False),
    _page(
        "errored_rollouts/{scope}", "orch", "train", "Share of rollouts with an error; above 5 % look into envs/*.log."
    ),
    Metric("cancelled_rollouts/{scope}", "orch", "train", "Share of rollouts given up before their end."),
    Metric("num_branches/{scope}/mean", "orch", "train", "Branches of a rollout's tree of messages."),
    _page("eval/{eval}/avg@{k}", "orch", "eval", "Mean reward over tasks and samples.", "evaluations"),
    _page(
        "eval/{eval}/pass@{k}", "orch", "eval", "Chance that one of k samples has full marks (unbiased).", "evaluations"
    ),
    Metric(
        "eval/{eval}/pass^{k}",
        "orch",
        "eval",
        "Chance that all of k samples have full marks (unbiased).",
        "evaluations",
    ),
    Metric("eval/{eval}/reward/mean", "orch", "eval", "Mean reward.", "evaluations"),
    Metric(
        "eval/{eval}/reward/ci95_low", "orch", "eval", "Lower end of the 95 % interval.", "evaluations of two tasks"
    ),
    Metric(
        "eval/{eval}/reward/ci95_high", "orch", "eval", "Upper end of the 95 % interval.", "evaluations of two tasks"
    ),
    Metric("eval/{eval}/num_episodes", "orch", "eval", "Episodes that were scored.", "evaluations"),
    Metric("eval/{eval}/num_planned", "orch", "eval", "Episodes that were to run.", "evaluations"),
    Metric("eval/{eval}/is_truncated/mean", "orch", "eval", "Share cut at the token limit.", "evaluations"),
    Metric("eval/{eval}/is_timeout/mean", "orch", "eval", "Share stopped by a deadline.", "evaluations"),
    Metric("eval/{eval}/has_error/mean", "orch", "eval", "Share with an error.", "evaluations"),
    Metric("eval/{eval}/num_output_tokens/mean", "orch", "eval", "Sampled tokens of an episode.", "evaluations"),
    Metric("eval/{eval}/policy_version", "orch", "eval", "The version that was evaluated.", "evaluations"),
    Metric("eval/{eval}/time", "orch", "eval", "Seconds that the evaluation took.", "evaluations"),
    Metric("eval/{eval}/metrics/{name}", "orch", "eval", "A metric of the taskset.", "a taskset with metrics"),
    # every rollout metric per subset, statistic and environment
    Metric("train/{agg}/{subset}/num_total_tokens/{stat}", "orch", "train", "Tokens of a rollout."),
    Metric("train/{agg}/{subset}/num_input_tokens/{stat}", "orch", "train", "Tokens that were not sampled."),
    Metric("train/{agg}/{subset}/num_output_tokens/{stat}", "orch", "train", "Sampled tokens, summed over branches."),
    Metric("train/{agg}/{subset}/num_turns/{stat}", "orch", "train", "Turns."),
    Metric("train/{agg}/{subset}/num_branches/{stat}", "orch", "train", "Branches."),
    Metric("train/{agg}/{subset}/{agent}/reward/{stat}", "orch", "train", "Reward by role."),
    Metric("train/{agg}/{subset}/{agent}/rewards/{name}/{stat}", "orch", "train", "A part of the reward, unweighted."),
    Metric(
        "train/{agg}/{subset}/{agent}/metrics/{name}/{stat}",
        "orch",
        "train",
        "A metric of the taskset.",
        "a taskset with metrics",
    ),
    Metric("train/{agg}/all/{agent}/timing/{name}/{stat}", "orch", "performance", "Seconds of a stage of a rollout."),
    Metric("train/{agg}/{subset}/{agent}/is_truncated/mean", "orch", "train", "Share cut at the token limit."),
    Metric("train/{agg}/{subset}/{agent}/is_completed/mean", "orch", "train", "Share that came to its end."),
    Metric("train/{agg}/{subset}/{agent}/is_timeout/mean", "orch", "train", "Share stopped by a deadline."),
    Metric("train/{agg}/{subset}/{agent}/has_error/mean", "orch", "train", "Share with an error."),
    Metric("train/{agg}/{subset}/{agent}/is_trainable/mean", "orch", "train", "Share with a training signal."),
    Metric("train/{agg}/{subset}/{agent}/is_admitted/mean", "orch", "train", "Share that the gates let through."),
    Metric("train/{agg}/{subset}/{agent}/stop_condition/{name}/mean", "orch", "train", "Share that ended so."),
    Metric("train/{agg}/all/{agent}/error/{name}/mean", "orch", "train", "Share with this error.", "errors"),
    Metric("train/{agg}/all/solved_none", "orch", "train", "Share of groups in which nobody has full marks."),
    Metric("train/{agg}/all/solved_some", "orch", "train", "Share of groups in which some have full marks."),
    Metric("train/{agg}/all/solved_all", "orch", "train", "Share of groups in which all have full marks."),
    Metric("progress/{name}", "orch", "train", "Tokens, rollouts and tasks trained on: of the step, and total_*."),
    Metric("batch/{env}", "orch", "train", "Share of the environment in the batch."),
    Metric("batch/trainable", "orch", "train", "Traces of the batch."),
    Metric("batch/samples", "orch", "train", "Samples (branches) of the batch."),
    Metric("batch/rollouts", "orch", "train", "Rollouts accounted for since the last batch."),
    Metric("window/useful", "orch", "train", "Traces that went to the queue since the last batch."),
    Metric("curriculum/{env}/admission_rate", "orch", "train", "Share of groups that the gates let through."),
    Metric("curriculum/{env}/sampler/{name}", "orch", "train", "Epoch, or shares of the difficulty pools."),
    Metric("curriculum/{env}/gate/{name}/rejected", "orch", "train", "Groups that a gate refused.", "gates"),
    # staleness and stability
    _page("off_policy/mean", "orch", "stability", "Versions between a rollout's start and the step it trains in."),
    _page("off_policy/max", "orch", "stability", "The largest such number in the batch."),
    _page(
        "off_policy/in_flight/mean",
        "orch",
        "stability",
        "Its part until the group of the rollout was complete.",
        overview=False,
    ),
    _page(
        "off_policy/in_flight/max",
        "orch",
        "stability",
        "Its part until the group of the rollout was complete.",
        overview=False,
    ),
    _page("off_policy/in_queue/mean", "orch", "stability", "Its part that passed in the queue.", overview=False),
    _page("off_policy/in_queue/max", "orch", "stability", "Its part that passed in the queue.", overview=False),
    _page("off_policy/dropped", "orch", "stability", "Queued traces that became too old.", overview=False),
    _page(
        "mismatch_kl/{scope}/mean",
        "trainer",
        "stability",
        "KL of trainer and sampler: growing means off-policy collapse.",
    ),
    _page("mismatch_kl/{scope}/std", "trainer", "stability", "Its spread over tokens.", overview=False),
    _page("mismatch_kl/{scope}/max", "trainer", "stability", "Its largest value.", overview=False),
    _page("entropy/{scope}/mean", "trainer", "stability", "Entropy of the policy's distribution in nats per token."),
    _page(
        "is_masked/mean", "trainer", "stability", "Share of tokens that the trust region of IPO masks.", "an rl loss"
    ),
    Metric("mismatch_kl/{scope}/{token_stat}", "trainer", "stability", "The same over tokens."),
    Metric("entropy/{scope}/{token_stat}", "trainer", "stability", "The same over tokens."),
    Metric("ref_kl/{scope}/{token_stat}", "trainer", "stability", "KL to the reference.", "opd, opsd"),
    Metric("nll/{scope}/{token_stat}", "trainer", "stability", "Cross-entropy of ce tokens.", "echo, sft"),
    Metric("is_masked/{token_stat}", "trainer", "stability", "Tokens that the loss masks.", "an rl loss"),
    Metric("is_clamped/{token_stat}", "trainer", "stability", "Tokens with a capped ratio.", "an rl loss"),
    Metric("masked_mismatch_kl/{token_stat}", "trainer", "stability", "mismatch_kl of those.", "masked tokens"),
    Metric("unmasked_mismatch_kl/{token_stat}", "trainer", "stability", "mismatch_kl of the others.", "an rl loss"),
    Metric("kl_ent_ratio/mean", "trainer", "stability", "mismatch_kl over entropy."),
    _page(
        "optim/grad_norm", "trainer", "stability", "Norm of the gradient before clipping; spikes precede divergence."
    ),
    Metric("optim/lr", "trainer", "stability", "Learning rate."),
    Metric(
        "loss/mean", "trainer", "stability", "Loss: rl, ce and ref_kl, each over its own token count.", overview=True
    ),
    Metric("loss/{name}", "trainer", "stability", "One component of the loss."),
    # performance
    _page(
        "time/wait_for_batch", "trainer", "performance", "Seconds the trainer waited: high, the orchestrator is slow."
    ),
    _page("time/wait_for_policy", "orch", "performance", "Seconds the orchestrator waited: high, the trainer is slow."),
    Metric("time/step", "orch", "performance", "Seconds of a step of the orchestrator.", overview=True),
    Metric("time/step", "trainer", "performance", "Seconds of a step of the trainer.", overview=True),
    Metric("time/pack", "orch", "performance", "Seconds of packing the batch."),
    Metric("time/eval", "orch", "performance", "Seconds of evaluations."),
    Metric("time/save_ckpt", "orch", "performance", "Seconds of writing the orchestrator's half of a checkpoint."),
    Metric("time/load_data", "trainer", "performance", "Seconds of turning the batch into tensors."),
    Metric("time/forward_backward", "trainer", "performance", "Seconds of forward and backward."),
    Metric("time/optimizer", "trainer", "performance", "Seconds of the optimizer."),
    Metric("time/broadcast_weights", "trainer", "performance", "Seconds until the new weights were accepted."),
    Metric("time/save_ckpt", "trainer", "performance", "Seconds of writing a checkpoint.", "checkpoints"),
    Metric("system/ckpt_disk_free_gib", "trainer", "performance", "Room on the checkpoints' disk.", "checkpoints"),
    Metric("system/ckpt_disk_used_gib", "trainer", "performance", "What lies on it.", "checkpoints"),
    Metric("system/ckpt_disk_total_gib", "trainer", "performance", "Its size.", "checkpoints"),
    Metric("system/ckpt_disk_free_ratio", "trainer", "performance", "Its free share.", "checkpoints"),
    Metric("perf/throughput", "trainer", "performance", "Tokens per second.", overview=True),
    Metric("perf/throughput_per_gpu", "trainer", "performance", "Tokens per second and rank."),
    Metric("perf/mfu", "trainer", "performance", "Model FLOPs utilisation, %.", "a GPU with a known peak"),
    Metric("perf/peak_memory", "trainer", "performance", "Peak memory in GiB."),
    Metric("dispatcher/started/{train}", "orch", "performance", "Episodes started."),
    Metric("dispatcher/finished/{train}", "orch", "performance", "Episodes that ended well."),
    Metric("dispatcher/errored/{train}", "orch", "performance", "Episodes that failed."),
    Metric("dispatcher/cancelled/{train}", "orch", "performance", "Episodes given up."),
    Metric("dispatcher/errored/eval", "orch", "performance", "Episodes of evaluations that failed."),
    Metric("dispatcher/cancelled/eval", "orch", "performance", "Episodes of evaluations given up."),
    Metric("dispatcher/cancelled/reason/stale", "orch", "performance", "Given up as too old."),
    Metric("dispatcher/cancelled/reason/overload", "orch", "performance", "Given up to relieve the engines."),
    Metric("dispatcher/cancelled/reason/superseded", "orch", "performance", "Given up at the end of the run."),
    Metric("dispatcher/inflight/train", "orch", "performance", "Episodes in flight."),
    Metric("dispatcher/off_policy/{name}", "orch", "performance", "Age of what is in flight.", "asynchronous mode"),
    Metric("queue/traces", "orch", "performance", "Traces waiting for a batch."),
    Metric("queue/tokens", "orch", "performance", "Tokens waiting for a batch."),
    Metric("watcher/version", "orch", "performance", "The version that the engines serve."),
    Metric("watcher/receive_seconds", "orch", "performance", "From the trainer's offer to the last byte."),
    Metric("watcher/update_seconds", "orch", "performance", "From there until the engines serve it."),
    Metric("concurrency/max_inflight", "orch", "performance", "Episodes that may be in flight."),
    Metric("concurrency/capacity", "orch", "performance", "The controller's bound before rounding."),
    Metric("concurrency/turnover", "orch", "performance", "How often the episodes in flight have been replaced."),
    Metric("concurrency/signal", "orch", "performance", "0: engines have room, 1: nearly full, 2: overloaded."),
    Metric("event_loop_lag/{stat}", "orch", "performance", "Seconds by which the orchestrator's event loop was late."),
    Metric(
        "inference/{name}/num_requests_running/{stat}",
        "orch",
        "inference",
        "Requests being generated.",
        "engine metrics",
    ),
    Metric("inference/{name}/num_requests_waiting/{stat}", "orch", "inference", "Requests waiting.", "engine metrics"),
    Metric(
        "inference/{name}/kv_cache_usage/{stat}", "orch", "inference", "Share of the KV cache in use.", "engine metrics"
    ),
    Metric(
        "inference/{name}/generation_tokens/rate", "orch", "inference", "Tokens generated per second.", "engine metrics"
    ),
    Metric("inference/{name}/prompt_tokens/rate", "orch", "inference", "Prompt tokens per second.", "engine metrics"),
    Metric("inference/{name}/requests/rate", "orch", "inference", "Requests ended per second.", "engine metrics"),
    Metric("inference/{name}/preemptions/rate", "orch", "inference", "Preemptions per second.", "engine metrics"),
    Metric(
        "inference/{name}/{latency}/{quantile}",
        "orch",
        "inference",
        "Seconds of a stage of a request.",
        "an engine with histograms (vLLM)",
    ),
)
LATENCIES = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time")
QUANTILES = ("mean", "p50", "p90", "p99")


def expand(
    metric: Metric,
    envs: Iterable[str],
    eval_envs: Iterable[str] = (),
    agents: Iterable[str] = ("agent",),
    ks: Iterable[int] = (1,),
) -> list[str]:
    """The names that a pattern stands for in a run with these environments; none where `{name}` is left to others."""
    envs = list(envs)
    values = {
        "scope": ["all", *envs], "agg": ["agg", *envs], "train": ["train", *envs], "env": envs, "eval": [*eval_envs],
        "subset": SUBSETS, "stat": STATS, "token_stat": TOKEN_STATS, "agent": [*agents], "k": [str(k) for k in ks],
        "latency": LATENCIES, "quantile": QUANTILES, "name": [],
    }  # fmt: skip
    fields = _fields(metric.pattern)
    return [
        metric.pattern.format(**dict(zip(fields, chosen, strict=True)))
        for chosen in product(*(values[f] for f in fields))
    ]


def find(name: str, producer: Producer | None = None) -> Metric | None:
    """The entry that a logged name belongs to: the most literal one. Environment names have no slash."""
    for metric in sorted(METRICS, key=lambda metric: len(_fields(metric.pattern))):
        if producer in (None, metric.producer) and _regex(metric.pattern).fullmatch(name):
            return metric
    return None


def _fields(pattern: str) -> list[str]:
    return re.findall(r"{(\w+)}", pattern)


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    classes = {"name": ".+", "k": r"\d+", "subset": "all|effective", "stat": "|".join(STATS)} | {
        "token_stat": "|".join(TOKEN_STATS)
    }
    classes |= {"latency": "|".join(LATENCIES), "quantile": "|".join(QUANTILES)}
    parts = re.split(r"{(\w+)}", pattern)
    return re.compile(
        "".join(re.escape(p) if i % 2 == 0 else f"(?:{classes.get(p, '[^/]+')})" for i, p in enumerate(parts))
    )
