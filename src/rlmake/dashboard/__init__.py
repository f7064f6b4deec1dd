"""The dashboard: a local, read-only web page over run directories. docs/dashboard.md describes it.

    server.py        command line, port          app.py          routes, with app_episodes.py; `create(dirs)`
    guard.py         Host, Origin, headers       paths.py        which part of an address is the run
    confine.py       no path leaves a run
    runs.py          which runs there are        run.py          one run: its places and small files
    metrics.py       columns of metrics.jsonl    shape.py        what a record has to look like
    episodes.py      the table of episodes       transcript.py   one episode: text, tokens, overlays, times
    files.py         logs and configurations     reports.py      markdown and checked citations
    view.py          POST /api/view, events      project.py      targets, lineage, grids (from `rlmake plan`)
    static/          the page: plain modules, no build step; everything that comes from a run goes in as text

Nothing here writes below a run, imports torch, or asks any address but its own.
"""
