"""`[inference.vllm]` passes every argument of vLLM's server on, and refuses what none of its versions knows."""

import pytest

from rlmake.config import InferenceConfig, dump, parse
from rlmake.core.errors import ConfigError


def inference(**table):
    return parse(InferenceConfig, {"engine": "vllm", "device": "cuda", "vllm": table})


def test_arguments_of_vllm_pass_through():
    config = inference(max_num_seqs=256, kv_cache_dtype="fp8", compilation_config={"level": 0}, enforce_eager=True)
    assert config.vllm.arguments == {"max_num_seqs": 256, "kv_cache_dtype": "fp8", "compilation_config": {"level": 0}}
    assert config.vllm.enforce_eager and parse(InferenceConfig, dump(config)) == config
    assert inference(arguments={"brand_new": 1}).vllm.arguments == {"brand_new": 1}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"max_num_seq": 1}, "did you mean 'max_num_seqs'"),
        ({"enforce_eagre": True}, "did you mean 'enforce_eager'"),
        ({"worker_extension_cls": "x"}, "what new weights arrive through"),
        ({"logprobs_mode": "raw_logprobs"}, "processed_logprobs"),
        ({"port": 8000}, "is server.port"),
        ({"arguments": {"model": "x"}}, "stands in the table itself"),
        ({"api_server_count": 2}, "several API servers"),
    ],
)
def test_what_does_not_pass_is_one_line(table, message):
    with pytest.raises(ConfigError) as error:
        inference(**table)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_arguments_count_for_vllm_only():
    with pytest.raises(ConfigError, match="counts for the vllm engine only"):
        parse(InferenceConfig, {"vllm": {"max_num_seqs": 4}})


def test_a_run_that_shares_its_gpus_sends_files():
    from config_samples import parsed

    place = {"num_train_gpus": 1, "num_infer_gpus": 1, "gpus_per_node": 1, "share_gpus": True}
    shared = parsed("RLConfig", deployment=place)
    assert shared.weight_broadcast.type == "filesystem" and shared.deployment.gpus == 1
    apart = parsed("RLConfig", deployment=place | {"share_gpus": False, "gpus_per_node": 2})
    assert apart.weight_broadcast.type == "nccl" and apart.inference.engine == "vllm"
    with pytest.raises(ConfigError, match="share_gpus is true"):
        parsed("RLConfig", deployment=place, weight_broadcast={"type": "nccl"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm": {"quantization": "fp8"}}, "quantization = 'fp8'"),
        ({"vllm": {"tensor_parallel_size": 2}}, "several GPUs"),
    ],
)
def test_weights_that_cannot_be_compared(changes, message):
    with pytest.raises(ConfigError, match="check_weights") as error:
        parse(InferenceConfig, {"engine": "vllm", "device": "cuda", "check_weights": True} | changes)
    assert message in str(error.value)
