"""Tables that several entry points share: run, logging, checkpoints, resuming, monitors, model names, placement."""

import os
import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlmake.config.fields import Config, FieldClass, horizon, runtime, semantic
from rlmake.config.names import fault_of_path
from rlmake.config.refused import Refused, require_step, require_url
from rlmake.core import slurm

LogLevel = Literal["trace", "debug", "info", "success", "warning", "error", "critical"]
EnvVars = dict[str, str]
PROTECTED_ENV = (
    "CUDA_VISIBLE_DEVICES", "PRL_RUN_ID", "PRL_RUN_NAME", "WANDB_RUN_ID", "WANDB_SHARED_MODE", "WANDB_SHARED_LABEL",
    "WANDB_SHARED_PRIMARY", "WANDB_SHARED_FINISHER",
)  # fmt: skip


def default_output_dir() -> str:
    """`$PRL_OUTPUT_DIR`, else `outputs`."""
    return os.environ.get("PRL_OUTPUT_DIR") or "outputs"


def check_env_vars(env_vars: EnvVars, key: str = "env_vars") -> None:
    """Refuse variables that the launcher itself must set."""
    bad = [name for name in env_vars if name in PROTECTED_ENV]
    if bad:
        raise Refused([(f"{key}.{name}", "is set by the launcher and cannot be given") for name in bad])


class RunConfig(Config):
    """Name and directory of a run."""

    name: str | None = runtime(None, "Run name; made from environments, model and a short id when absent.")
    dir: str | None = runtime(None, "Directory of the run under output_dir; the run's name when absent.")

    @model_validator(mode="after")
    def _safe(self):
        faults = [(key, fault) for key in ("name", "dir") if (fault := fault_of_path(getattr(self, key)))]
        if faults:
            raise Refused(faults)
        return self


class LogConfig(Config):
    """Logging shared by all processes of a launch."""

    level: LogLevel | None = runtime(None, "Log level; `$PRIME_LOG_LEVEL`, then info, when absent.")
    json_logging: bool = runtime(False, "Write log records as JSON lines.")


class ComponentLogConfig(LogConfig):
    """Logging of one process."""

    vf_level: LogLevel | None = runtime(
        None,
        "Level of the environments' own logs; `$PRIME_VF_LOG_LEVEL`, else info without a line per rollout.",
    )


class TrainerLogConfig(ComponentLogConfig):
    """Logging of the trainer's ranks."""

    ranks_filter: list[int] = runtime(lambda: [0], "Ranks whose output goes to trainer.log.")


class CkptConfig(Config):
    """Checkpoints; an empty table saves one at the end."""

    output_dir: str | None = runtime(None, "Folder of the checkpoints; the run directory when absent.")
    interval: int | None = horizon(None, "Steps between checkpoints; only at the end when absent.", ge=1)
    keep_last: int | None = horizon(None, "How many of the newest to keep; all when absent.", ge=1)
    keep_interval: int | None = horizon(None, "Keep every checkpoint at a multiple of this step for good.", ge=1)


class TrainerCkptConfig(CkptConfig):
    """The trainer's half of a checkpoint."""

    skip_progress: bool = runtime(False, "On resume, do not load progress.")
    skip_dataloader: bool = runtime(False, "On resume, do not load the data loader.")
    skip_optimizer: bool = runtime(False, "On resume, do not load the optimizer.")


class OrchestratorCkptConfig(Config):
    """The orchestrator's half of a checkpoint."""

    interval: int | None = horizon(None, "Steps between checkpoints; only at the end when absent.", ge=1)
    keep_last: int | None = horizon(None, "How many of the newest to keep; all when absent.", ge=1)
    keep_interval: int | None = horizon(None, "Keep every checkpoint at a multiple of this step for good.", ge=1)
    skip_progress: bool = runtime(False, "On resume, do not load totals and data state.")


class ResumeConfig(Config):
    """Resuming; an empty table takes the newest complete checkpoint."""

    step: int | None = runtime(None, "Step to resume from; the newest complete one when absent.", ge=1)
    dir: str | None = semantic(None, "Another run's `…/checkpoints/step_<n>` to fork from.")

    @model_validator(mode="after")
    def _one(self):
        if self.step is not None and self.dir is not None:
            raise Refused([("step", "give either step or dir, not both")])
        require_step("dir", self.dir)
        return self

    def reclassified(self) -> dict[str, FieldClass]:
        """A fork starts from other weights; resuming the run itself changes nothing."""
        return {"dir": "semantic"} if self.dir is not None else {}


class FileMonitorConfig(Config):
    """Metrics and traces as files in the run directory."""

    path: str | None = runtime(None, "Folder; `monitors/file` of the run directory when absent.")
    chunk_bytes: int = runtime(5 << 30, "Size at which a chunk of the trace stream is full.", ge=1 << 16)
    compress: bool = runtime(True, "Compress full chunks (zstd).")
    float_decimals: int | None = runtime(4, "Decimals of numbers per token in traces; all when absent.", ge=0)


class WandbConfig(Config):
    """Weights & Biases."""

    project: str = runtime("prime-rl", "Project.")
    entity: str | None = runtime(None, "Entity.")
    name: str | None = runtime(None, "Run name there; the run's name when absent.")
    group: str | None = runtime(None, "Group.")
    tags: list[str] = runtime(list, "Tags.")
    offline: bool = runtime(False, "Record offline; impossible for a run of several processes.")


class PrimeConfig(Config):
    """The Prime Intellect platform."""

    name: str | None = runtime(None, "Run name there; the run's name when absent.")


class MonitorsConfig(Config):
    """Where metrics and episodes go."""

    file: FileMonitorConfig | None = runtime(FileMonitorConfig(), "Files in the run directory; on by default.")
    wandb: WandbConfig | None = runtime(None, "Weights & Biases; off by default.")
    prime: PrimeConfig | None = runtime(None, "The Prime Intellect platform; off by default.")


class SharedMonitorsConfig(Config):
    """Monitors of all processes of a run; what is absent here keeps the processes' own default."""

    file: FileMonitorConfig | None = runtime(
        None, "Files in the run directory (`--no-monitors.file`: none).", shared=True
    )
    wandb: WandbConfig | None = runtime(None, "Weights & Biases.", shared=True)
    prime: PrimeConfig | None = runtime(None, "The Prime Intellect platform.", shared=True)


class TokenizerConfig(Config):
    """Tokenizer; that of the model when absent."""

    name: str | None = semantic(None, "Hub id, directory or target; model.name when absent.")
    trust_remote_code: bool | None = semantic(None, "Run code that ships with the tokenizer.")
    chat_template: str | None = semantic(None, "Chat template (Jinja text or file) in place of the tokenizer's own.")


class ClientConfig(Config):
    """How to reach an inference server."""

    base_url: str | None = runtime(
        "http://localhost:8000/v1", "URL of the server, with /v1; None: published in the run directory."
    )
    admin_base_url: list[str] | None = runtime(None, "URLs of the engines themselves; base_url when absent.")
    api_key_var: str = runtime("VLLM_API_KEY", "Environment variable that holds the key.")
    headers: dict[str, str] = runtime(dict, "Headers sent along.")
    headers_from_env: dict[str, str] = runtime(dict, "Headers whose values are read from environment variables.")
    wait_for_ready_timeout: float = runtime(1800.0, "Seconds to wait for the server at the start.", gt=0)
    skip_model_check: bool = runtime(False, "Do not check that the server serves the model.")

    @model_validator(mode="after")
    def _urls(self):
        for key, given in (("base_url", [self.base_url]), ("admin_base_url", self.admin_base_url or [])):
            for url in given:
                require_url(key, url)
        return self


class ConcurrencyConfig(Config):
    """Bounds of the number of episodes in flight; equal bounds pin it."""

    initial_inflight: int | None = runtime(None, "Episodes in flight at the start.", ge=1)
    min_inflight: int = runtime(1, "Fewest episodes in flight.", ge=1)
    max_inflight: int | None = runtime(1024, "Most episodes in flight; no bound when None.", ge=1)

    @model_validator(mode="after")
    def _ordered(self):
        faults = []
        if None not in (self.min_inflight, self.max_inflight) and self.min_inflight > self.max_inflight:
            faults.append(("min_inflight", f"must be ≤ max_inflight = {self.max_inflight}, not {self.min_inflight}"))
        if None not in (self.max_inflight, self.initial_inflight) and self.initial_inflight > self.max_inflight:
            faults.append(
                ("initial_inflight", f"must be ≤ max_inflight = {self.max_inflight}, not {self.initial_inflight}")
            )
        if faults:
            raise Refused(faults)
        return self


class HeartbeatConfig(Config):
    """A URL that is called while the process lives."""

    url: str = runtime(..., "URL to call.")


class FilesystemBroadcast(Config):
    """New weights through files."""

    type: Literal["filesystem"] = runtime("filesystem", "Kind of transfer.")
    timeout: float = runtime(1200.0, "Seconds to wait at each stage of the handshake.", gt=0)


class NcclBroadcast(Config):
    """New weights from GPU to GPU."""

    type: Literal["nccl"] = runtime("nccl", "Kind of transfer.")
    backend: Literal["nccl", "gloo"] = runtime("nccl", "gloo: the same transfer between CPUs.")
    host: str = runtime("localhost", "Host of the trainer, where engines meet it.")
    port: int = runtime(0, "Port of the meeting; 0: taken from the system.", ge=0, le=65535)
    timeout: float = runtime(1200.0, "Seconds to wait at each stage of the handshake.", gt=0)
    quantize_in_weight_transfer: bool = semantic(False, "Send the engine's quantised form.")


WeightBroadcast = Annotated[FilesystemBroadcast | NcclBroadcast, Field(discriminator="type")]


class FilesystemTransport(Config):
    """Batches through files."""

    type: Literal["filesystem"] = runtime("filesystem", "Kind of transport.")


class ZmqTransport(Config):
    """Batches over ZMQ: publisher on `port`, readiness on `port` + 1."""

    type: Literal["zmq"] = runtime("zmq", "Kind of transport.")
    host: str = runtime("localhost", "Host of the orchestrator.")
    port: int = runtime(5555, "Port of the publisher; 0: taken from the system, published in the run directory.", ge=0)


RolloutTransport = Annotated[FilesystemTransport | ZmqTransport, Field(discriminator="type")]


MOST_SIGNAL_S = 65535  # of sbatch --signal
TEXTS = ("job_name", "partition", "account", "constraint", "nodelist", "exclude")
OURS = {
    "nodes": "deployment", "ntasks": "deployment", "ntasks-per-node": "deployment", "cpus-per-task": "deployment",
    "gres": "deployment", "gpus": "deployment", "gpus-per-node": "deployment", "partition": "slurm.partition",
    "account": "slurm.account", "time": "slurm.time", "mem": "slurm.memory", "constraint": "slurm.constraint",
    "nodelist": "slurm.nodelist", "exclude": "slurm.exclude", "job-name": "slurm.job_name",
    "signal": "slurm.save_before_end", "exclusive": "slurm.exclusive", "chdir": "slurm.project_dir",
    **dict.fromkeys(("array", "comment", "error", "export", "hold", "output", "parsable", "test-only", "wait", "wrap")),
}  # fmt: skip
"""Options of sbatch that are not the user's to give, and the key that says the same; None: the launcher's own."""
SHORT = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "p": "partition", "A": "account", "t": "time",
    "C": "constraint", "w": "nodelist", "x": "exclude", "J": "job-name", "D": "chdir", "a": "array", "e": "error",
    "H": "hold", "o": "output", "W": "wait",
}  # fmt: skip


def _fault_of_text(text: str | None) -> str | None:
    """Why a text can be no value of sbatch: it stands in a line of a script."""
    if text is None or (text.strip() and text.isprintable() and '"' not in text and "\\" not in text):
        return None
    return f"expected one line of text without quotation marks and backslashes, not {text!r}"


def _fault_of_option(text: str) -> str | None:
    """Why a text is no option that sbatch may be given."""
    if not re.fullmatch(r"--[a-z][a-z-]+(=.+)?|-[A-Za-z].*", text) or _fault_of_text(text):
        return f"expected one option of sbatch as --name or --name=value, not {text!r}"
    name = text[2:].partition("=")[0] if text.startswith("--") else SHORT.get(text[1], text[1])
    if name in OURS and text != "--mem=0":  # all memory of each node: `memory` has no word for it
        return f"{text}: set {key} instead" if (key := OURS[name]) else f"{text}: --{name} is set by the launcher"
    return None


class SlurmConfig(Config):
    """Submission to a SLURM cluster."""

    job_name: str = runtime("prime-rl", "Job name.")
    project_dir: str = runtime(".", "Directory of the project; every node must see it.")
    template_path: str | None = runtime(None, "A script template (Jinja) in place of the built-in one.")
    partition: str = runtime("cluster", "Partition; the cluster's default one where none is called `cluster`.")
    account: str | None = runtime(None, "Account.")
    time: str | None = runtime(None, "Time limit, as SLURM writes it; the run is continued by requeueing.")
    memory: str | None = runtime(None, "Memory of each node (`64G`); the cluster's default when absent.")
    constraint: str | None = runtime(None, "Features that the nodes must have.")
    nodelist: str | None = runtime(None, "Nodes to use.")
    exclude: str | None = runtime(None, "Nodes to avoid.")
    exclusive: bool | Literal["auto"] = runtime(
        "auto", "Share the nodes with no other job; auto: when all their GPUs are taken, or several nodes."
    )
    extra: list[str] = runtime(list, "More options of sbatch, one an entry.")
    pre_run_command: str | None = runtime(None, "Shell line run once before the launch.")
    save_before_end: int = runtime(
        120, "Seconds before the time limit at which the run saves and leaves.", ge=1, le=MOST_SIGNAL_S
    )
    cleanup_grace_period: float = runtime(10.0, "Most seconds that others get to end after a failure.", ge=0)
    shared_fs: bool = runtime(True, "Whether all nodes see the same files.")

    @model_validator(mode="after")
    def _readable(self):
        faults = [(key, fault) for key in TEXTS if (fault := _fault_of_text(getattr(self, key)))]
        faults += [(f"extra.{i}", fault) for i, text in enumerate(self.extra) if (fault := _fault_of_option(text))]
        for key, read in (("time", slurm.minutes), ("memory", slurm.megabytes)):
            value = getattr(self, key)
            try:
                read(value) if value is not None else None
            except ValueError as error:
                faults.append((key, f"{error}, not '{value}'"))
        if self.time and not faults and slurm.minutes(self.time) * 60 <= self.save_before_end:
            fault = f"{self.save_before_end} s leave nothing of time = {self.time}; lower it"
            faults.append(("save_before_end", fault))
        if faults:
            raise Refused(faults)
        return self


class GcConfig(Config):
    """Python's garbage collector, run at fixed steps."""

    interval: int = runtime(50, "Steps between collections.", ge=1)
