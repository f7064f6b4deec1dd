"""Checks of an RL run across its components. Each has a negative test."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rlmake.config.deployment import MultiNode
    from rlmake.config.inference import InferenceConfig
    from rlmake.config.rl import RLConfig
    from rlmake.config.shared import SlurmConfig
    from rlmake.config.sources import EvalSource, TrainSource

Faults = list[tuple[str, str]]


def rl_faults(config: "RLConfig") -> Faults:
    """`(key, fault)` of everything in which the components contradict one another."""
    found = [*_placement(config), *_transport(config), *_consistency(config), *_sources(config), *_frozen(config)]
    orchestrator = config.orchestrator
    sources = [*orchestrator.train.source, *(orchestrator.eval.source if orchestrator.eval else [])]
    return [*found, *standing_alone(config.inference), *completions_fit(config.inference, sources)]


def standing_alone(inference: "InferenceConfig | None") -> Faults:
    """Tables of an inference server that count only where it is started by itself."""
    if inference is None:
        return []
    faults = [("inference.slurm", "belongs to the root: one job holds the whole run")] if inference.slurm else []
    if inference.deployment.type != "single_node":
        faults.append(("inference.deployment.type", "belongs to the root's [deployment]"))
    return faults


def over_nodes(place: "MultiNode", inference: "InferenceConfig | None", slurm: "SlurmConfig | None") -> Faults:
    """What a run over several nodes must not ask for."""
    faults = [] if slurm is not None else [("deployment.type", "multi_node needs [slurm]")]
    if inference is None:
        if (place.num_infer_nodes or 0) > 0:
            faults.append(("inference", f"is needed: deployment.num_infer_nodes = {place.num_infer_nodes}"))
        elif place.num_infer_replicas > 1:
            faults.append(("inference", f"is needed: deployment.num_infer_replicas = {place.num_infer_replicas}"))
        return faults
    if place.gpus_per_node % (parallel := inference.vllm.tensor_parallel_size):
        text = f"{place.gpus_per_node} is not a multiple of inference.vllm.tensor_parallel_size = {parallel}"
        faults.append(("deployment.gpus_per_node", text))
    return faults


def completions_fit(inference: "InferenceConfig | None", sources: "Sequence[TrainSource | EvalSource]") -> Faults:
    """An engine whose sequences are too short for the completions that the sources ask of it."""
    limit = inference.vllm.max_model_len if inference is not None else None
    longest = max([0, *(source.sampling.max_completion_tokens or 0 for source in sources if source.sampling)])
    if limit is None or longest < limit:
        return []
    text = f"{limit} leaves no token for a prompt beside max_completion_tokens = {longest}"
    return [("inference.vllm.max_model_len", text)]


def _placement(config: "RLConfig") -> Faults:
    place, inference, faults = config.deployment, config.inference, []
    fake = config.trainer.data.fake is not None
    if place.type == "multi_node":
        faults += over_nodes(place, inference, config.slurm)
        if place.num_infer_nodes == 0 and not fake:
            faults.append(("deployment.num_infer_nodes", "0 needs [trainer.data.fake]"))
        if place.orchestrator_on_inference and inference is None:
            faults.append(("deployment.orchestrator_on_inference", "needs [inference]"))
        return [*faults, *_ranks(config, place.num_train_nodes * place.ranks_per_node)]
    if inference is None and place.num_infer_gpus > 0 and not fake:
        text = f"is needed with deployment.num_infer_gpus = {place.num_infer_gpus}: add [inference], or set that to 0"
        faults.append(("inference", f"{text} for a server elsewhere"))
    if inference is not None and place.num_infer_gpus:
        each, copies = inference.gpus_per_engine, inference.vllm.data_parallel_size
        if place.num_infer_gpus % each:
            fault = f"{place.num_infer_gpus} is not a multiple of inference.vllm.tensor_parallel_size = {each}"
            faults.append(("deployment.num_infer_gpus", fault))
        elif copies not in (1, place.num_infer_gpus // each):
            fault = f"{copies} engines of {each} GPUs contradict deployment.num_infer_gpus = {place.num_infer_gpus}"
            faults.append(("inference.vllm.data_parallel_size", fault))
    return [*faults, *_ranks(config, place.num_train_gpus or place.num_train_ranks)]


def _ranks(config: "RLConfig", ranks: int) -> Faults:
    cp = config.trainer.model.cp
    return [("trainer.model.cp", f"{cp} does not divide the trainer's {ranks} ranks")] if ranks % cp else []


def _transport(config: "RLConfig") -> Faults:
    trainer, orchestrator, inference, faults = config.trainer, config.orchestrator, config.inference, []
    kind = trainer.weight_broadcast.type
    for name, part in (("orchestrator", orchestrator), ("inference", inference)):
        if part is not None and part.weight_broadcast.type != kind:
            fault = f"'{part.weight_broadcast.type}' contradicts trainer.weight_broadcast.type = '{kind}'"
            faults.append((f"{name}.weight_broadcast.type", fault))
    if kind == "nccl":
        if trainer.model.lora is not None:
            faults.append(("weight_broadcast.type", "'nccl' does not work with trainer.model.lora; use 'filesystem'"))
        place = config.deployment
        if place.type == "single_node" and (
            trainer.weight_broadcast.backend == "nccl" and 0 in (place.num_train_gpus, place.num_infer_gpus)
        ):
            faults.append(("weight_broadcast.type", "'nccl' needs a GPU on either side; use 'filesystem'"))
        elif place.type == "single_node" and place.share_gpus:
            faults.append(("weight_broadcast.type", "'nccl' needs GPUs apart, and deployment.share_gpus is true"))
        if trainer.weight_broadcast.quantize_in_weight_transfer and inference is None:
            faults.append(("weight_broadcast.quantize_in_weight_transfer", "needs [inference]"))
    kind = trainer.rollout_transport.type
    if orchestrator.rollout_transport.type != kind:
        fault = f"'{orchestrator.rollout_transport.type}' contradicts trainer.rollout_transport.type = '{kind}'"
        faults.append(("orchestrator.rollout_transport.type", fault))
    url = orchestrator.model.client.base_url
    if inference is not None and url is not None:
        port = urlsplit(url).port
        if port != inference.server.port:
            fault = f"port {port} contradicts inference.server.port = {inference.server.port}"
            faults.append(("orchestrator.model.client.base_url", fault))
    return faults


def _consistency(config: "RLConfig") -> Faults:
    trainer, orchestrator, inference, faults = config.trainer, config.orchestrator, config.inference, []

    def equal(key: str, mine: object, theirs: object) -> None:
        if mine != theirs:
            faults.append((f"orchestrator.{key}", f"{theirs!r} contradicts trainer.{key} = {mine!r}"))

    equal("max_steps", trainer.max_steps, orchestrator.max_steps)
    if (trainer.ckpt is None) != (orchestrator.ckpt is None):
        missing = "trainer" if trainer.ckpt is None else "orchestrator"
        faults.append((f"{missing}.ckpt", "is needed too: checkpoints have two halves; give [ckpt] at the root"))
    elif trainer.ckpt is not None and orchestrator.ckpt is not None:
        for key in ("interval", "keep_last", "keep_interval"):
            equal(f"ckpt.{key}", getattr(trainer.ckpt, key), getattr(orchestrator.ckpt, key))
    if (trainer.resume is None) != (orchestrator.resume is None):
        missing = "trainer" if trainer.resume is None else "orchestrator"
        faults.append((f"{missing}.resume", "is needed too; give [resume] at the root"))
    elif trainer.resume is not None and orchestrator.resume is not None:
        for key in ("step", "dir"):
            equal(f"resume.{key}", getattr(trainer.resume, key), getattr(orchestrator.resume, key))
    mine, theirs = trainer.monitors.wandb, orchestrator.monitors.wandb
    if (mine is None) != (theirs is None):
        faults.append(("monitors.wandb", "must be on for trainer and orchestrator, or for neither"))
    elif mine is not None and theirs is not None:
        equal("monitors.wandb.project", mine.project, theirs.project)
    if (config.monitors.wandb or mine) and (config.monitors.wandb or mine).offline:
        faults.append(("monitors.wandb.offline", "true does not work: several processes write one run"))
    if trainer.model.seq_len < orchestrator.seq_len:
        fault = f"{trainer.model.seq_len} is below orchestrator.seq_len = {orchestrator.seq_len}"
        faults.append(("trainer.model.seq_len", fault))
    equal("model.name", trainer.model.name, orchestrator.model.name)
    equal("tokenizer.chat_template", trainer.tokenizer.chat_template, orchestrator.tokenizer.chat_template)
    if inference is not None:
        if inference.vllm.chat_template != trainer.tokenizer.chat_template:
            faults.append(("inference.vllm.chat_template", "contradicts trainer.tokenizer.chat_template"))
        if inference.vllm.model != trainer.model.name:
            fault = f"{inference.vllm.model!r} contradicts trainer.model.name = {trainer.model.name!r}"
            faults.append(("inference.vllm.model", fault))
    for name in ("trainer", "orchestrator", "inference"):
        part = getattr(config, name)
        if part is not None and config.run.name and part.run.name not in (None, config.run.name):
            faults.append((f"{name}.run.name", f"'{part.run.name}' contradicts run.name = '{config.run.name}'"))
    return faults


def _sources(config: "RLConfig") -> Faults:
    if not config.orchestrator.train.source and config.trainer.data.fake is None:
        return [("orchestrator.train.source", "needs at least one source")]
    return []


def _frozen(config: "RLConfig") -> Faults:
    """Frozen models that the launcher is to serve: it does so on the CPU, with the policy's engine configuration."""
    place = config.deployment
    embedded = config.inference is not None and place.type == "single_node" and place.num_infer_gpus == 0
    if embedded:
        return []
    text = "is needed: the launcher serves frozen models only beside an engine on the CPU; start `inference` for it"
    missing = [key for key, model in config.orchestrator.frozen_models() if model.base_url is None]
    shared = [key for key in missing if key.startswith("train.algo.")]
    return [(f"orchestrator.{key}.base_url", text) for key in shared or missing]
