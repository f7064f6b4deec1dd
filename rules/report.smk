# One page per run, and one per grid that compares its cells, with the numbers as CSV and JSON beside it.


rule report:
    input:
        BUILD.parents("report"),
    output:
        STORE + "/report-{fp}/manifest.json",
    shell:
        "{JOB} report {wildcards.fp}"


rule grid:
    input:
        BUILD.parents("grid"),
    output:
        STORE + "/grid-{fp}/manifest.json",
    shell:
        "{JOB} grid {wildcards.fp}"


rule publish_report:
    input:
        BUILD.published("{run}/report.html"),
    output:
        report("outputs/{run}/report.html", category="{run}"),
    params:
        link=BUILD.link("{run}/report.html"),
    shell:
        "{JOB} publish {params.link}"


rule publish_results:
    input:
        BUILD.published("{run}/results.{ext}"),
    output:
        "outputs/{run}/results.{ext}",
    params:
        link=BUILD.link("{run}/results.{ext}"),
    shell:
        "{JOB} publish {params.link}"
