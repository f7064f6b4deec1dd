"""Every validator has a case here that it must refuse, with the line that the user reads."""
# ruff: noqa: E501 - tables of cases, one a line

import pytest
from config_samples import CPU, SOURCE, parsed, raw, source

from rlmake.config import unbuilt
from rlmake.config.orchestrator import OrchestratorConfig
from rlmake.config.rl_checks import rl_faults
from rlmake.config.trainer import LoRAConfig
from rlmake.core.errors import ConfigError

FROZEN = {"name": "teacher", "base_url": "http://localhost:8001/v1"}
GPUS = {"gpus_per_node": 8, "num_train_gpus": 2, "num_infer_gpus": 0}


RL = [
    # deployment
    ({"inference": ..., "deployment": {**CPU, "num_infer_gpus": 1}}, "inference: is needed with deployment.num_infer_gpus = 1"),
    ({"deployment": {**GPUS, "gpus_per_node": 1}}, "deployment.gpus_per_node: 2 GPUs for trainer and inference exceed 1"),
    ({"deployment": {**CPU, "num_train_gpus": -1}}, "deployment.num_train_gpus: must be ≥ 0, not -1"),
    ({"deployment__typ": "x"}, "deployment.typ: unknown key; did you mean 'type'?"),
    ({"trainer": {"device": "cuda"}}, "trainer.device: 'cuda' contradicts (deployment.num_train_gpus) device = 'cpu'"),
    ({"deployment": {**CPU, "cpu_threads": 1}, "trainer": {"cpu_threads": 2}}, "trainer.cpu_threads: 2 contradicts"),
    ({"deployment": {**CPU, "num_train_ranks": 1000}}, "deployment.num_train_ranks: must be ≤ 256, not 1000"),
    # bounds
    ({"max_steps": 1e26}, "max_steps: expected an integer, not 1e+26"),
    ({"max_steps": 10**26}, "max_steps: must be ≤ 9223372036854775807, not 100000000000000000000000000"),
    ({"seq_len": 99999999999}, "seq_len: must be ≤ 2147483647, not 99999999999"),
    ({"inference": {"vllm": {"max_model_len": 5}}, "orchestrator__train": {"source": [source()], "sampling": {"max_completion_tokens": 20}}},
     "inference.vllm.max_model_len: 5 leaves no token for a prompt beside max_completion_tokens = 20"),
    # shared keys
    ({"trainer": {"max_steps": 3}}, "trainer.max_steps: 3 contradicts max_steps = 20; give it once, at the root"),
    ({"inference": {"vllm": {"model": "b"}}}, "inference.vllm.model: 'b' contradicts model.name = 'outputs/a/sft/weights'"),
    ({"trainer": {"ckpt": None}}, "trainer.ckpt: None contradicts ckpt = a table"),
    ({"seed": 1, "orchestrator__seed": 2}, "orchestrator.seed: 2 contradicts seed = 1"),
    ({"trainer": {"seed": 1}, "orchestrator__seed": 2}, "orchestrator.seed: 2 contradicts seed = 1"),
    ({"deterministic": False, "trainer": {"deterministic": True}}, "trainer.deterministic: True contradicts"),
    ({"weight_broadcast": {"type": "filesystem"}, "trainer": {"weight_broadcast": {"timeout": 5}},
      "inference": {"weight_broadcast": {"type": "filesytem"}}}, "inference.weight_broadcast.type: 'filesytem' contradicts"),
    # consistency of components set one by one
    ({"max_steps": ..., "trainer": {"max_steps": 3}}, "orchestrator.max_steps: None contradicts trainer.max_steps = 3"),
    ({"ckpt": ..., "trainer": {"ckpt": {}}}, "orchestrator.ckpt: is needed too"),
    ({"ckpt": ..., "orchestrator__ckpt": {}}, "trainer.ckpt: is needed too"),
    ({"ckpt": ..., "trainer": {"ckpt": {"interval": 2}}, "orchestrator__ckpt": {"interval": 3}},
     "orchestrator.ckpt.interval: 3 contradicts trainer.ckpt.interval = 2"),
    ({"trainer": {"resume": {}}}, "orchestrator.resume: is needed too"),
    ({"trainer": {"resume": {"step": 2}}, "orchestrator__resume": {"step": 3}}, "orchestrator.resume.step: 3 contradicts"),
    ({"trainer": {"model": {"seq_len": 1024}}}, "trainer.model.seq_len: 1024 is below orchestrator.seq_len = 2048"),
    ({"model": ..., "trainer": {"model": {"name": "a"}}}, "orchestrator.model.name: 'Qwen/Qwen3-0.6B' contradicts"),
    ({"trainer": {"tokenizer": {"chat_template": "x"}}}, "orchestrator.tokenizer.chat_template: None contradicts"),
    ({"tokenizer": {"chat_template": "x"}, "inference": {"vllm": {"chat_template": "y"}}},
     "inference.vllm.chat_template: 'y' contradicts tokenizer.chat_template = 'x'"),
    ({"run": {"name": "a"}, "trainer": {"run": {"name": "b"}}}, "trainer.run.name: 'b' contradicts run.name = 'a'"),
    # transport
    ({"trainer": {"rollout_transport": {"type": "zmq"}}}, "orchestrator.rollout_transport.type: 'filesystem' contradicts"),
    ({"trainer": {"rollout_transport": {"type": "zmq", "port": 6000}}, "orchestrator__rollout_transport": {"type": "zmq", "port": 7000}},
     "orchestrator.rollout_transport.port: 7000 contradicts trainer.rollout_transport.port = 6000"),
    ({"trainer": {"rollout_transport": {"type": "zmq"}}, "orchestrator__rollout_transport": {"type": "zmq", "host": "h"}},
     "orchestrator.rollout_transport.host: 'h' contradicts trainer.rollout_transport.host = 'localhost'"),
    ({"orchestrator__model": {"lora": {"name": "zzz"}}}, "orchestrator.model.lora: needs trainer.model.lora"),
    ({"orchestrator__model": {"lora": {"name": "zzz"}}, "trainer": {"model": {"lora": {}}}},
     "orchestrator.model.lora.name: 'zzz' contradicts trainer.model.lora = 'r16-a32'"),
    ({"inference": {"server": {"port": 8000}}, "orchestrator__model": {"client": {"base_url": "http://localhost:8001/v1"}}},
     "orchestrator.model.client.base_url: port 8001 contradicts inference.server.port = 8000"),
    # batches, groups, concurrency
    ({"orchestrator__batch_size": 12}, "orchestrator.batch_size: 12 is not a multiple of group_size = 8"),
    ({"orchestrator__train__source": [source(group_size=7)]}, "orchestrator.batch_size: 128 is not a multiple of group_size = 7"),
    ({"orchestrator__batch_size": 8, "orchestrator__token_batch_size": 99}, "orchestrator.batch_size: give either"),
    ({"orchestrator__concurrency": {"max_inflight": 4}}, "orchestrator.concurrency.max_inflight: 4 is below the largest group_size = 8"),
    ({"orchestrator__concurrency": {"initial_inflight": 4}}, "orchestrator.concurrency.initial_inflight: 4 is below"),
    ({"orchestrator__concurrency": {"min_inflight": 9, "max_inflight": 8}}, "orchestrator.concurrency.min_inflight: must be ≤ max_inflight = 8, not 9"),
    ({"orchestrator__concurrency": {"initial_inflight": 9, "max_inflight": 8}}, "orchestrator.concurrency.initial_inflight: must be ≤"),
    ({"orchestrator__max_off_policy_steps": -1}, "orchestrator.max_off_policy_steps: must be ≥ 0, not -1"),
    ({"orchestrator__lag": 9}, "orchestrator.lag: 9 is beyond max_off_policy_steps = 8: every rollout would be too old to train"),
    # sources
    *(({"orchestrator__train__source": [source(serve={"address": address})]},
       f"orchestrator.train.source.0.serve.address: expected an address like tcp://node7:5005, not '{address}'")
      for address in ("node7:5005", "tcp://node7", "tcp://:5005", "tcp://*:5005", "tcp://node7:99999", "ipc://", "")),
    ({"orchestrator__train__source": []}, "orchestrator.train.source: needs at least one source"),
    ({"orchestrator__train__source": [{"name": "x", "env": {}}]}, "orchestrator.train.source.0.env.taskset.id: is needed"),
    ({"orchestrator__train__source": [{"name": "x"}]}, "orchestrator.train.source.0.env: is needed"),
    ({"orchestrator__train__source": [source(), source()]}, "orchestrator.train.source.1.name: 'reverse-text' is also the name of source 0"),
    ({"orchestrator__train__source": [source(name="all")]}, "orchestrator.train.source.0.name: 'all' is reserved"),
    ({"orchestrator__train__source": [source(name="agg")]}, "orchestrator.train.source.0.name: 'agg' is reserved"),
    ({"orchestrator__train__source": [source(name="../x")]}, "orchestrator.train.source.0.name: '../x' is no safe name"),
    ({"orchestrator__train__source": [source(ratio=0)]}, "orchestrator.train.source.0.ratio: must be > 0, not 0"),
    ({"orchestrator__train__source": [source(rato=1)]}, "orchestrator.train.source.0.rato: unknown key; did you mean 'ratio'?"),
    ({"orchestrator__eval": {}}, "orchestrator.eval.source: needs at least one source"),
    ({"orchestrator__eval": {"source": [source(), source()]}}, "orchestrator.eval.source.1.name: 'reverse-text' is also"),
    ({"orchestrator__train__source": [source(algo={"loss_aggregation": "prompt"}), source(name="b")]},
     "orchestrator.train.source: all sources must share algo.loss_aggregation"),
    ({"orchestrator__train__source": [source(algo={"loss_aggregation": "prompt"}), source(name="b", algo={"type": "rae"})]},
     "orchestrator.train.source: all sources must share algo.loss_aggregation"),
    # renderer
    ({"orchestrator__renderer": ...}, "orchestrator.renderer.name: 'auto' knows hub ids only, not 'outputs/a/sft/weights'"),
    ({"orchestrator__renderer": {"name": "qwen"}}, "orchestrator.renderer.name: expected a renderer's name, not 'qwen'; did you mean 'qwen3'?"),
    ({"orchestrator__renderer": {"name": "custom"}}, "orchestrator.renderer.import_path: is needed"),
    ({"orchestrator__renderer": {"name": "qwen3", "import_path": "a.b"}}, "orchestrator.renderer.import_path: is needed with name 'custom', and only"),
    ({"orchestrator__renderer": {"enable_thinking": False}}, "orchestrator.renderer.name: 'auto' takes no options"),
    # algorithms and sampling
    ({"orchestrator__train__algo": {"type": "grp"}}, "orchestrator.train.algo: type: expected"),
    ({"orchestrator__train__algo": {"type": "sft"}}, "orchestrator.train.algo.sampling.source: 'sft' needs a frozen model"),
    ({"orchestrator__train__algo": {"sampling": {"source": FROZEN}}}, "orchestrator.train.algo.sampling.source: 'grpo' must sample from the live policy"),
    ({"orchestrator__train__algo": {"type": "opd", "teacher": FROZEN, "sampling": {"source": FROZEN}}},
     "orchestrator.train.algo.sampling.source: 'opd' must sample from the live policy"),
    *(({"orchestrator__train__algo": {**algo, "sampling": {"source": FROZEN}}},
       f"orchestrator.train.algo.sampling.source: '{algo['type']}' must sample from the live policy")
      for algo in ({"type": "max_rl"}, {"type": "rae"}, {"type": "echo"}, {"type": "opsd"},
                   {"type": "hierarchical_grpo", "episode_agents": ["solver"]})),
    ({"orchestrator__train__algo": {"type": "opd"}}, "orchestrator.train.algo.teacher: is needed"),
    ({"orchestrator__train__algo": {"type": "rae", "decay": 1.0}}, "orchestrator.train.algo.decay: must be < 1, not 1.0"),
    ({"orchestrator__train__algo": {"type": "hierarchical_grpo", "episode_agents": []}}, "orchestrator.train.algo.episode_agents: needs at least 1"),
    ({"orchestrator__train__algo": {"type": "echo", "roles": {"tool": {"alpha": 0}}}}, "orchestrator.train.algo.roles.tool.alpha: must be > 0"),
    ({"orchestrator__train__algo": {"type": "echo", "roles": {"tol": {"alpha": 1}}}},
     "orchestrator.train.algo.roles.tol: expected 'system', 'user', 'assistant', 'tool', not 'tol'; did you mean 'tool'?"),
    ({"orchestrator__train__algo": {"type": "opsd", "template": "{demo}"}}, "orchestrator.train.algo.template: has no place for the demonstration"),
    ({"orchestrator__train__sampling": {"temperature": 0}}, "orchestrator.train.sampling.temperature: must be > 0, not 0"),
    ({"trainer": {"loss": {"type": "custom"}}}, "trainer.loss.import_path: is needed"),
    ({"trainer": {"loss": {"type": "icepop", "ratio_low": 6}}}, "trainer.loss.ratio_low: must be below ratio_high = 5.0"),
    ({"trainer": {"loss": {"type": "ipoo"}}}, "trainer.loss: type: expected"),
    # resume, schedule, model
    ({"resume": {"step": 1, "dir": "a/step_1"}}, "resume.step: give either step or dir, not both"),
    ({"resume": {"dir": "outputs/a/checkpoints"}}, "resume.dir: must end in step_<n>"),
    ({"resume": {"step": 0}}, "resume.step: must be ≥ 1, not 0"),
    ({"trainer": {"scheduler": {"type": "linear", "warmup_steps": 0, "decay_steps": 0}}}, "trainer.scheduler: linear needs"),
    ({"max_steps": ..., "trainer": {"scheduler": {"type": "linear"}}}, "trainer.scheduler.decay_steps: a decay needs max_steps"),
    ({"max_steps": 19, "trainer": {"scheduler": {"type": "linear"}}}, "trainer.scheduler: warmup_steps + decay_steps = 20 exceeds max_steps = 19"),
    ({"max_steps": ..., "trainer": {"scheduler": {"type": "cosine"}}}, "trainer.scheduler: cosine needs max_steps"),
    ({"max_steps": 10, "trainer": {"scheduler": {"type": "cosine"}}}, "trainer.scheduler.warmup_steps: must be below max_steps = 10"),
    ({"trainer": {"model": {"optimization_dtype": "fp32"}}}, "trainer.model.optimization_dtype: expected 'float32' or 'bfloat16', not 'fp32'"),
    ({"trainer": {"optim": {"lr": "fast"}}}, "trainer.optim.lr: expected a number, not 'fast'"),
    ({"trainer": {"optim": {"weight_decay": "x"}}}, "trainer.optim.weight_decay: expected a number or 'auto', not 'x'"),
    ({"trainer": {"optim": {"lr": float("nan")}}}, "trainer.optim.lr: must be"),
    ({"trainer": {"optim": "adamw"}}, "trainer.optim: expected a table, not 'adamw'"),
    ({"trainer": "t.toml"}, "trainer: expected a table, not 't.toml'"),
    ({"orchestrator": []}, "orchestrator: expected a table, not []"),
    # names and variables
    ({"run": {"name": "a b"}}, "run.name: 'a b' is no safe name"),
    ({"run": {"name": "-x"}}, "run.name: '-x' is no safe name"),
    ({"run": {"name": "a\nb"}}, r"run.name: 'a\nb' is no safe name"),
    ({"run": {"dir": "../x"}}, "run.dir: '..' is no safe name"),
    ({"env_vars": {"PRL_RUN_ID": "x"}}, "env_vars.PRL_RUN_ID: is set by the launcher"),
    ({"trainer": {"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}}, "trainer.env_vars.CUDA_VISIBLE_DEVICES: is set by the launcher"),
    ({"log": {"level": "loud"}}, "log.level: expected"),
]  # fmt: skip

MORE_NODES = {"type": "multi_node", "num_train_nodes": 1}
EVAL = {"inference": {}, "eval": {"source": [SOURCE]}}
SFT = [
    # ranks and engines
    ({"deployment": {**GPUS, "num_train_gpus": 3}, "model__cp": 2}, "model.cp: 2 does not divide the trainer's 3 ranks"),
    ({"deployment": {**GPUS, "num_train_gpus": 3}, "model__dp_replicate": 2}, "model.dp_replicate: 2 does not divide the trainer's 3 ranks"),
    ({"deployment": {**GPUS, "num_train_gpus": 4}, "model__dp_replicate": 2, "model__cp": 4}, "model.cp: 4 does not divide the trainer's 2 ranks of a copy"),
    ({"deployment": {**CPU, "num_train_ranks": 2}, "model__cp": 2}, "model.attn: 'exact' knows no model.cp above 1"),
    ({**EVAL, "deployment": {"num_infer_gpus": 3}, "inference": {"vllm": {"tensor_parallel_size": 2}}},
     "deployment.num_infer_gpus: 3 is not a multiple of inference.vllm.tensor_parallel_size = 2"),
    # evaluations
    ({"eval": {"source": [SOURCE]}}, "eval: needs [inference]"),
    ({"eval": {"source": [SOURCE]}, "slurm": {}, "deployment": MORE_NODES}, "eval: needs [inference]"),
    ({**EVAL, "eval": {}}, "eval.source: needs at least one source"),
    ({**EVAL, "eval": {"source": [source(name="all")]}}, "eval.source.0.name: 'all' is reserved"),
    ({**EVAL, "eval": {"source": [SOURCE, SOURCE]}}, "eval.source.1.name: 'reverse-text' is also the name of source 0"),
    ({**EVAL, "inference": {"deployment": {"type": "multi_node"}, "slurm": {}}}, "inference.deployment.type: belongs to the root's [deployment]"),
    ({**EVAL, "weight_broadcast": {"type": "nccl"}, "model__lora": {}}, "weight_broadcast.type: 'nccl' does not work with model.lora"),
    ({**EVAL, "deployment": {"num_infer_gpus": 2}, "inference": {"vllm": {"enable_eplb": True}}}, "inference.vllm.enable_eplb: moves experts"),
    # data, model, renderer, schedule
    ({"data": {"name": "x", "batch_size": 30, "micro_batch_size": 4}}, "data.batch_size: 30 is not a multiple of ranks × micro_batch_size = 4"),
    ({"deployment": {**CPU, "num_train_ranks": 3}}, "data.batch_size: 64 is not a multiple of ranks × micro_batch_size = 3"),
    ({"renderer": ...}, "renderer.name: 'auto' knows hub ids only, not 'outputs/a/model/weights': name the renderer"),
    ({"renderer": {"name": "default"}}, "renderer.name: 'default' cannot tell which tokens to train"),
    ({"device": "cuda"}, "device: 'cuda' contradicts (deployment.num_train_gpus) device = 'cpu'"),
    ({"model__seq_len": 64}, "model.seq_len: 64 contradicts data.seq_len = 128"),
    ({"deployment": {"num_train_gpus": 9}}, "deployment.gpus_per_node: 9 GPUs are asked for, the host has 8"),
    ({"data__subsets": ["a"], "data__splits": ["a", "b"]}, "data.splits: has 2 entries, subsets 1"),
    ({"data__subsets": ["a", "b"], "data__probabilities": [1]}, "data.probabilities: has 1 entries for 2 mixed parts"),
    ({"data__loss_mask": {"assistant": False}}, "data.loss_mask: no role trains"),
    ({"data__seq_len": 1}, "data.seq_len: must be ≥ 2, not 1"),
    ({"data": "train.jsonl"}, "data: expected a table, not 'train.jsonl'"),
    ({"scheduler": {"type": "linear", "warmup_steps": 30}}, "scheduler: warmup_steps + decay_steps = 40 exceeds max_steps = 20"),
    ({"data__columns": {"message": "x"}}, "data.columns.message: unknown key; did you mean 'messages'?"),
]  # fmt: skip

OTHERS = [
    ("TrainerConfig", {"device": "cpu", "model": {"attn": "flash_attention_2"}}, "model.attn: flash_attention_2 needs a GPU"),
    ("TrainerConfig", {"model": {"fsdp_cpu_offload": True, "optim_cpu_offload": True}}, "model.optim_cpu_offload: excludes fsdp_cpu_offload"),
    ("TrainerConfig", {"optim": {"type": "muon"}, "model": {"fsdp_cpu_offload": True}}, "model.fsdp_cpu_offload: does not work with muon"),
    ("TrainerConfig", {"model": {"ac_offloading": {"max_inflight_activations": 0}}}, "model.ac_offloading.max_inflight_activations: must be ≥ 1, not 0"),
    ("TrainerConfig", {"model": {"ac_offloading": {"max_inflight": 2}}}, "model.ac_offloading.max_inflight: unknown key; did you mean 'max_inflight_activations'?"),
    ("TrainerConfig", {"trace_path": "t", "max_steps": 10}, "trace_path: needs max_steps below 10"),
    ("TrainerConfig", {"device": "cpu", "model": {"cp": 2}}, "model.attn: 'exact' knows no model.cp above 1"),
    ("TrainerConfig", {"model": {"cp": 2, "attn": "exact"}}, "model.attn: 'exact' knows no model.cp above 1"),
    ("OrchestratorConfig", {"train": {"group_size": 3, "source": [SOURCE]}}, "batch_size: 128 is not a multiple of group_size = 3"),
    ("InferenceConfig", {"engine": "vllm", "deterministic": True}, "deterministic: the vllm engine does not promise equal bytes"),
    ("InferenceConfig", {"vllm": {"tensor_parallel_size": 2}}, "vllm.tensor_parallel_size: counts for the vllm engine only"),
    ("InferenceConfig", {"engine": "vlm"}, "engine: expected 'auto', 'vllm', 'transformers', not 'vlm'; did you mean 'vllm'?"),
    ("EvalConfig", {"inference": {"vllm": {"max_model_len": 20}}, "sampling": {"max_completion_tokens": 20}},
     "inference.vllm.max_model_len: 20 leaves no token for a prompt beside max_completion_tokens = 20"),
    ("EvalConfig", {"model": {"name": "x"}, "inference": {}}, "model: expected text"),
    ("EvalConfig", {"resume": {"step": 1, "dir": "a/step_1"}}, "resume.step: give either step or dir, not both"),
    *(("EvalConfig", {"resume": {"dir": folder}}, f"resume.dir: must end in step_<n>, not '{folder}'")
      for folder in ("x", "x/step_", "x/step_abc", "x/step_0", "x/step_²", "step_1/x")),
    ("EvalConfig", {"inference": {"server": {"port": 8000}}, "client": {"base_url": "http://localhost:8001/v1"}},
     "client.base_url: port 8001 contradicts inference.server.port = 8000"),
    ("EvalConfig", {"deployment": {"num_infer_gpus": 3}, "inference": {"vllm": {"tensor_parallel_size": 2}}},
     "deployment.num_infer_gpus: 3 is not a multiple of inference.vllm.tensor_parallel_size = 2"),
    ("EvalConfig", {"deployment": {"num_infer_gpus": 4}, "inference": {"vllm": {"data_parallel_size": 2}}},
     "inference.vllm.data_parallel_size: 2 engines of 1 GPUs contradict deployment.num_infer_gpus = 4: 4"),
    ("InferenceConfig", {"device": "cuda", "vllm": {"enable_return_routed_experts": True}}, "vllm.arguments.enable_return_routed_experts: belongs to router replay"),
    ("InferenceConfig", {"server": {"port": 70000}}, "server.port: must be ≤ 65535, not 70000"),
    ("EvalConfig", {"source": []}, "source: needs at least one source"),
    ("EvalConfig", {"source": [SOURCE, SOURCE]}, "source.1.name: 'reverse-text' is also the name of source 0"),
    ("EvalConfig", {"deployment": {"num_infer_gpus": 9}}, "deployment.num_infer_gpus: must be ≤ gpus_per_node = 8"),
    ("EvalConfig", {"model": "a", "inference": {"vllm": {"model": "b"}}}, "inference.vllm.model: 'b' contradicts model = 'a'"),
    ("EvalConfig", {"sampling": {"top_p": 2}}, "sampling.top_p: must be ≤ 1, not 2"),
    ("EvalConfig", {"sampling": {"reasoning_effort": "hihg"}}, "did you mean 'high'?"),
    ("EnvServerConfig", {"env": {}}, "env.taskset.id: is needed"),
    ("EnvServerConfig", {"name": "a/b"}, "name: 'a/b' is no safe name"),
    ("EnvServerConfig", {"name": ...}, "name: is needed"),
    ("DataConfig", {"source": {"min_chars": 9, "max_chars": 8}}, "source.min_chars: must be ≤ max_chars = 8, not 9"),
    ("DataConfig", {"source": {"type": "file"}}, "source.paths: is needed"),
    ("DataConfig", {"source": {"type": "made", "task": "kuhn-poker", "num_heldout": 3}}, "source.num_heldout: must be 0 for kuhn-poker"),
    ("DataConfig", {"source": {"type": "file", "paths": {}}}, "source.paths: needs at least 1"),
    ("DataConfig", {"source": {"type": "file", "paths": {"../x": "a"}}}, "source.paths.../x: '../x' is no safe name"),
    ("DataConfig", {"source": {"type": "files"}}, "source: type: expected 'pydoc-phrases', 'file', 'made', 'reasoning-gym', not 'files'; did you mean 'file'?"),
    ("InitConfig", {"architecture": {"num_attention_heads": 3}}, "architecture.num_attention_heads: 3 is not a multiple"),
    ("InitConfig", {"architecture": {"head_dim": 31}}, "architecture.head_dim: must be even, not 31"),
    ("InitConfig", {"tokenizer": ...}, "tokenizer: is needed"),
    ("InitConfig", {"tokenizer": {"text": "x", "vocab_size": 100}}, "tokenizer.vocab_size: must be ≥ 265, not 100"),
    ("ImportConfig", {"source": {"type": "hub", "id": "a/b"}}, "source.revision: is needed"),
    ("ImportConfig", {"source": {"type": "hub", "id": "a/b", "revision": "main"}}, "source.revision: expected text like ^[0-9a-f]{40}$, not 'main'"),
    ("ImportConfig", {"source": ...}, "source: is needed"),
    ("ImportConfig", {"source": {"path": "x"}}, "source: type: is needed"),
]  # fmt: skip


def refused(monkeypatch, name: str, changes: dict, expected: str) -> None:
    monkeypatch.setattr(unbuilt, "faults", lambda *args, **kwargs: [])
    with pytest.raises(ConfigError) as error:
        parsed(name, **changes)
    lines = str(error.value).splitlines()
    assert any(line.startswith(expected) or expected in line for line in lines), lines
    assert all(len(line) < 300 for line in lines)


@pytest.mark.parametrize(("changes", "expected"), RL, ids=lambda value: value if isinstance(value, str) else "")
def test_rl(monkeypatch, changes, expected):
    refused(monkeypatch, "RLConfig", changes, expected)


@pytest.mark.parametrize(("changes", "expected"), SFT, ids=lambda value: value if isinstance(value, str) else "")
def test_sft(monkeypatch, changes, expected):
    refused(monkeypatch, "SFTConfig", changes, expected)


@pytest.mark.parametrize(
    ("name", "changes", "expected"), OTHERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_others(monkeypatch, name, changes, expected):
    refused(monkeypatch, name, changes, expected)


@pytest.mark.parametrize(
    "url",
    ["nonsense", "127.0.0.1:8000/v1", "ftp://host/v1", "http://", "http:///v1", "http://h:99999/v1", "http://h:x/v1"],
)
def test_what_is_no_url(monkeypatch, url):
    said = "expected a URL like http://127.0.0.1:8000/v1"
    refused(monkeypatch, "EvalConfig", {"client": {"base_url": url}}, f"client.base_url: {said}")
    teacher = {"type": "opd", "teacher": {"name": "a", "base_url": url}}
    refused(monkeypatch, "RLConfig", {"orchestrator__train__algo": teacher}, f"base_url: {said}")


def test_curriculum(monkeypatch):
    for curriculum, expected in (
        ({"sampler": {"type": "difficulty_pool", "pools": {}}}, "pools: needs at least one pool"),
        ({"sampler": {"type": "difficulty_pool", "pools": {"a": {"threshold": 1, "weight": 0}}}}, "a positive weight"),
        (
            {"sampler": {"type": "difficulty_pool", "pools": {k: {"threshold": 1, "weight": 1} for k in "ab"}}},
            "two pools have the same threshold",
        ),
        ({"gates": {"g": {"reject_min": 1}}}, "gates.g.reject_min: must be ≤ reject_max = 0.0, not 1.0"),
    ):
        sources = [source(curriculum=curriculum)]
        refused(monkeypatch, "RLConfig", {"orchestrator__train__source": sources}, expected)


@pytest.mark.parametrize(
    ("deployment", "changes", "expected"),
    [
        ({"type": "multi_node", "num_train_nodes": 3, "nodes_per_fsdp_group": 2}, {}, "nodes_per_fsdp_group: 2 does not divide"),
        ({"type": "multi_node", "num_train_nodes": 1}, {}, "deployment.type: multi_node needs [slurm]"),
        ({**MORE_NODES, "num_infer_nodes": 0}, {"inference": ...}, "num_infer_nodes: 0 needs [trainer.data.fake]"),
        ({**MORE_NODES, "num_infer_nodes": 0}, {"trainer": {"data": {"fake": {}}}}, "num_infer_nodes: 0 leaves no node for [inference]"),
        ({**MORE_NODES, "num_infer_replicas": 2}, {"inference": ...}, "inference: is needed: deployment.num_infer_replicas = 2"),
        ({**MORE_NODES, "orchestrator_on_inference": True}, {"inference": ...}, "deployment.orchestrator_on_inference: needs [inference]"),
        (MORE_NODES, {"inference": {"deployment": {"type": "multi_node"}, "slurm": {}}}, "inference.deployment.type: belongs to the root's"),
        (MORE_NODES, {"trainer": {"model": {"dp_replicate": 2}}}, "trainer.model.dp_replicate: 2 contradicts deployment.nodes_per_fsdp_group"),
        (MORE_NODES, {"trainer": {"model": {"cp": 3}}}, "trainer.model.cp: 3 does not divide the trainer's 8 ranks"),
        ({"num_train_gpus": 3, "num_infer_gpus": 0}, {"trainer": {"model": {"dp_replicate": 2}}}, "trainer.model.dp_replicate: 2 does not divide"),
        (CPU, {"inference": {"deployment": {"type": "multi_node"}, "slurm": {}}}, "inference.deployment.type: belongs to the root's"),
        (
            {"num_train_gpus": 1, "num_infer_gpus": 4},
            {"inference": {"vllm": {"tensor_parallel_size": 2, "data_parallel_size": 4}}},
            "inference.vllm.data_parallel_size: 4 engines of 2 GPUs contradict deployment.num_infer_gpus = 4: 2",
        ),
        (
            {"num_train_gpus": 1, "num_infer_gpus": 2},
            {"inference": {"vllm": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}},
            "2 is not a multiple of inference.vllm.tensor_parallel_size × pipeline_parallel_size = 4",
        ),
        (
            {"num_train_gpus": 1, "num_infer_gpus": 1},
            {"inference": {"vllm": {"enable_eplb": True}}, "weight_broadcast": {"type": "filesystem"}},
            "inference.vllm.enable_eplb: moves experts",
        ),
        ({"type": "multi_node", "num_train_nodes": 1, "num_infer_nodes": 1}, {"inference": ...}, "inference: is needed: deployment.num_infer"),
        ({"num_train_gpus": 1, "num_infer_gpus": 3}, {"inference": {"vllm": {"tensor_parallel_size": 2}}}, "3 is not a multiple of"),
        ({"num_train_gpus": 3, "num_infer_gpus": 0}, {"trainer": {"model": {"cp": 2}}}, "trainer.model.cp: 2 does not divide the trainer's 3"),
        (CPU, {"weight_broadcast": {"type": "nccl"}}, "weight_broadcast.type: 'nccl' needs a GPU on either side"),
        (
            {"num_train_gpus": 1, "num_infer_gpus": 0},
            {"inference": ..., "weight_broadcast": {"type": "nccl", "quantize_in_weight_transfer": True}},
            "weight_broadcast.quantize_in_weight_transfer: needs [inference]",
        ),
        (
            {"num_train_gpus": 1, "num_infer_gpus": 1},
            {"weight_broadcast": {"type": "nccl"}, "trainer": {"model": {"lora": {}}}},
            "weight_broadcast.type: 'nccl' does not work with trainer.model.lora",
        ),
        (CPU, {"monitors": {"wandb": {"offline": True}}}, "monitors.wandb.offline: true does not work"),
        (CPU, {"trainer": {"monitors": {"wandb": {}}}}, "monitors.wandb: must be on for trainer and orchestrator"),
        (
            CPU,
            {"trainer": {"monitors": {"wandb": {}}}, "orchestrator__monitors": {"wandb": {"project": "b"}}},
            "orchestrator.monitors.wandb.project: 'b' contradicts",
        ),
    ],
)  # fmt: skip
def test_placement_and_monitors(monkeypatch, deployment, changes, expected):
    refused(monkeypatch, "RLConfig", {"deployment": deployment, **changes}, expected)


@pytest.mark.parametrize(
    ("algo", "key"),
    [
        ({"type": "opd", "teacher": {"name": "a"}}, "teacher"),
        ({"type": "sft", "sampling": {"source": {"name": "a"}}}, "sampling.source"),
    ],
)
def test_a_frozen_model_without_a_server(monkeypatch, algo, key):
    """The launcher serves it beside an embedded engine, and nowhere else."""
    config = parsed("RLConfig", orchestrator__train__algo=algo)
    assert [key for key, _ in config.orchestrator.frozen_models()] == [
        f"train.algo.{key}",
        f"train.source.0.algo.{key}",
    ]
    changes = {"orchestrator__train__algo": algo, "deployment": {"num_train_gpus": 1, "num_infer_gpus": 1}}
    refused(monkeypatch, "RLConfig", changes, f"orchestrator.train.algo.{key}.base_url: is needed: the launcher serves")
    refused(
        monkeypatch,
        "RLConfig",
        {**changes, "inference": ..., "deployment": CPU},
        f"orchestrator.train.algo.{key}.base_url: is needed",
    )


WHOLE = "training draws from the whole temperature-scaled distribution"
SENT = [
    ({"temperature": 0.5}, "is sampling.temperature"),
    ({"max_tokens": 5}, "is sampling.max_completion_tokens"),
    ({"max_completion_tokens": 5}, "is sampling.max_completion_tokens"),
    ({"n": 2}, "is group_size"),
    ({"best_of": 2}, "is group_size"),
    ({"seed": 1}, "follows from the run's seed"),
    ({"logprobs": 5}, "is set for the loss"),
    ({"top_logprobs": 5}, "is set for the loss"),
    ({"stop_token_ids": [1]}, "follows from the renderer"),
    ({"cache_salt": "a"}, "follows from the version of the weights"),
    ({"extra_body": {"top_p": 0.5}}, "is this table"),
    ({"top_p": 0.5}, WHOLE),
    ({"top_k": 1000}, WHOLE),
    ({"min_p": 0.1}, WHOLE),
    ({"repetition_penalty": 1.1}, WHOLE),
    ({"presence_penalty": 1}, WHOLE),
    ({"frequency_penalty": 1}, WHOLE),
    ({"logit_bias": {"5": 100}}, WHOLE),
    ({"min_tokens": 4}, WHOLE),
    ({"bad_words": ["a"]}, WHOLE),
    ({"allowed_token_ids": [1]}, WHOLE),
    ({"structured_outputs": {"regex": "a"}}, WHOLE),
    ({"guided_regex": "a"}, WHOLE),
]


@pytest.mark.parametrize(
    ("extra", "expected"), SENT, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_training_draws_from_the_whole_distribution(monkeypatch, extra, expected):
    """Whatever stands in `extra_body`, or in what the environment's agent lays over it, reaches the engine last."""
    (key,) = extra
    table, train = {"extra_body": extra}, "orchestrator.train"
    refused(
        monkeypatch,
        "RLConfig",
        {"orchestrator__train__sampling": table},
        f"{train}.sampling.extra_body.{key}: {expected}",
    )
    changes = {"orchestrator__train__source": [source(), source(name="b", sampling=table)]}
    refused(monkeypatch, "RLConfig", changes, f"{train}.source.1.sampling.extra_body.{key}: {expected}")
    if not key.startswith("max_"):  # the limit of one of several agents has no other place
        changes = {"orchestrator__train__source": [source(env={**SOURCE["env"], "agent": {"sampling": extra}})]}
        refused(monkeypatch, "RLConfig", changes, f"{train}.source.0.env.agent.sampling.{key}: {expected}")


@pytest.mark.parametrize("extra", [
    {"top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": {}, "min_tokens": None},
    {"stop": ["Question:"], "chat_template_kwargs": {"enable_thinking": False}, "priority": 1},
])  # fmt: skip
def test_what_a_training_source_may_send(extra):
    config = parsed("RLConfig", orchestrator__train__sampling={"extra_body": extra})
    assert config.orchestrator.train.source[0].sampling.extra_body == extra


def test_others_may_draw_as_they_like():
    """A frozen teacher, an agent that is another model, an evaluation."""
    extra = {"top_p": 0.95, "top_k": 20}
    sft = {"type": "sft", "sampling": {"source": FROZEN}}
    parsed("RLConfig", orchestrator__train__algo=sft, orchestrator__train__sampling={"extra_body": extra})
    judge = {"model": "judge", "client": {"base_url": "http://h:1/v1"}, "sampling": {"temperature": 0.0}}
    parsed("RLConfig", orchestrator__train__source=[source(env={**SOURCE["env"], "agent": judge})])
    parsed("RLConfig", orchestrator__eval={"source": [SOURCE], "sampling": {"extra_body": extra | {"seed": 3}}})
    parsed("EvalConfig", sampling={"extra_body": extra})


def test_more_of_sft(monkeypatch):
    multi = {"type": "multi_node", "num_train_nodes": 1}
    cp = {
        "deployment": {**CPU, "num_train_ranks": 2},
        "data": {"name": "x", "seq_len": 129, "micro_batch_size": 2},
        "model": {"cp": 2, "name": "a", "attn": "varlen"},
    }
    refused(monkeypatch, "SFTConfig", {"deployment": multi}, "deployment.type: multi_node needs [slurm]")
    refused(monkeypatch, "SFTConfig", cp, "data.seq_len: 129 is not a multiple of model.cp = 2")
    refused(monkeypatch, "SFTConfig", cp, "data.micro_batch_size: must be 1 with model.cp above 1")
    refused(monkeypatch, "SFTConfig", {"inference": {}}, "inference: needs [eval]")


def test_checks_that_only_a_changed_object_can_meet():
    """Contradictions that spreading makes impossible in files are still found in a configuration changed in code."""
    config = parsed("RLConfig")
    config.inference.vllm.model = "b"
    config.inference.vllm.chat_template = "t"
    config.orchestrator.weight_broadcast = config.orchestrator.weight_broadcast.model_copy(update={"type": "nccl"})
    config.trainer.model.lora = LoRAConfig()
    keys = {key for key, _ in rl_faults(config)}
    assert {"inference.vllm.model", "inference.vllm.chat_template", "orchestrator.weight_broadcast.type"} <= keys


@pytest.mark.parametrize(
    ("table", "name", "greatest"), [({}, "r16-a32", 16), ({"rank": 20, "alpha": 0.5}, "r20-a0.5", 32)]
)
def test_an_adapter_of_the_trainer_reaches_orchestrator_and_engine(table, name, greatest):
    config = parsed("RLConfig", trainer={"model": {"lora": table}})
    assert config.orchestrator.model.lora.name == name
    assert config.inference.vllm.enable_lora and config.inference.vllm.max_lora_rank == greatest
    assert parsed("RLConfig").orchestrator.model.lora is None and not parsed("RLConfig").inference.vllm.enable_lora


def test_a_missing_default_algorithm_value_is_not_hidden():
    assert OrchestratorConfig.model_validate(raw("OrchestratorConfig")).train.algo.type == "grpo"
