"""Negative tests of what concerns clusters: each fault is one line with its key."""

import pytest
from config_samples import SOURCE, parsed

from rlmake.core.errors import ConfigError

NODES = {"type": "multi_node", "gpus_per_node": 0, "num_train_nodes": 2}
HOSTS = {"type": "multi_node", "num_train_nodes": 2}
VLLM = {"device": "cuda", "engine": "vllm", "slurm": {}, "deployment": {"type": "multi_node"}}
FAULTS = [
    ("SFTConfig", {"deployment": NODES}, "deployment.type"),
    ("RLConfig", {"deployment": NODES}, "deployment.type"),
    ("InferenceConfig", {"deployment": {"type": "multi_node"}}, "deployment.type"),
    ("InferenceConfig", {**VLLM, "vllm": {"tensor_parallel_size": 3}}, "deployment.gpus_per_node"),
    ("InferenceConfig", {**VLLM, "vllm": {"data_parallel_size": 3}}, "vllm.data_parallel_size"),
    ("SFTConfig", {"slurm": {}, "eval": {"source": [SOURCE]}, "deployment": HOSTS, "data__batch_size": 48,
                   "inference": {"vllm": {"tensor_parallel_size": 3}}}, "deployment.gpus_per_node"),
    ("RLConfig", {"slurm": {}, "deployment": HOSTS, "inference": {"vllm": {"tensor_parallel_size": 3}}},
     "deployment.gpus_per_node"),
    ("RLConfig", {"slurm": {}, "deployment": {**HOSTS, "num_infer_nodes": 2},
                  "inference": {"vllm": {"tensor_parallel_size": 2, "data_parallel_size": 3}}},
     "inference.vllm.data_parallel_size"),
    ("RLConfig", {"slurm": {}, "deployment": {**NODES, "num_infer_nodes": 2},
                  "inference": {"engine": "vllm", "vllm": {"data_parallel_size": 3}}},
     "inference.vllm.data_parallel_size"),
    ("SFTConfig", {"slurm": {}, "deployment": {**NODES, "nodes_per_fsdp_group": 3}}, "deployment.nodes_per_fsdp_group"),
    ("SFTConfig", {"slurm": {}, "deployment": {**NODES, "num_train_nodes": 3}}, "data.batch_size"),
    ("SFTConfig", {"slurm": {"time": "1:2:3:4"}}, "slurm.time"),
    ("SFTConfig", {"slurm": {"memory": "lots"}}, "slurm.memory"),
    ("SFTConfig", {"slurm": {"time": "2", "save_before_end": 120}}, "slurm.save_before_end"),
    ("SFTConfig", {"slurm": {"partion": "x"}}, "slurm.partion"),
    ("SFTConfig", {"slurm": {"time": "0"}}, "slurm.time"),
    ("SFTConfig", {"slurm": {"memory": "0"}}, "slurm.memory"),
    ("SFTConfig", {"slurm": {"save_before_end": 100000}}, "slurm.save_before_end"),
    ("SFTConfig", {"slurm": {"job_name": "a\n#SBATCH --wrap=x"}}, "slurm.job_name"),
    ("SFTConfig", {"slurm": {"partition": ""}}, "slurm.partition"),
    ("SFTConfig", {"slurm": {"account": 'a"b'}}, "slurm.account"),
    ("SFTConfig", {"slurm": {"extra": ["--nice=1\ntouch x"]}}, "slurm.extra.0"),
    ("SFTConfig", {"slurm": {"extra": ["--nice", "; touch x"]}}, "slurm.extra.1"),
    ("SFTConfig", {"slurm": {"extra": ["--wrap=touch x"]}}, "slurm.extra.0"),
    ("SFTConfig", {"slurm": {"extra": ["-N4"]}}, "slurm.extra.0"),
    ("SFTConfig", {"slurm": {"shared_fs": False}}, "slurm.shared_fs"),
    ("SFTConfig", {"slurm": {}, "deployment": {**NODES, "orchestrator_on_inference": True}},
     "deployment.orchestrator_on_inference"),
    ("SFTConfig", {"slurm": {}, "deployment": {**NODES, "num_infer_replicas": 2}}, "inference"),
    ("SFTConfig", {"slurm": {}, "inference": {}, "eval": {"source": [SOURCE]},
                   "deployment": {**NODES, "num_infer_nodes": 0}}, "deployment.num_infer_nodes"),
    ("RLConfig", {"inference": {"slurm": {}}}, "inference.slurm"),
    ("RLConfig", {"slurm": {}, "inference": ..., "deployment": {**NODES, "num_infer_nodes": 1}}, "inference"),
    ("RLConfig", {"slurm": {}, "deployment": {**NODES, "num_infer_nodes": 0}}, "deployment.num_infer_nodes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "key"), FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_faults(name, changes, key):
    with pytest.raises(ConfigError) as error:
        parsed(name, **changes)
    assert [fault.key for fault in error.value.faults] == [key], str(error.value)
    assert "\n" not in str(error.value)


def test_over_nodes_the_world_counts_where_bytes_are_promised():
    """Two nodes of one rank each are another cut of the work than one node with one."""
    from rlmake.config.fields import semantic_part

    one = semantic_part(parsed("SFTConfig"))
    two = semantic_part(parsed("SFTConfig", slurm={}, deployment=NODES))
    assert two["deployment"]["num_train_nodes"] == 2 and one != two
    elsewhere = semantic_part(parsed("SFTConfig", slurm={"partition": "x", "time": "3"}, deployment=NODES))
    assert elsewhere == two
