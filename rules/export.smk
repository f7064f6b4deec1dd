# Checkpoints as Hugging Face weights: bf16 (what is shipped, evaluated and trained on), blockwise FP8, adapters of LoRA.


rule export:
    input:
        BUILD.exported("weights"),
    output:
        STORE + "/train-{fp}/exports/step_{n}/weights.json",
    resources:
        slurm_partition=BUILD.resource("export", "slurm_partition"),
        slurm_account=BUILD.resource("export", "slurm_account"),
    shell:
        "{JOB} export {wildcards.fp} {wildcards.n} weights"


rule export_fp8:
    input:
        BUILD.exported("weights-FP8"),
    output:
        STORE + "/train-{fp}/exports/step_{n}/weights-FP8.json",
    resources:
        slurm_partition=BUILD.resource("export", "slurm_partition"),
        slurm_account=BUILD.resource("export", "slurm_account"),
    shell:
        "{JOB} export {wildcards.fp} {wildcards.n} weights-FP8"


rule export_adapter:
    input:
        BUILD.exported("adapter"),
    output:
        STORE + "/train-{fp}/exports/step_{n}/adapter.json",
    resources:
        slurm_partition=BUILD.resource("export", "slurm_partition"),
        slurm_account=BUILD.resource("export", "slurm_account"),
    shell:
        "{JOB} export {wildcards.fp} {wildcards.n} adapter"


# The checkpoint that its evaluations say is the best, see [experiment.best].
rule best:
    input:
        BUILD.parents("best"),
    output:
        STORE + "/best-{fp}/manifest.json",
    shell:
        "{JOB} best {wildcards.fp}"


rule publish_weights:
    input:
        BUILD.published("{run}/weights"),
    output:
        directory("outputs/{run}/weights"),
    params:
        link=BUILD.link("{run}/weights"),
    shell:
        "{JOB} publish {params.link}"


rule publish_weights_of_step:
    input:
        BUILD.published("{run}/exports/step_{n}/weights"),
    output:
        directory("outputs/{run}/exports/step_{n}/weights"),
    params:
        link=BUILD.link("{run}/exports/step_{n}/weights"),
    shell:
        "{JOB} publish {params.link}"


rule publish_best:
    input:
        BUILD.published("{run}/exports/best/weights"),
    output:
        directory("outputs/{run}/exports/best/weights"),
    params:
        link=BUILD.link("{run}/exports/best/weights"),
    shell:
        "{JOB} publish {params.link}"


rule publish_fp8:
    input:
        BUILD.published("{run}/weights-FP8"),
    output:
        directory("outputs/{run}/weights-FP8"),
    params:
        link=BUILD.link("{run}/weights-FP8"),
    shell:
        "{JOB} publish {params.link}"


rule publish_fp8_of_step:
    input:
        BUILD.published("{run}/exports/step_{n}/weights-FP8"),
    output:
        directory("outputs/{run}/exports/step_{n}/weights-FP8"),
    params:
        link=BUILD.link("{run}/exports/step_{n}/weights-FP8"),
    shell:
        "{JOB} publish {params.link}"


rule publish_adapter:
    input:
        BUILD.published("{run}/adapter"),
    output:
        directory("outputs/{run}/adapter"),
    params:
        link=BUILD.link("{run}/adapter"),
    shell:
        "{JOB} publish {params.link}"


rule publish_adapter_of_step:
    input:
        BUILD.published("{run}/exports/step_{n}/adapter"),
    output:
        directory("outputs/{run}/exports/step_{n}/adapter"),
    params:
        link=BUILD.link("{run}/exports/step_{n}/adapter"),
    shell:
        "{JOB} publish {params.link}"
