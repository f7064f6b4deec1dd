"""The jobs that Snakemake would run, asked of Snakemake itself: its API in a dry run, and its log's JOB_INFO events."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake.api import SnakemakeApi
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


@dataclass(frozen=True)
class SnakemakeJob:
    rule: str
    output: str


def dry_run(targets: Sequence[str], **config: Any) -> "tuple[list[SnakemakeJob], Any]":
    """`(jobs, driver)`: what `snakemake -n <targets> --config …` lists, `all` itself left out, and the build's view."""
    jobs: list[SnakemakeJob] = []

    def collect(record: logging.LogRecord) -> bool:
        """A filter that takes the jobs and lets nothing through to the terminal but errors."""
        if getattr(record, "event", None) == LogEvent.JOB_INFO and record.rule_name != "all":
            jobs.append(SnakemakeJob(record.rule_name, str(record.output[0])))
        return record.levelno >= logging.ERROR

    logger.addFilter(collect)
    try:
        with SnakemakeApi(OutputSettings(dryrun=True, enable_file_logging=False)) as api:
            flow = api.workflow(
                resource_settings=ResourceSettings(cores=1),
                config_settings=ConfigSettings(config=config),
                snakefile=Path("Snakefile"),
            )
            graph = flow.dag(DAGSettings(targets=list(targets), rerun_triggers={RerunTrigger.MTIME}))
            graph.execute_workflow(
                executor="dryrun",
                execution_settings=ExecutionSettings(lock=False, ignore_incomplete=True),
                scheduling_settings=SchedulingSettings(scheduler="greedy"),
            )
            return jobs, flow._workflow.globals["BUILD"]
    finally:
        logger.removeFilter(collect)
