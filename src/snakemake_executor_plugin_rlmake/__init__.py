"""Snakemake finds executors as packages of this name: `executor: rlmake`. The code is `rlmake.build.executor`."""

from rlmake.build.executor import Executor, ExecutorSettings, common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
