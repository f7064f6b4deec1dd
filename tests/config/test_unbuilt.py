"""What is not built is refused in one line, whoever wrote it."""

import functools

import pytest
from config_samples import parsed, schema

from rlmake.config import dump, parse, unbuilt
from rlmake.core.errors import ConfigError

UNBUILT = [
    ("RLConfig", {"slurm": {"shared_fs": False}}, "slurm.shared_fs"),
    (
        "RLConfig",
        {"weight_broadcast": {"type": "nccl", "backend": "gloo", "quantize_in_weight_transfer": True}},
        "weight_broadcast.quantize_in_weight_transfer",
    ),
    ("SFTConfig", {"weight_broadcast": {"type": "nccl"}}, "weight_broadcast.type"),
    ("RLConfig", {"trainer": {"model": {"vlm": {}}}}, "trainer.model.vlm"),
    ("SFTConfig", {"model__ep": 8}, "model.ep"),
    ("SFTConfig", {"model__full_offload": {}}, "model.full_offload"),
]


@pytest.mark.parametrize(("name", "changes", "key"), UNBUILT, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_built_is_refused_in_one_line(name, changes, key):
    with pytest.raises(ConfigError) as error:
        parsed(name, **changes)
    assert [fault.key for fault in error.value.faults] == [key], str(error.value)
    assert "not built yet" in str(error.value) and "\n" not in str(error.value)


def test_free_tables_of_the_user_are_not_searched_for_unbuilt_keys():
    env = {"taskset": {"id": "reverse-text", "router": True}, "slurm": {"x": 1}}
    assert parse(schema("OrchestratorConfig"), {"train": {"source": [{"env": env}]}})


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("RLConfig", "trainer.model.ep", 4),
        ("RLConfig", "trainer.enable_token_export", True),
        ("RLConfig", "inference.vllm.api_server_count", 2),
        ("SFTConfig", "model.ep", 2),
        ("SFTConfig", "model.attn", "flash_attention_2"),
        ("EvalConfig", "inference.vllm.api_server_count", 2),
    ],
)
def test_a_default_of_what_is_not_built_is_refused_like_a_written_value(name, path, value):
    config = parsed(name)
    assert unbuilt.faults_of(config) == []
    *parents, last = path.split(".")
    table = functools.reduce(getattr, parents, config)
    table.__dict__[last] = value
    assert unbuilt.faults_of(config) == unbuilt.faults(config.entry, dump(config)) != []
