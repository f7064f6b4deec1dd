"""Smallest raw configurations that are valid, one per entry point, for the tests of this room."""

import copy

import rlmake.config as config

SOURCE = {"name": "reverse-text", "env": {"taskset": {"id": "reverse-text"}}}
CPU = {"num_train_gpus": 0, "num_infer_gpus": 0}

SAMPLES = {
    "RLConfig": {
        "model": {"name": "outputs/a/sft/weights"},
        "deployment": CPU,
        "inference": {},
        "ckpt": {},
        "max_steps": 20,
        "orchestrator": {"renderer": {"name": "qwen3"}, "train": {"group_size": 8, "source": [SOURCE]}},
    },
    "SFTConfig": {
        "model": {"name": "outputs/a/model/weights"},
        "deployment": CPU,
        "renderer": {"name": "qwen3"},
        "data": {"name": "outputs/a/data", "batch_size": 64},
        "max_steps": 20,
    },
    "TrainerConfig": {},
    "OrchestratorConfig": {"train": {"source": [SOURCE]}},
    "InferenceConfig": {"vllm": {"model": "outputs/a/sft/weights"}},
    "EvalConfig": {"source": [SOURCE], "inference": {}, "deployment": {"num_infer_gpus": 0}},
    "EnvServerConfig": {"name": "reverse-text", "env": SOURCE["env"]},
    "DataConfig": {},
    "InitConfig": {"tokenizer": {"text": "outputs/a/data"}},
    "ImportConfig": {"source": {"type": "local", "path": "models/a"}},
}


def schema(name: str) -> type[config.Config]:
    return getattr(config, name)


def raw(of: str, **changes):
    """The sample of a schema with dotted keys changed (`a__b=1`); `...` removes a key."""
    data = copy.deepcopy(SAMPLES[of])
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        node = data
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if value is ...:
            node.pop(last, None)
        else:
            node[last] = value
    return data


def parsed(of: str, **changes):
    return config.parse(schema(of), raw(of, **changes))


def source(**changes):
    """A training source, changed."""
    return {**copy.deepcopy(SOURCE), **changes}
