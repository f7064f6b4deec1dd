# Checkpoints as bf16 Hugging Face weights: what is shipped, evaluated and trained on.


rule export:
    input:
        BUILD.checkpoint,
    output:
        STORE + "/train-{fp}/exports/step_{n}/weights.json",
    resources:
        slurm_partition=BUILD.resource("export", "slurm_partition"),
        slurm_account=BUILD.resource("export", "slurm_account"),
    shell:
        "{JOB} export {wildcards.fp} {wildcards.n}"


rule publish_weights:
    input:
        BUILD.published("weights"),
    output:
        directory("outputs/{run}/weights"),
    params:
        link=BUILD.link("weights"),
    shell:
        "{JOB} publish {params.link}"


rule publish_export:
    input:
        BUILD.published("weights"),
    output:
        directory("outputs/{run}/exports/step_{n}/weights"),
    params:
        link=BUILD.link("weights"),
    shell:
        "{JOB} publish {params.link}"
