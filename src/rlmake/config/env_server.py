"""Configuration of the server of one environment."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from rlmake.config.fields import Config, group, runtime, semantic
from rlmake.config.names import fault_of_segment
from rlmake.config.refused import Refused
from rlmake.config.shared import ComponentLogConfig, EnvVars, check_env_vars
from rlmake.config.sources import ENV_KEYS_DOC, EvalSource, TrainSource


class EnvServerConfig(Config):
    """The server of one environment (`env-server`)."""

    entry: ClassVar[str | None] = "env-server"

    name: str = runtime(..., "Name of the source.")
    split: Literal["train", "eval"] = runtime("train", "What the source is for.")
    env: dict[str, Any] = semantic(..., ENV_KEYS_DOC)
    address: str = runtime("tcp://127.0.0.1:0", "Address to listen on; port 0: taken from the system.")
    address_file: str | None = runtime(None, "File in which the address is published.")
    max_workers: int = runtime(1, "Most worker processes; another is started when nearly all places are taken.", ge=1)
    multiplex: int = runtime(
        128, "Places of a worker: episodes at the same time beyond which another is started.", ge=1
    )
    worker_timeout: float = runtime(120.0, "Seconds without an answer after which a worker hangs: replaced.", gt=0)
    worker_max_memory: float | None = runtime(None, "GiB beyond which a worker is replaced.", gt=0)
    max_concurrent: int | None = runtime(None, "Most episodes at the same time over all workers.", ge=1)
    seed: int = semantic(0, "Seed of everything random.", ge=0)
    log: ComponentLogConfig = group(ComponentLogConfig, "Logging.")
    output_dir: str | None = runtime(None, "Run directory.")
    env_vars: EnvVars = runtime(dict, "Environment variables of the process.")

    @model_validator(mode="after")
    def _check(self):
        taskset = self.env.get("taskset")
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
            raise Refused(("env.taskset.id", "is needed: the id of a taskset"))
        if fault := fault_of_segment(self.name):
            raise Refused(("name", fault))
        check_env_vars(self.env_vars)
        return self

    @classmethod
    def of_source(cls, source: TrainSource | EvalSource, **given: Any) -> "EnvServerConfig":
        """The server configuration of a source; `given` are split, seed, log, output_dir, address_file, env_vars."""
        split = "train" if isinstance(source, TrainSource) else "eval"
        serve = source.serve.model_dump(exclude={"address"})
        return cls(**{"name": source.name, "split": split, "env": source.env} | serve | given)
