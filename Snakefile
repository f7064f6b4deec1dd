# What a project's experiments yield; see docs/experiments.md. Every rule makes one small manifest in the store (or one
# link to it) and depends on nothing but manifests; all that is known about them is asked of rlmake.build.
import shlex
import sys

from rlmake.build.workflow import attach

BUILD = attach(workflow, config)
JOB = f"{shlex.quote(sys.executable)} -m rlmake.cli.job"
STORE = "outputs/.store"
# A run's path never contains the name of something that a run yields.
RUN = r"(?!\.)(?:(?!(?:weights|checkpoints|exports|evals|parity)/)[^/]+/)*?[^/]+"


wildcard_constraints:
    fp=r"[0-9a-f]{16}",
    n=r"[1-9]\d*",
    run=RUN,
    suite=r"[^@]+",
    ext=r"csv|json",


localrules:
    all,
    best,
    data,
    grid,
    report,
    publish_data,
    publish_weights,
    publish_weights_of_step,
    publish_fp8,
    publish_fp8_of_step,
    publish_adapter,
    publish_adapter_of_step,
    publish_best,
    publish_checkpoint,
    publish_evaluation,
    publish_evaluation_of_step,
    publish_parity,
    publish_report,
    publish_results,


rule all:
    input:
        lambda wildcards: BUILD.all,


include: "rules/models.smk"
include: "rules/train.smk"
include: "rules/export.smk"
include: "rules/eval.smk"
include: "rules/report.smk"


onstart:
    BUILD.start()


onerror:
    BUILD.after_error()
