# Evaluations of exported weights by the suites below experiments/evals, and the agreement of trainer and engine on them.


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


rule parity:
    input:
        BUILD.parents("parity"),
    output:
        STORE + "/parity-{fp}/manifest.json",
    threads: BUILD.threads("parity")
    resources:
        local_gpus=BUILD.resource("parity", "local_gpus"),
        nodes=BUILD.resource("parity", "nodes"),
        tasks=BUILD.resource("parity", "tasks"),
        tasks_per_gpu=BUILD.resource("parity", "tasks_per_gpu"),
        mpi=BUILD.resource("parity", "mpi"),
        gres=BUILD.resource("parity", "gres"),
        runtime=BUILD.resource("parity", "runtime"),
        mem_mb=BUILD.resource("parity", "mem_mb"),
        slurm_partition=BUILD.resource("parity", "slurm_partition"),
        slurm_account=BUILD.resource("parity", "slurm_account"),
        slurm_extra=BUILD.resource("parity", "slurm_extra"),
    shell:
        "{JOB} parity {wildcards.fp}"


rule publish_parity:
    input:
        BUILD.published("{run}/parity/report.json"),
    output:
        "outputs/{run}/parity/report.json",
    params:
        link=BUILD.link("{run}/parity/report.json"),
    shell:
        "{JOB} publish {params.link}"
