"""Driving open pages: what a command may say, whom it reaches, and who may send one."""

import asyncio
import json

import pytest
from dashboard_runs import Made, record, report, work

from rlmake.dashboard.view import QUEUE, Hub, Refused, address, validated

COHORT = {"run": "demo", "step": 1, "kind": "train", "subset": "effective"}
EPISODE = COHORT | {"tab": "traces", "episode": "rev/100/0"}


def post(client, body, **headers):
    return client.post("/api/view", content=json.dumps(body), headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ([], 400, "object"), ({}, 400, "run: is required"), ({"run": "demo", "colour": 1}, 400, "colour: unknown key"),
        ({"run": "nope"}, 404, "not there"), ({"run": "demo", "tab": "trace"}, 400, "tab: expected one of"),
        ({"run": "demo", "step": 1}, 400, "all three or none"), (COHORT | {"step": True}, 400, "step: expected a"),
        (COHORT | {"step": -1}, 400, "from 0 on"), (COHORT | {"step": 1.5}, 400, "step: expected a whole"),
        (EPISODE | {"branch": -2}, 400, "from -1 on"), ({"run": "demo", "episode": "x"}, 400, "needs its cohort"),
        (COHORT | {"trace": 0}, 400, "needs an episode"), (COHORT | {"highlight": []}, 400, "needs an episode"),
        (EPISODE | {"episode": "rev/9/9"}, 404, "not in this cohort"), (COHORT | {"line": 99}, 404, "not there"),
        (EPISODE | {"line": 5}, 409, "not the same episode"), (EPISODE | {"trace": 3}, 404, "trace 3"),
        ({"run": "demo", "report": "none.md"}, 404, "not there"),
        ({"run": "demo", "report": "../x.md"}, 404, "not there"), (EPISODE | {"highlight": "x"}, 400, "a list of at"),
        (EPISODE | {"highlight": [{}] * 51}, 400, "a list of at most"),
        (EPISODE | {"highlight": [{"node": 0, "quote": "日" * 3300}] * 50}, 400, "1000000 at most"),
        (EPISODE | {"highlight": [{"node": 0, "quote": " "}]}, 400, "highlight.0.quote"),
        (EPISODE | {"highlight": [{"node": 44, "quote": "a"}]}, 404, "has 3 messages"),
        (EPISODE | {"highlight": [{"node": True, "quote": "a"}]}, 400, "highlight.0.node"),
        (EPISODE | {"highlight": [{"node": 0, "quote": "a", "field": "x"}]}, 400, "highlight.0.field"),
        (EPISODE | {"highlight": [{"node": 0, "quote": "a", "html": "x"}]}, 400, "highlight.0.html: unknown"),
    ],
)  # fmt: skip
def test_what_is_refused(client, run, body, status, words):
    answer = post(client, body)
    assert answer.status_code == status and words in answer.json()["error"]


def test_an_episode_that_stands_twice_needs_its_line(client, run):
    Made(run, 2, 0).episode(work(100, 0, 1), record()).close()
    assert post(client, EPISODE | {"subset": "all"}).status_code == 409
    answer = post(client, EPISODE | {"subset": "all", "line": 12})
    assert answer.json()["line"] == 12 and "no page is open" in answer.json()["error"]


def test_without_a_page_the_command_is_kept_and_its_address_given(client, run):
    report(run)
    answer = post(client, {"run": "demo", "report": "first.md"})
    assert answer.status_code == 409 and answer.json()["url"] == "/?run=demo&report=first.md"
    answer = post(client, EPISODE | {"highlight": [{"node": 2, "quote": "olleh"}]})
    assert answer.json()["line"] == 0 and "line=0" in answer.json()["url"] and answer.json()["seq"] == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403), ({"host": "localhost.evil.example"}, 403), ({"host": "10.0.0.1"}, 403),
        ({"host": ""}, 403), ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403),
        ({"origin": "http://localhost:1"}, 403), ({"origin": "http://["}, 403), ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 403), ({"host": "127.0.0.1:7788"}, 409), ({"host": "[::1]:7788"}, 409),
        ({"origin": "http://localhost:7788", "host": "localhost:7788"}, 409),
    ],
)  # fmt: skip
def test_only_this_page_and_this_machine_may_ask(client, run, headers, status):
    """A rebound name has a foreign Host; another site's page has a foreign Origin."""
    assert post(client, {"run": "demo"}, **headers).status_code == status
    if status == 403 and "content-type" not in headers:
        assert client.get("/api/runs", headers=headers).status_code == 403


def test_other_names_are_let_in_only_when_told(outputs):
    from starlette.testclient import TestClient

    from rlmake.dashboard.app import create

    def asked(host, allowed, name):
        client = TestClient(create([outputs], host, allowed), base_url=f"http://{name}")
        return client.get("/api/runs").status_code

    assert asked("127.0.0.1", ("box",), "box:7788") == 200 and asked("127.0.0.1", (), "box:7788") == 403
    assert asked("0.0.0.0", (), "10.1.2.3:7788") == 200 and asked("0.0.0.0", (), "rebound.example") == 403


def test_bodies_that_are_too_large_or_no_json(client, run):
    big = client.post("/api/view", content=b" " * (2 << 20), headers={"content-type": "application/json"})
    deep = client.post("/api/view", content=b"[" * 100_000, headers={"content-type": "application/json"})
    assert big.status_code == 413 and deep.status_code == 400


async def test_events_reach_every_tab_and_a_late_one_gets_the_last_command():
    hub = Hub()
    hub.send({"run": "a"})
    hub.send({"run": "b"})
    first, second = hub.events(), hub.events()
    assert b"retry: 2000" in await anext(first)
    event = json.loads((await anext(first)).partition(b"data: ")[2])
    assert event["run"] == "b" and event["seq"] == 2 and event["replayed"]
    await anext(second)
    waiting = [asyncio.create_task(anext(one)) for one in (first, second)]
    await asyncio.sleep(0.01)
    assert hub.clients == 2
    hub.send({"run": "c"})
    assert all(b'"run":"c"' in part and b"replayed" not in part for part in await asyncio.gather(*waiting))
    for n in range(QUEUE + 5):
        hub.send({"run": str(n)})
    assert json.loads((await anext(first)).partition(b"data: ")[2])["run"] == "5", "the oldest are dropped"
    await first.aclose()
    await second.aclose()
    assert hub.clients == 0


def test_an_address_carries_all_of_a_command():
    command = validated(EPISODE | {"branch": -1, "highlight": [{"node": 0, "quote": "a&b"}]})
    assert address(command).startswith("/?run=demo&step=1&kind=train&subset=effective&tab=traces")
    with pytest.raises(Refused):
        validated({"run": ""})
