"""Environments as sources of training rollouts and of evaluations."""

from typing import Any

from pydantic import model_validator

from rlmake.config.algo import Algo
from rlmake.config.curriculum import CurriculumConfig
from rlmake.config.fields import Config, group, runtime, semantic
from rlmake.config.names import fault_of_segment
from rlmake.config.refused import Refused, require_address
from rlmake.config.sampling import EvalSamplingConfig, TrainSamplingConfig
from rlmake.core.errors import nearest

RESERVED = ("agg", "all")
ENV_KEYS_DOC = "The environment as `verifiers` describes it: taskset {id, …}, agent {harness {id}, runtime {type}}, …"


class ServeConfig(Config):
    """Where the environment server of a source runs."""

    address: str | None = runtime(None, "Address of a server that runs elsewhere; the launcher starts one when absent.")
    max_workers: int = runtime(1, "Most worker processes; another is started when nearly all places are taken.", ge=1)
    multiplex: int = runtime(
        128, "Places of a worker: episodes at the same time beyond which another is started.", ge=1
    )
    worker_timeout: float = runtime(120.0, "Seconds without an answer after which a worker hangs: replaced.", gt=0)
    worker_max_memory: float | None = runtime(None, "GiB beyond which a worker is replaced.", gt=0)

    @model_validator(mode="after")
    def _address(self):
        require_address("address", self.address)
        return self


class _Source(Config):
    env: dict[str, Any] = semantic(..., ENV_KEYS_DOC)
    name: str = semantic("", "Name of the source; the taskset's id when absent.")
    serve: ServeConfig = group(ServeConfig, "Where the environment server runs.")

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name"):
            taskset = data.get("env", {}).get("taskset") if isinstance(data.get("env"), dict) else None
            if isinstance(taskset, dict) and isinstance(taskset.get("id"), str):
                return {**data, "name": taskset["id"]}
        return data

    @model_validator(mode="after")
    def _env(self):
        taskset = self.env.get("taskset")
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str) or not taskset["id"]:
            hint = nearest("taskset", self.env) if "taskset" not in self.env else ""
            raise Refused(("env.taskset.id", f"is needed: the id of a taskset{hint}"))
        if fault := fault_of_segment(self.name):
            raise Refused(("name", fault))
        return self

    @property
    def taskset_id(self) -> str:
        return self.env["taskset"]["id"]


class TrainSource(_Source):
    """One environment to train on."""

    ratio: float = semantic(1.0, "Weight when the source of the next task is drawn.", gt=0)
    sampling: TrainSamplingConfig | None = semantic(None, "Sampling of this source.")
    group_size: int | None = semantic(None, "Rollouts per task of this source.", ge=1)
    algo: Algo | None = semantic(None, "Algorithm of this source.")
    curriculum: CurriculumConfig = group(CurriculumConfig, "Sampler and gates of this source.")

    def agent_sampling(self) -> dict[str, Any]:
        """What the environment's agent lays over `sampling`, but for its own limit of tokens; nothing of an agent that
        is another model."""
        agent = self.env.get("agent")
        if not isinstance(agent, dict) or agent.get("model") or not isinstance(table := agent.get("sampling"), dict):
            return {}
        return {key: table[key] for key in table if key not in ("max_tokens", "max_completion_tokens")}


class SelectConfig(Config):
    """Which tasks of a source take part."""

    limit: int | None = semantic(None, "Take the first this many tasks; all when absent.", ge=1)


class EvalSource(_Source):
    """One environment to evaluate on."""

    sampling: EvalSamplingConfig | None = semantic(None, "Sampling of this source.")
    group_size: int | None = semantic(None, "Episodes per task of this source.", ge=1)
    select: SelectConfig | None = semantic(None, "Tasks of this source.")


class OnlineEvalSource(EvalSource):
    """One environment to evaluate on while a run goes on."""

    interval: int | None = semantic(None, "Steps between evaluations of this source.", ge=1)


def inherit(source: Config, defaults: dict[str, Any]) -> None:
    """Fill what a source left open: whole values, and for tables the fields that were not given."""
    for key, default in defaults.items():
        own = getattr(source, key)
        if own is None:
            setattr(source, key, default.model_copy(deep=True) if isinstance(default, Config) else default)
        elif isinstance(own, Config) and isinstance(default, type(own)):
            for name in type(own).model_fields:
                if name not in own.model_fields_set:
                    setattr(own, name, getattr(default, name))


def name_faults(sources: list[Any]) -> list[tuple[str, str]]:
    """`(key, fault)` of reserved names and of names given twice."""
    faults, seen = [], {}
    for index, source in enumerate(sources):
        if source.name in RESERVED:
            faults.append((f"source.{index}.name", f"'{source.name}' is reserved"))
        elif source.name in seen:
            faults.append((f"source.{index}.name", f"'{source.name}' is also the name of source {seen[source.name]}"))
        seen.setdefault(source.name, index)
    return faults
