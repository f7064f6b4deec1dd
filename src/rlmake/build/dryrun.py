"""The jobs that Snakemake would run, asked of Snakemake itself: its API in a dry run, and its log's JOB_INFO events."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlmake.core.errors import UserError

if TYPE_CHECKING:
    from rlmake.build.workflow import Driver

SNAKEFILE = Path("Snakefile")


@dataclass(frozen=True)
class PlannedJob:
    """One job of Snakemake's plan; `reason` in Snakemake's words."""

    rule: str
    output: str
    wildcards: dict[str, str]
    reason: str


def dry_run(targets: Sequence[str], *, retry_failed: bool = False) -> "tuple[list[PlannedJob], Driver]":
    """`(jobs, driver)`: what `snakemake -n <targets>` lists, `all` itself left out, and the build's view behind it.

    Faults of experiments and targets end the process with one line each, as under `snakemake -n`; what Snakemake itself
    finds wrong is a `UserError`.
    """
    if not SNAKEFILE.is_file():
        raise UserError(f"no {SNAKEFILE} here; run this in the project's root")
    from snakemake.api import SnakemakeApi
    from snakemake.exceptions import WorkflowError
    from snakemake.logging import LogEvent, logger
    from snakemake.settings.enums import RerunTrigger
    from snakemake.settings.types import (
        ConfigSettings,
        DAGSettings,
        ExecutionSettings,
        OutputSettings,
        ResourceSettings,
        SchedulingSettings,
    )

    jobs: list[PlannedJob] = []

    def collect(record: logging.LogRecord) -> bool:
        """A filter that takes the jobs and lets nothing through to the terminal but errors."""
        if getattr(record, "event", None) == LogEvent.JOB_INFO and record.rule_name != "all":  # type: ignore[attr-defined]
            fields = record.__dict__
            jobs.append(
                PlannedJob(
                    fields["rule_name"], str(fields["output"][0]), dict(fields["wildcards"] or {}), fields["reason"]
                )
            )
        return record.levelno >= logging.ERROR

    logger.addFilter(collect)
    try:
        with SnakemakeApi(OutputSettings(dryrun=True, enable_file_logging=False)) as api:
            flow = api.workflow(
                resource_settings=ResourceSettings(cores=1),
                config_settings=ConfigSettings(config={"retry_failed": int(retry_failed)}),
                snakefile=SNAKEFILE,
            )
            graph = flow.dag(DAGSettings(targets=list(targets), rerun_triggers={RerunTrigger.MTIME}))
            graph.execute_workflow(
                executor="dryrun",
                execution_settings=ExecutionSettings(lock=False, ignore_incomplete=True),
                scheduling_settings=SchedulingSettings(scheduler="greedy"),
            )
            return jobs, flow._workflow.globals["BUILD"]
    except WorkflowError as error:
        raise UserError(" ".join(str(error).split())) from None
    finally:
        logger.removeFilter(collect)
