"""The router in front of several engines: where requests go, what goes to all, an engine that is gone."""

import asyncio
import json

import pytest
from aiohttp import ClientSession, web

from rlmake.inference.router import Router, merged


class Engine:
    """A server that says who it is and notes what it is asked."""

    def __init__(self, name: str):
        self.name, self.asked = name, []

    async def start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.path_qs, await request.text()))
        if request.path == "/metrics":
            return web.Response(text='# HELP n\nn{a="1"} 2\nkv_usage_perc{a="1"} 0.25\nlone 1\n')
        if request.path == "/slow":
            await asyncio.sleep(30)
        return web.json_response({"engine": self.name, "id": request.headers.get("X-Session-ID")}, status=201)


@pytest.fixture
async def pair():
    """`(two engines, their router's URL, a client)`."""
    engines = [Engine("a"), Engine("b")]
    urls = [await engine.start() for engine in engines]
    runner = web.AppRunner(Router([f"{url}/v1" for url in urls]).app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with ClientSession() as client:
        yield engines, f"http://127.0.0.1:{runner.addresses[0][1]}", client
    await runner.cleanup()
    for engine in engines:
        await engine.runner.cleanup()


async def test_a_session_stays_on_its_engine_and_bodies_pass_unchanged(pair):
    engines, url, client = pair
    body, where = json.dumps({"text": "naïve 🧪"}), {}
    for session in [f"s{i}" for i in range(40)] * 2:
        headers = {"X-Session-ID": session}
        async with client.post(f"{url}/v1/completions?x=1", data=body, headers=headers) as answer:
            assert answer.status == 201
            found = await answer.json()
        assert found["id"] == session and where.setdefault(session, found["engine"]) == found["engine"]
    assert set(where.values()) == {"a", "b"}
    assert engines[0].asked[0] == ("POST", "/v1/completions?x=1", body)


async def test_what_changes_an_engine_goes_to_all(pair):
    engines, url, client = pair
    async with client.post(f"{url}/update_weights", json={"weight_dir": "x"}) as answer:
        assert answer.status == 201
    assert [len(engine.asked) for engine in engines] == [1, 1]


async def test_requests_without_a_session_go_to_the_least_busy(pair):
    engines, url, client = pair
    slow = asyncio.ensure_future(client.get(f"{url}/slow"))
    while not any(engine.asked for engine in engines):
        await asyncio.sleep(0.01)
    idle = next(engine for engine in engines if not engine.asked)
    for _ in range(3):
        async with client.get(f"{url}/v1/models") as answer:
            assert (await answer.json())["engine"] == idle.name
    slow.cancel()


async def test_an_engine_that_is_gone(pair):
    """Requests go to the other one; health is that of all; with none left the answer is 503 and names the last."""
    engines, url, client = pair
    await engines[0].runner.cleanup()
    for session in range(8):
        async with client.get(f"{url}/v1/models", headers={"X-Session-ID": str(session)}) as answer:
            assert (await answer.json())["engine"] == "b"
    async with client.get(f"{url}/health") as answer:
        assert answer.status == 503
    await engines[1].runner.cleanup()
    async with client.get(f"{url}/v1/models") as answer:
        assert answer.status == 503 and "no engine answers" in (await answer.json())["error"]["message"]


async def test_metrics_of_all_as_those_of_one(pair):
    _, url, client = pair
    async with client.get(f"{url}/metrics") as answer:
        assert await answer.text() == '# HELP n\nn{a="1"} 4\nkv_usage_perc{a="1"} 0.25\nlone 2\n'
    assert merged(["x 1\n", "y 2\n"]) == "x 1\ny 2\n"
