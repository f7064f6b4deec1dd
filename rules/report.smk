# One page per run: curves, evaluations before and after, configuration, lineage.


rule report:
    input:
        BUILD.parents("report"),
    output:
        STORE + "/report-{fp}/manifest.json",
    shell:
        "{JOB} report {wildcards.fp}"


rule publish_report:
    input:
        BUILD.published("report"),
    output:
        "outputs/{run}/report.html",
    params:
        link=BUILD.link("report"),
    shell:
        "{JOB} publish {params.link}"
