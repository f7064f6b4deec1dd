# Trainings, SFT and RL. Checkpoints and logs are nobody's output: a job that fails or is killed keeps them.


rule train:
    input:
        BUILD.parents("train"),
    output:
        STORE + "/train-{fp}/manifests/step_{n}.json",
    threads: BUILD.threads("train")
    resources:
        local_gpus=BUILD.resource("train", "local_gpus"),
        nodes=BUILD.resource("train", "nodes"),
        tasks=BUILD.resource("train", "tasks"),
        tasks_per_gpu=BUILD.resource("train", "tasks_per_gpu"),
        mpi=BUILD.resource("train", "mpi"),
        gres=BUILD.resource("train", "gres"),
        runtime=BUILD.resource("train", "runtime"),
        mem_mb=BUILD.resource("train", "mem_mb"),
        slurm_partition=BUILD.resource("train", "slurm_partition"),
        slurm_account=BUILD.resource("train", "slurm_account"),
        slurm_extra=BUILD.resource("train", "slurm_extra"),
    shell:
        "{JOB} train {wildcards.fp} {wildcards.n}"


rule publish_checkpoint:
    input:
        BUILD.published("{run}/checkpoints/step_{n}"),
    output:
        directory("outputs/{run}/checkpoints/step_{n}"),
    params:
        link=BUILD.link("{run}/checkpoints/step_{n}"),
    shell:
        "{JOB} publish {params.link}"
