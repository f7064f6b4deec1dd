"""Runs with more in them than is read while somebody waits."""

import threading

import pytest
from dashboard_runs import Made, record, work

from rlmake.dashboard import episodes as of_episodes
from rlmake.dashboard import follow, metrics
from rlmake.dashboard.confine import NotThere
from rlmake.dashboard.episodes import Episodes
from rlmake.dashboard.table import Query
from rlmake.monitors.traces import layout, read
from rlmake.monitors.traces.read import Torn


def test_before_the_index_is_read_its_end_and_any_line_are_there(run, monkeypatch):
    """What the whole table says of them later; a torn line keeps its number."""
    root = run / "monitors/file/traces"
    index = layout.index(root)
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([*lines[:5], b'{"torn\n', *lines[5:]]))
    early, whole, go = Episodes(root), Episodes(root), threading.Event()
    assert whole.refresh(20) and len(whole.table) == 13
    monkeypatch.setattr(of_episodes, "head_start", lambda _: go.wait(60))
    assert not early.refresh(0.0) and not len(early.table)
    assert early.newest(0, 4) == whole.page(Query(), "arrival", "desc", 0, 4) | {"total": 13}
    assert early.newest(8, 5)["episodes"][-1]["line"] == 0 and early.newest(8, 6) is None
    for number in (0, 4, 6, 12):
        assert early.line(number).to_json() == whole.line(number).to_json() and whole.line(number).notes
        assert early.line(number).notes == whole.line(number).notes
    for one in (early, whole):
        with pytest.raises(Torn):
            one.line(5)
        with pytest.raises(NotThere):
            one.line(13)
    go.set()
    assert early.refresh(20) and early.page(Query(), "line", "asc", 0, 13) == whole.page(Query(), "line", "asc", 0, 13)


def test_an_episode_of_much_text_is_cut_and_each_text_fetched_on(ask, run):
    message = {"role": "user", "content": "é" * 90_000, "reasoning_content": "r" * 700}
    nodes = [{"parent": n - 1 if n else None, "message": message} for n in range(60)]
    made = Made(run, 2, 3)
    made.episode(work(900, 0, 9), record(nodes=nodes), trained=False).close()
    line = ask("episodes", limit=1)["episodes"][0]["line"]
    shown = ask(f"episodes/{line}")["traces"][0]["nodes"]
    assert shown[0]["cut"] is None and len(shown[0]["content"]) == 90_000
    assert (shown[-1]["cut"], shown[-1]["cut_reasoning"]) == (90_000, 700) and len(shown[-1]["content"]) == 500
    assert sum(len(node["content"]) + len(node["reasoning"]) for node in shown) < 5_000_000
    rest = ask(f"episodes/{line}/message", trace=0, node=59, start=500)
    assert len(rest["text"]) == 89_500 and rest["total"] == 90_000
    assert ask(f"episodes/{line}/message", trace=0, node=59, start=500, field="reasoning")["text"] == "r" * 200


def test_a_line_without_measure_is_no_row_and_is_not_kept(run, monkeypatch):
    monkeypatch.setattr(read, "LONGEST_LINE", 100_000)
    for module in (follow, metrics):
        monkeypatch.setattr(module, "READ_BYTES", 10_000)
    root = run / "monitors/file/traces"
    index = layout.index(root)
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([*lines[:3], b'{"id":"' + b"x" * 450_000 + b'"}\n', *lines[3:]]))
    episodes = Episodes(root)
    assert episodes.refresh(20) and (len(episodes.table), episodes.torn) == (13, 1)
    assert episodes.line(4).id == Episodes(root).line(4).id
    with pytest.raises(Torn):
        episodes.line(3)
    path = run / "monitors/file/metrics.jsonl"
    rows = len(path.read_bytes().splitlines())
    with open(path, "ab") as file:
        file.write(b'{"step":9,"x":"' + b"y" * 450_000 + b'"}\n{"step":9,"producer":"t","r":1}\n')
    followed = metrics.Metrics(path)
    followed.refresh(20)
    assert (followed.columns.rows, followed.torn, followed.progress) == (rows + 1, 1, 1.0)


def test_raw_rows_of_a_file_without_an_end_of_line_take_no_memory(ask, run, monkeypatch):
    """As a machine that lost power leaves it: zeros. And a line that is no row is counted, the rest is given."""
    import tracemalloc

    path = run / "monitors/file/metrics.jsonl"
    good = path.read_bytes()
    with open(path, "ab") as file:
        file.truncate(400 << 20)
    tracemalloc.start()
    try:
        found = ask("metrics", offset=len(good))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found["rows"], found["offset"], found["size"]) == ([], len(good), 400 << 20)
    assert peak < 3 * read.LONGEST_LINE
    with open(path, "ab") as file:
        file.write(b"\n" + good)
    first = ask("metrics", offset=len(good))
    rest = ask("metrics", offset=first["offset"])
    assert first["torn"] == 1 and len(first["rows"] + rest["rows"]) == len(good.splitlines())
    assert rest["offset"] == rest["size"]
