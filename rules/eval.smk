# Evaluations of exported weights by the suites below experiments/evals.


rule evaluate:
    input:
        BUILD.parents("eval"),
    output:
        STORE + "/eval-{fp}/manifest.json",
    threads: BUILD.threads("eval")
    resources:
        local_gpus=BUILD.resource("eval", "local_gpus"),
        nodes=BUILD.resource("eval", "nodes"),
        tasks=BUILD.resource("eval", "tasks"),
        tasks_per_gpu=BUILD.resource("eval", "tasks_per_gpu"),
        mpi=BUILD.resource("eval", "mpi"),
        gres=BUILD.resource("eval", "gres"),
        runtime=BUILD.resource("eval", "runtime"),
        mem_mb=BUILD.resource("eval", "mem_mb"),
        slurm_partition=BUILD.resource("eval", "slurm_partition"),
        slurm_account=BUILD.resource("eval", "slurm_account"),
        slurm_extra=BUILD.resource("eval", "slurm_extra"),
    shell:
        "{JOB} eval {wildcards.fp}"


rule publish_evaluation:
    input:
        BUILD.published("{run}/evals/{suite}"),
    output:
        directory("outputs/{run}/evals/{suite}"),
    params:
        link=BUILD.link("{run}/evals/{suite}"),
    shell:
        "{JOB} publish {params.link}"


rule publish_evaluation_of_step:
    input:
        BUILD.published("{run}/evals/{suite}@step_{n}"),
    output:
        directory("outputs/{run}/evals/{suite}@step_{n}"),
    params:
        link=BUILD.link("{run}/evals/{suite}@step_{n}"),
    shell:
        "{JOB} publish {params.link}"
