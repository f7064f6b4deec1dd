"""Checks of an RL run across its components. Each has a negative test."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rlmake.config.deployment import MultiNode
    from rlmake.config.inference import InferenceConfig
    from rlmake.config.rl import RLConfig
    from rlmake.config.shared import SlurmConfig, WeightBroadcast
    from rlmake.config.sources import EvalSource, TrainSource
    from rlmake.config.trainer import TrainerModelConfig

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
    if place.num_infer_nodes == 0:
        return [*faults, ("deployment.num_infer_nodes", "0 leaves no node for [inference]")]
    nodes = place.infer_nodes(managed=True)
    return [*faults, *engines_fit(inference, place.gpus_per_node, "deployment.gpus_per_node", nodes)]


def engines_fit(
    inference: "InferenceConfig | None", gpus: int, key: str, nodes: int = 0, table: str = "inference.vllm"
) -> Faults:
    """Engines that do not fill the GPUs that `key` gives: in all, or on each of `nodes` hosts. On the CPU a single host
    has as many engines as are asked for, each of several hosts one."""
    if inference is None or not (gpus or nodes):
        return []
    each, copies = inference.gpus_per_engine, inference.vllm.data_parallel_size
    if gpus % each:
        more = "" if each == inference.vllm.tensor_parallel_size else " × pipeline_parallel_size"
        return [(key, f"{gpus} is not a multiple of {table}.tensor_parallel_size{more} = {each}")]
    if copies in (1, engines := max(1, nodes) * max(1, gpus // each)):
        return []
    place = f"{key} = {gpus}" + (f" on {nodes} nodes" if nodes else "")
    return [(f"{table}.data_parallel_size", f"{copies} engines of {each} GPUs contradict {place}: {engines}")]


def same_port(inference: "InferenceConfig | None", url: str | None, key: str) -> Faults:
    """A URL that is not the one of the server that the launcher starts."""
    if inference is None or url is None or (port := urlsplit(url).port) == inference.server.port:
        return []
    return [(key, f"port {port} contradicts inference.server.port = {inference.server.port}")]


def weights_arrive(inference: "InferenceConfig | None", broadcast: "WeightBroadcast") -> Faults:
    """Engines that new weights cannot be loaded into."""
    if inference is None or not inference.vllm.arguments.get("enable_eplb"):
        return []
    if broadcast.type == "nccl" and broadcast.quantize_in_weight_transfer:
        return []
    text = "moves experts, and new weights find them by nccl with quantize_in_weight_transfer only"
    return [("inference.vllm.enable_eplb", text)]


def ranks_fit(model: "TrainerModelConfig", ranks: int, key: str, copies: int | None = None) -> Faults:
    """Ranks of a trainer that its mesh does not divide. `copies`: of the model, where the deployment says it."""
    given = model.dp_replicate
    if copies is not None and given not in (1, copies):
        text = f"{given} contradicts deployment.nodes_per_fsdp_group, which makes {copies}"
        return [(f"{key}.dp_replicate", text)]
    if ranks % (copies := copies or given):
        return [(f"{key}.dp_replicate", f"{copies} does not divide the trainer's {ranks} ranks")]
    if ranks // copies % model.cp:
        of = f" {ranks // copies} ranks of a copy" if copies > 1 else f" {ranks} ranks"
        return [(f"{key}.cp", f"{model.cp} does not divide the trainer's{of}")]
    return []


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
        if place.num_infer_nodes == 0 and inference is None and not fake:
            faults.append(("deployment.num_infer_nodes", "0 needs [trainer.data.fake]"))
        if place.orchestrator_on_inference and inference is None:
            faults.append(("deployment.orchestrator_on_inference", "needs [inference]"))
        ranks = place.num_train_nodes * place.ranks_per_node
        return [*faults, *ranks_fit(config.trainer.model, ranks, "trainer.model", place.dp_replicate)]
    if inference is None and place.num_infer_gpus > 0 and not fake:
        text = f"is needed with deployment.num_infer_gpus = {place.num_infer_gpus}: add [inference], or set that to 0"
        faults.append(("inference", f"{text} for a server elsewhere"))
    faults += engines_fit(inference, place.num_infer_gpus, "deployment.num_infer_gpus")
    ranks = place.num_train_gpus or place.num_train_ranks
    return [*faults, *ranks_fit(config.trainer.model, ranks, "trainer.model")]


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
    faults += weights_arrive(inference, trainer.weight_broadcast)
    mine, theirs = trainer.rollout_transport, orchestrator.rollout_transport
    for key in ("type", "host", "port"):
        value, other = getattr(mine, key, None), getattr(theirs, key, None)
        if value != other:
            fault = f"{other!r} contradicts trainer.rollout_transport.{key} = {value!r}"
            faults.append((f"orchestrator.rollout_transport.{key}", fault))
            break
    return [*faults, *same_port(inference, orchestrator.model.client.base_url, "orchestrator.model.client.base_url")]


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
    if orchestrator.model.lora is not None and trainer.model.lora is None:
        faults.append(("orchestrator.model.lora", "needs trainer.model.lora, from which it follows"))
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
