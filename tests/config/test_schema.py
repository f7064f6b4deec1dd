"""Field classes, what counts for the identity of a result, and the round trip through JSON."""

import json
from typing import Any

import pytest
from config_samples import SAMPLES, SOURCE, parsed, raw, schema
from pydantic import BaseModel

from rlmake.config import classify, dump, load_resolved, parse, semantic_part
from rlmake.config.fields import CLASSES, Config, group, runtime, semantic, walk
from rlmake.core.errors import ConfigError


@pytest.mark.parametrize("name", SAMPLES)
def test_every_leaf_has_a_class_and_a_meaning(name):
    classes = classify(schema(name))
    assert set(classes.values()) <= set(CLASSES)
    for key, info, _ in walk(schema(name)):
        assert info.description, f"{key} says nothing of itself"


@pytest.mark.parametrize("name", SAMPLES)
def test_no_number_is_made_of_true(name):
    """Every `int` and `float` of a schema, also those inside lists, unions and optional values."""

    def numbers(node, holder=None):
        if isinstance(node, dict):
            if node.get("type") in ("int", "float"):
                yield node, holder
            for key, value in node.items():
                if key not in ("metadata", "serialization", "default"):
                    yield from numbers(value, node if "type" in node else holder)
        elif isinstance(node, list | tuple):
            for value in node:
                yield from numbers(value, holder)

    schema(name).model_rebuild(force=True)
    found = list(numbers(schema(name).__pydantic_core_schema__))
    assert found or name == "ImportConfig"  # which has none
    for number, holder in found:
        assert holder["type"] == "function-before" and holder["function"]["function"].__name__.startswith("_no_"), (
            number
        )


def test_an_unclassified_leaf_is_found():
    class Table(Config):
        good: int = semantic(1, "Good.")
        bad: int = 2

    with pytest.raises(TypeError, match="bad has no class"):
        classify(Table)


def test_variants_agree_on_the_class_of_a_shared_key():
    class One(Config):
        x: int = semantic(1, "x")

    class Other(Config):
        x: int = runtime(1, "x")

    class Root(Config):
        either: One | Other = group(One(), "Either.")

    with pytest.raises(TypeError, match="another variant"):
        classify(Root)


def test_spot_checks_of_classes():
    classes = classify(schema("RLConfig"))
    assert classes["trainer.optim.lr"] == classes["orchestrator.batch_size"] == "semantic"
    assert classes["trainer.log.level"] == classes["inference.server.port"] == "runtime"
    assert classes["max_steps"] == classes["trainer.ckpt.interval"] == "horizon"
    assert classes["orchestrator.train.source.*.env"] == "semantic"
    assert classify(schema("SFTConfig"))["data.micro_batch_size"] == "runtime"


@pytest.mark.parametrize("name", SAMPLES)
def test_dump_and_load_give_the_same(name, tmp_path):
    config = parsed(name)
    record = dump(config)
    path = tmp_path / "resolved.json"
    path.write_text(json.dumps(record))
    again = load_resolved(schema(name), path)
    assert dump(again) == record
    assert semantic_part(again) == semantic_part(config)


def test_explicit_none_survives_the_round_trip(tmp_path):
    """Spec, trap 36: overrides to null were lost when a resolved configuration was written and read again."""
    data = raw(
        "RLConfig", trainer__gc=None, orchestrator__concurrency={"max_inflight": None}, monitors={"file": "None"}
    )
    config = parse(schema("RLConfig"), data)
    assert config.trainer.gc is None and config.orchestrator.concurrency.max_inflight is None
    assert config.trainer.monitors.file is None and config.orchestrator.monitors.file is None
    path = tmp_path / "rl.json"
    path.write_text(json.dumps(dump(config)))
    again = load_resolved(schema("RLConfig"), path)
    assert again.trainer.gc is None and again.orchestrator.concurrency.max_inflight is None
    assert again.trainer.monitors.file is None


def test_a_placed_run_loads_again(tmp_path):
    config = parsed("RLConfig", resume={"dir": "outputs/b/rl/checkpoints/step_10"}).placed(tmp_path, "mine")
    for part in ("trainer", "orchestrator", "inference"):
        path = tmp_path / f"{part}.json"
        path.write_text(json.dumps(dump(getattr(config, part))))
        again = load_resolved(type(getattr(config, part)), path)
        assert again.output_dir == str(tmp_path) and again.run.name == "mine"
        assert dump(again) == dump(getattr(config, part))


def test_runtime_and_horizon_changes_leave_the_identity_alone():
    base = semantic_part(parsed("RLConfig"))
    same = parsed(
        "RLConfig", max_steps=40, ckpt={"interval": 5}, log={"level": "debug"}, run={"name": "x"}, resume={}, clean=True
    )
    assert semantic_part(same) == base
    assert semantic_part(parsed("RLConfig", trainer__optim={"lr": 2e-6})) != base
    assert semantic_part(parsed("RLConfig", deployment__cpu_threads=1)) != base, "bytes depend on the thread count"
    assert semantic_part(parsed("RLConfig", resume={"dir": "outputs/b/checkpoints/step_3"})) != base


def test_spelling_out_a_default_or_using_a_shared_key_is_no_change():
    base = semantic_part(parsed("RLConfig"))
    assert semantic_part(parsed("RLConfig", trainer__optim={"type": "adamw", "lr": 1e-6})) == base
    assert semantic_part(parsed("RLConfig", seed=0, deterministic=True, seq_len=2048)) == base
    spelled = raw("RLConfig", model=..., trainer__model={"name": "outputs/a/sft/weights"})
    spelled["orchestrator"]["model"] = {"name": "outputs/a/sft/weights"}
    spelled["inference"] = {"vllm": {"model": "outputs/a/sft/weights"}}
    assert semantic_part(parse(schema("RLConfig"), spelled)) == base
    own = {**SOURCE, "group_size": 8}
    assert semantic_part(parsed("RLConfig", orchestrator__train={"source": [own]})) == base


def test_max_steps_counts_where_the_schedule_depends_on_it():
    def identity(scheduler: dict[str, Any], max_steps: int):
        return semantic_part(parsed("SFTConfig", scheduler=scheduler, max_steps=max_steps))

    assert identity({"type": "constant"}, 30) == identity({"type": "constant"}, 60)
    assert identity({"type": "cosine"}, 30) != identity({"type": "cosine"}, 60)
    assert identity({"type": "linear"}, 30) != identity({"type": "linear"}, 60)
    warmup = {"type": "linear", "decay_steps": 0}
    assert identity(warmup, 30) == identity(warmup, 60)


def test_micro_batches_count_in_deterministic_mode_only():
    def identity(micro: int, deterministic: bool):
        data = {"name": "outputs/a/data", "batch_size": 64, "micro_batch_size": micro}
        return semantic_part(parsed("SFTConfig", data=data, deterministic=deterministic))

    assert identity(1, False) == identity(2, False)
    assert identity(1, True) != identity(2, True)


def test_offloading_is_off_implies_recomputation_and_is_no_other_run():
    plain = parsed("SFTConfig").model
    assert plain.ac_offloading is None and not plain.optim_cpu_offload and not plain.fsdp_cpu_offload
    asked = parsed("SFTConfig", model__ac_offloading={}).model
    assert (asked.ac_offloading.pin_memory, asked.ac_offloading.max_inflight_activations) == (True, 5)
    assert asked.ac.mode == "full" and plain.ac is None
    assert parsed("SFTConfig", model__ac_offloading={}, model__ac={"mode": "selective"}).model.ac.mode == "selective"
    base = semantic_part(parsed("SFTConfig", model__ac={}))
    for keys in ({"ac_offloading": {}}, {"optim_cpu_offload": True}, {"fsdp_cpu_offload": True}):
        assert semantic_part(parsed("SFTConfig", model__ac={}, **{f"model__{k}": v for k, v in keys.items()})) == base

    def on_gpu(**keys):
        return semantic_part(parsed("TrainerConfig", device="cuda", model=keys["model"], deterministic=keys["same"]))

    off, on = {"fsdp_cpu_offload": False}, {"fsdp_cpu_offload": True}
    assert on_gpu(model=off, same=False) == on_gpu(model=on, same=False)
    assert on_gpu(model=off, same=True) != on_gpu(model=on, same=True), "the host's update has other bytes"


def test_only_the_engine_in_use_counts():
    base = semantic_part(parsed("InferenceConfig"))
    assert "dtype" not in base["vllm"] and base["transformers"]["dtype"] == "float32"
    assert semantic_part(parsed("InferenceConfig", transformers={"dtype": "bfloat16"})) != base


def test_auto_is_resolved_from_the_configuration():
    cpu = parsed("RLConfig")
    assert (cpu.trainer.device, cpu.trainer.model.attn, cpu.trainer.model.compute_dtype) == ("cpu", "exact", "float32")
    assert (cpu.inference.device, cpu.inference.engine) == ("cpu", "transformers")
    assert cpu.deterministic is cpu.trainer.deterministic is cpu.orchestrator.deterministic is True
    assert cpu.inference.deterministic is True
    assert cpu.trainer.weight_broadcast.type == cpu.inference.weight_broadcast.type == "filesystem"
    assert cpu.trainer.rollout_transport.type == "filesystem"
    assert cpu.trainer.optim.weight_decay == 0.0 and parsed("SFTConfig").optim.weight_decay == 0.01
    mixed = parsed("RLConfig", deployment={"num_train_gpus": 2, "num_infer_gpus": 0})
    assert (mixed.trainer.device, mixed.trainer.model.attn, mixed.deterministic) == ("cuda", "varlen", False)
    assert (mixed.trainer.rollout_transport.type, mixed.orchestrator.num_train_workers) == ("zmq", 2)
    assert parsed("RLConfig", deployment={**mixed.deployment.model_dump(), "num_train_gpus": 0, "num_train_ranks": 2})


def test_a_managed_server_has_a_port_of_its_own_unless_told():
    config = parsed("RLConfig")
    assert config.inference.server.port == 0 and config.orchestrator.model.client.base_url is None
    config = parsed("RLConfig", inference={"server": {"port": 8123}})
    assert config.orchestrator.model.client.base_url == "http://localhost:8123/v1"
    external = parsed("RLConfig", inference=...)
    assert external.inference is None and external.orchestrator.model.client.base_url == "http://localhost:8000/v1"


def test_renderer_auto_knows_hub_ids():
    config = parsed("RLConfig", model={"name": "Qwen/Qwen3-0.6B"}, orchestrator__renderer=...)
    assert config.orchestrator.renderer.name == "qwen3"
    options = parsed("SFTConfig", renderer={"name": "qwen3", "enable_thinking": False})
    assert options.renderer.options == {"enable_thinking": False}


def test_hub_renderers_are_those_of_the_installed_package():
    from renderers import base, configs

    from rlmake.config.renderer import NAMES, hub_renderers

    assert hub_renderers() == base.MODEL_RENDERER_MAP
    known = {
        name
        for item in vars(configs).values()
        if isinstance(item, type) and issubclass(item, BaseModel) and "name" in item.model_fields
        for name in getattr(item.model_fields["name"].annotation, "__args__", ())
    }
    assert known - {"custom"} <= set(NAMES)
    assert set(base.MODEL_RENDERER_MAP.values()) <= set(NAMES)


def test_sources_inherit_what_they_leave_open():
    eval_table = {"interval": 5, "sampling": {"temperature": 0.0, "top_p": 0.5}, "source": [SOURCE, dict(
        SOURCE, name="other", interval=7, sampling={"top_p": 0.9}, select={"limit": 3}
    )]}  # fmt: skip
    first, other = parsed("RLConfig", orchestrator__eval=eval_table).orchestrator.eval.source
    assert (first.interval, first.sampling.top_p, first.select.limit, first.group_size) == (5, 0.5, None, 1)
    assert (other.interval, other.sampling.top_p, other.sampling.temperature, other.select.limit) == (7, 0.9, 0.0, 3)
    train = parsed("RLConfig").orchestrator.train.source[0]
    assert (train.group_size, train.algo.type, train.sampling.temperature) == (8, "grpo", 1.0)


def test_env_defaults(monkeypatch):
    monkeypatch.setenv("PRL_OUTPUT_DIR", "/elsewhere")
    assert parsed("RLConfig").output_dir == "/elsewhere"
    assert parsed("RLConfig", output_dir="here").output_dir == "here"
    monkeypatch.delenv("PRL_OUTPUT_DIR")
    assert parsed("SFTConfig").output_dir == "outputs"


def test_parsing_leaves_the_raw_configuration_alone():
    data = raw("RLConfig")
    before = json.dumps(data)
    parse(schema("RLConfig"), data)
    assert json.dumps(data) == before


def test_a_fault_of_a_resolved_file_names_it(tmp_path):
    path = tmp_path / "trainer.json"
    path.write_text('{"max_stepz": 3}')
    with pytest.raises(ConfigError, match=r"trainer\.json: max_stepz: unknown key; did you mean 'max_steps'"):
        load_resolved(schema("TrainerConfig"), path)


@pytest.mark.parametrize(("given", "order"), [({}, 0), ({"seed": 3}, 3), ({"seed": 3, "data__seed": 1}, 1)])
def test_sft_seed_orders_the_rows_too(given, order):
    """Replicates over `seed` alone would else all see the same rows in the same order: identical runs."""
    assert parsed("SFTConfig", **given).data.seed == order
