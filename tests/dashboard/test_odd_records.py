"""Traces of another shape, names that look like routes, and commands that address nothing."""

import json
import os
import shutil
from urllib.parse import quote

import pytest
from dashboard_runs import Made, record, work, write


def stream(outputs, name, *records, index=None):
    """A run whose stream holds `records` as they are; `index` changes their rows."""
    traces = outputs / name / "monitors/file/traces"
    write(outputs / name / "logs/attempt_1/trainer.log", "hello\n")
    data, rows = b"", []
    for number, one in enumerate(records):
        line = json.dumps(one).encode()
        row = {"chunk": 0, "offset": len(data), "length": len(line), "id": f"e{number}", "trace_ids": [f"t{number}"]}
        rows.append(row | (index or {}))
        data += line + b"\n"
    write(traces / "stream/00000.jsonl", data.decode())
    write(traces / "stream.index.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return traces


def note(traces, *notes):
    data, rows = b"", []
    for trace, rest in notes:
        line = json.dumps({"version": 1, "trace_id": trace, "attempt": 1, **rest}).encode()
        row = {"chunk": 0, "offset": len(data), "length": len(line), "trace_id": trace, "streams": ["advantages"]}
        rows.append(json.dumps(row | {"info": rest.get("info", {})}))
        data += line + b"\n"
    write(traces / "annotations/orch/00000.jsonl", data.decode())
    write(traces / "annotations/orch.index.jsonl", "\n".join(rows) + "\n")


def one(number=0, **node):
    nodes = [{"parent": None, "message": {"role": "user", "content": "hi"}, "token_ids": [1, 2], "mask": [0, 1]} | node]
    return {"traces": [{"id": f"t{number}", "nodes": nodes}]}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (one(message="str"), "nodes[0].message"), (one(token_ids=5), "nodes[0].token_ids"), (one(mask=7), "mask"),
        (one(logprobs=["x"]), "logprobs"), (one(parent=[1]), "parent"), (one(semantic_parents=[3]), "semantic_parents"),
        ({"task": "x", "traces": []}, "$.task"), ({"traces": "x"}, "$.traces"), ({"traces": [1, 2]}, "$.traces[0]"),
        ({"traces": [{"rewards": [1]}]}, "rewards"), ({"traces": [{"agent": "x"}]}, "agent"),
        ({"traces": [{"calls": [{"usage": {"prompt_tokens": "x"}}]}]}, "prompt_tokens"), ({"errors": 3}, "$.errors"),
        ({"errors": [None]}, "errors[0]"), (one(message={"tool_calls": [None]}), "tool_calls[0]"),
        ({"traces": [{"timing": "x"}]}, "timing"), ({"traces": [{"nodes": ["x", 3]}]}, "nodes[0]"),
    ],
)  # fmt: skip
def test_a_record_of_another_shape_is_said_and_the_rest_stands(ask, outputs, bad, words):
    stream(outputs, "odd", one(), bad, one(2))
    assert ask("episodes", name="odd")["total"] == 3
    for route in ("", "/timeline", "/tokens", "/message"):
        assert words in ask(f"episodes/1{route}", status=422, name="odd", trace=0, node=0)["error"]
        assert ask(f"episodes/2{route}", name="odd", trace=0, node=0)


@pytest.mark.parametrize("length", [10**13, 2**40])
def test_an_index_that_names_too_much(ask, outputs, length):
    stream(outputs, "odd", one(), index={"length": length})
    assert str(length) in ask("episodes/0", status=422, name="odd")["error"]


@pytest.mark.parametrize(
    "row", [{"length": 10**30}, {"offset": -9}, {"chunk": -1}, {"turns": 10**400}, {"dispatch": {"step": 10**400}}]
)
def test_index_rows_that_no_table_holds_are_counted(ask, outputs, row):
    traces = stream(outputs, "odd", one(), one(1))
    with open(traces / "stream.index.jsonl", "a") as file:
        file.write(json.dumps({"chunk": 0, "offset": 0, "length": 9, "id": "x"} | row) + "\n")
    found = ask("episodes", name="odd")
    assert (found["total"], found["torn"], found["progress"]) == (2, 1, 1.0) and ask("rollouts", name="odd")[
        "torn"
    ] == 1


def test_annotations_of_another_shape_are_left_out_and_counted(ask, outputs):
    good = {"info": {"ship": {"step": 4}, "advantage": 0.5},
            "branches": [{"index": 0, "spans": [[1, 2]], "advantages": [0.5]}]}  # fmt: skip
    bad = [
        ("t0", {"info": {"ship": {"step": "x"}}}), ("t0", {"info": {"ship": {"step": [1]}}}),
        ("t0", {"info": {"advantage": 10**400}}), ("t0", {"info": {"advantage": "NaN"}}),
        ("t0", {"branches": "bad"}), ("t0", {"branches": [1, 2]}),
        ("t0", {"branches": [{"spans": [[-1000, 5], [0, "x"], 3]}]}),
        ("t0", {"branches": [{"index": 0, "spans": [[0, 9]], "advantages": "abc"}]}),
        ("t0", {"branches": [{"index": 0, "spans": [[0, 2]] * 1000, "advantages": [9.0]}]}),
    ]  # fmt: skip
    note(stream(outputs, "odd", one()), ("t0", good), *bad)
    found = ask("episodes", name="odd")
    assert found["torn"] == 4 and (found["episodes"][0]["step"], found["episodes"][0]["advantage"]) == (4, 0.5)
    tokens = ask("episodes/0/tokens", name="odd")
    assert tokens["torn"] == 4 and tokens["nodes"][0]["advantages"] == [None, 0.5]


def test_a_stream_without_its_index_is_named(ask, outputs):
    traces = stream(outputs, "odd", one())
    (traces / "stream.index.jsonl").unlink()
    for route in ("episodes", "rollouts"):
        assert ask(route, name="odd")["fault"].startswith("stream.index.jsonl is missing: 1 chunks")
    shutil.rmtree(traces)
    assert ask("episodes", name="odd")["fault"] is None


def test_live_rows_of_another_shape_are_counted(ask, outputs):
    live = stream(outputs, "odd") / "live"
    write(
        live / "abc.jsonl",
        '{"kind":"train","env":"x"}\n{"nodes":[{"message":{"content":"hey"}}]}\n{"links":[1]}\n{"pending":"x"}\n3\n',
    )
    write(live / "pending/q.json", '{"kind":"train","env":{"name":"e"}}\n')
    found = ask("live", name="odd")
    assert found["torn"] == 1 and [row["env"] for row in found["traces"]] == ["e"]
    trace = ask("live/abc", name="odd")
    assert len(trace["nodes"]) == 1 and trace["torn"] >= 3 and trace["pending"] == []


@pytest.mark.parametrize(
    "name", ["a/episodes", "a/live", "series", "b/episodes/series", "new\nline", "n%2F#?x=1", "a b"]
)
def test_a_name_like_a_route_or_with_any_character_is_a_name(client, outputs, name):
    Made(outputs / name).step(1).close()
    for shown in {quote(name), quote(name, safe="")}:
        for route in ("keys", "episodes", "episodes/series", "episodes/0", "episodes/0/tokens", "configs", "live"):
            answer = client.get(f"/api/runs/{shown}/{route}")
            assert answer.status_code == 200, (shown, route, answer.text)
        assert client.get(f"/api/runs/{shown}/series", params={"key": "loss/mean"}).json()["series"]["loss/mean"][
            "step"
        ]
        assert client.get(f"/api/runs/{shown}/nothing").status_code in (404, 422)
    assert client.get("/api/runs/none/keys").status_code == 404


def test_a_name_of_bytes_that_are_no_text_is_shown_and_leads_to_its_run(client, outputs):
    folder = os.fsencode(outputs) + b"/odd\xff\xfe/logs/attempt_1"
    os.makedirs(folder)
    with open(folder + b"/trainer.log", "w") as file:
        file.write("hello\n")
    (row,) = client.get("/api/runs").json()["runs"]
    assert row["id"] == "odd\ufffd\ufffd" and row["error"] is None
    assert client.get(f"/api/runs/{quote(row['id'])}/log", params={"file": "trainer.log"}).json()["text"] == "hello\n"


def test_commands_address_what_is_there(client, run):
    Made(run, 2, 3).episode(work(900, 0, 4), record()).close()
    base = {"run": "demo", "step": 1, "kind": "train", "subset": "effective", "line": 0}

    def post(**more):
        answer = client.post("/api/view", json=base | more)
        return answer.status_code, answer.json()["error"]

    assert post()[0] == 409 and "no page is open" in post(branch=0)[1] and "no page is open" in post(branch=-1)[1]
    for wrong in ({"step": 9}, {"kind": "eval"}):
        assert post(**wrong) == (404, "line 0 is not in this cohort")
    assert post(branch=77) == (404, "branch 77: trace 0 has 1 branches")
    assert post(step=10**30)[0] == 400 and post(branch=10**400)[0] == 400


@pytest.mark.parametrize("told", [True, False])
async def test_a_large_body_is_refused_before_it_is_read(outputs, told):
    """By its length where that is told, else as soon as too much has come."""
    from rlmake.dashboard.app import create

    read, sent = 0, []

    async def receive():
        nonlocal read
        read += 1 << 16
        return {"type": "http.request", "body": b" " * (1 << 16), "more_body": True}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [(b"content-length", b"1200000000")] if told else [(b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/api/view", "raw_path": b"/api/view", "query_string": b"",
             "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
    await create([outputs])(scope, receive, send)
    assert sent[0]["status"] == 413 and (b"connection", b"close") in sent[0]["headers"]
    assert read <= (1 << 17 if told else 2 << 20)


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "9" * 350, "9" * 5000])
def test_a_filter_that_is_no_number_is_refused(ask, value):
    for name in ("step", "low", "start"):
        assert name in ask("episodes", 400, **{name: value})["error"]
