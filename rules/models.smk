# Data sets, and models that are made or brought in rather than trained.


rule data:
    input:
        BUILD.parents("data"),
    output:
        STORE + "/data-{fp}/manifest.json",
    shell:
        "{JOB} data {wildcards.fp}"


rule model:
    input:
        BUILD.parents("model"),
    output:
        STORE + "/model-{fp}/manifest.json",
    shell:
        "{JOB} model {wildcards.fp}"


rule publish_data:
    input:
        BUILD.published("{run}/data"),
    output:
        directory("outputs/{run}/data"),
    params:
        link=BUILD.link("{run}/data"),
    shell:
        "{JOB} publish {params.link}"
