"""Routes of episodes, and the commands that address them."""

import math
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from rlmake.dashboard import live, reports, timeline, transcript, view
from rlmake.dashboard.answers import reply
from rlmake.dashboard.confine import NotThere
from rlmake.dashboard.episodes import MAX_LIMIT, Episodes
from rlmake.dashboard.run import Run
from rlmake.dashboard.state import State
from rlmake.dashboard.table import Query as Chosen
from rlmake.dashboard.table import Row
from rlmake.dashboard.tokenizer import of_run
from rlmake.monitors.traces import read, records

MAX_BODY, FORGOTTEN = 1 << 20, 16 << 20  # bytes that are taken, and that are read to be refused


def episode_routes(app: FastAPI, state: State) -> None:
    runs = state.runs

    def following(run: str, wait: float = 0.6) -> tuple[Run, Episodes, bool]:
        found = runs.get(run)
        episodes = state.episodes(found)
        return found, episodes, episodes.refresh(wait)

    def located(run: str, line: int) -> tuple[Run, Episodes, Row, dict[str, Any]]:
        found, episodes, _ = following(run, 0.1)
        row = episodes.line(line)
        return found, episodes, row, state.records(found).get(row)

    @app.get("/api/runs/{run:run}/rollouts")
    def rollouts(run: str) -> Response:
        _, episodes, whole = following(run)
        return reply({**episodes.facets(), "etag": str(episodes.version), "whole": whole, **said(episodes)})

    @app.get("/api/runs/{run:run}/episodes")
    def listed(
        request: Request,
        run: str,
        sort: str = "arrival",
        order: str = "desc",
        offset: int = 0,
        limit: int = 100,
        etag: str = "",
    ) -> Response:
        query, offset, limit = chosen(request), max(offset, 0), min(max(limit, 1), MAX_LIMIT)
        newest = query == Chosen() and sort in ("arrival", "line") and order == "desc"
        _, episodes, whole = following(run, 0.1 if newest else 0.6)
        version = str(episodes.version)
        if etag and etag == version and whole:
            return reply({"unchanged": True, "etag": version})
        page = episodes.newest(offset, limit) if newest and not whole else None
        lines = page["total"] if page else episodes.table.count
        page = page or episodes.page(query, sort, order, offset, limit)
        return reply({**page, "lines": lines, "etag": version, "whole": whole, **said(episodes)})

    @app.get("/api/runs/{run:run}/episodes/histogram")
    def histogram(request: Request, run: str, key: str = "arrival", bars: int = 80) -> Response:
        _, episodes, whole = following(run)
        return reply({**episodes.histogram(chosen(request), key, min(max(bars, 8), 500)), "whole": whole})

    @app.get("/api/runs/{run:run}/episodes/series")
    def series(request: Request, run: str, after: int = 0) -> Response:
        _, episodes, _ = following(run)
        return reply({**episodes.series(chosen(request), after), "etag": str(episodes.version)})

    @app.get("/api/runs/{run:run}/episodes/find")
    def find(run: str, episode: str, step: int | None = None, kind: str | None = None, subset: str = "all") -> Response:
        _, episodes, _ = following(run, 5.0)
        return reply({"line": line_of(episodes, episode, Chosen(step, kind, subset))})

    @app.get("/api/runs/{run:run}/episodes/{line}/timeline")
    def times(run: str, line: int, trace: int = 0) -> Response:
        return reply(timeline.timeline(located(run, line)[3], trace))

    @app.get("/api/runs/{run:run}/episodes/{line}/message")
    def message(run: str, line: int, trace: int, node: int, start: int = 0, field: str = "content") -> Response:
        return reply(transcript.message(located(run, line)[3], trace, node, max(start, 0), field))

    @app.get("/api/runs/{run:run}/episodes/{line}/tokens")
    def tokens(run: str, line: int, trace: int = 0, node: Annotated[list[int] | None, Query()] = None) -> Response:
        found, _, row, record = located(run, line)
        return reply(token_view(state, found, row, record, trace, node))

    @app.get("/api/runs/{run:run}/episodes/{line}")
    def one(run: str, line: int, tokens: bool = False) -> Response:
        found, _, row, record = located(run, line)
        made = transcript.detail(record, row)
        if tokens:
            made["tokens"] = [token_view(state, found, row, record, t, None) for t in range(len(made["traces"]))]
        return reply(made)

    @app.get("/api/runs/{run:run}/live")
    def in_flight(run: str, etag: str = "") -> Response:
        one = runs.get(run)
        found = live.listed(one.traces, one.reach)
        return reply({"unchanged": True, "etag": etag} if etag and etag == found["etag"] else found)

    @app.get("/api/runs/{run:run}/live/{trace}")
    def in_flight_one(run: str, trace: str) -> Response:
        found = runs.get(run)
        return reply(live.one(found.traces, trace, found.reach))


def said(episodes: Episodes) -> dict[str, Any]:
    """How far the table is, and what of it can't be read."""
    return {"progress": episodes.progress, "torn": episodes.torn, "fault": episodes.fault}


def token_view(
    state: State, run: Run, row: Row, record: dict[str, Any], trace: int, nodes: list[int] | None
) -> dict[str, Any]:
    """Tokens of nodes, with texts where the tokenizer is there; `status` says why not, where not."""
    status, decode = of_run(run)
    if not any(node.get("token_ids") for node in transcript.nodes_of(transcript.trace_of(record, trace))):
        status, decode = "missing_token_ids", None
    notes, torn = state.records(run).notes(row)
    try:
        found = transcript.tokens(record, notes, trace, nodes, decode)
    except (ValueError, TypeError, OverflowError) as error:
        status, found = "decode_error", transcript.tokens(record, notes, trace, nodes, None)
        found["fault"] = str(error)
    return {**found, "status": status, "torn": torn}


def chosen(request: Request) -> Chosen:
    """The filters of a request. Raises `Refused` for a number that is none."""
    given = request.query_params

    def number(name: str, kind: type = float) -> Any:
        if (text := given.get(name, "")) == "":
            return None
        try:
            value = kind(text[:400])
            finite = math.isfinite(value) and abs(value) < 1e300
        except OverflowError:
            finite = False
        except ValueError:
            raise view.Refused(f"{name}: expected a number, not {text!r}") from None
        if not finite:
            raise view.Refused(f"{name}: expected a finite number")
        return value

    return Chosen(
        step=number("step", int), kind=given.get("kind") or None, subset=given.get("subset") or "all",
        env=given.get("env") or None, group=given.get("group") or None, text=given.get("q", "")[:200],
        errors_only=given.get("errors_only", "") in ("1", "true"), start=number("start"), end=number("end"),
        low=number("low"), high=number("high"),
    )  # fmt: skip


def line_of(episodes: Episodes, episode: str, cohort: Chosen) -> int:
    """The line of an episode (its id, name, or a trace's id) in a cohort. 404 when none, 409 when many."""
    rows = episodes.named(episode, cohort)
    if not rows:
        raise view.Refused(f"episode {episode!r} is not in this cohort", 404)
    if len(rows) > 1:
        raise view.Refused(f"episode {episode!r} stands {len(rows)} times in this cohort: give its line", 409)
    return rows[0].line


def checked(state: State, run: Run, file: str, name: str) -> dict[str, Any]:
    """Whether a citation's quote stands where it says, and where that is."""
    citation = reports.citations(run, file).get(name)
    if citation is None:
        raise NotThere(f"citation {name}")
    if "fault" in citation:
        return {"ok": False, **citation}
    try:
        cited = state.runs.get(citation["run"]) if "run" in citation else run
        episodes = state.episodes(cited)
        episodes.refresh(5.0)
        line = line_of(episodes, citation["episode"], Chosen(citation["step"], citation["kind"], citation["subset"]))
        record = state.records(cited).get(episodes.line(line))
    except (view.Refused, read.Torn) as error:
        return {"ok": False, "fault": str(error)}
    except NotThere as error:
        return {"ok": False, "fault": f"not there: {error}"}
    return {"run": cited.id, "line": line, **reports.check(citation, record)}


def view_routes(app: FastAPI, state: State) -> None:
    @app.post("/api/view")
    async def post(request: Request) -> Response:
        try:
            given = msgspec.json.decode(await body_of(request))
        except (msgspec.DecodeError, RecursionError):
            raise view.Refused("not JSON") from None
        command = view.validated(given)
        await run_in_threadpool(resolve, state, command)
        url = view.address(command)
        event = state.hub.send(command)
        answer = {
            "seq": event["seq"],
            "clients": state.hub.clients,
            "line": command.get("line"),
            "url": url,
        }
        if not state.hub.clients:
            fault = "no page is open; the command is kept for the next one that opens"
            return reply({"error": fault, **answer}, 409)
        return reply({"ok": True, **answer})

    @app.get("/api/view/events")
    async def events() -> StreamingResponse:
        return StreamingResponse(
            state.hub.events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )


async def body_of(request: Request) -> bytes:
    """The body. Raises `Refused` for one that is too large: of a very large one, or of one whose length is not told,
    no more is read than that; a client that still sends might not see the answer."""
    told = request.headers.get("content-length", "")
    length, body = int(told[:20]) if told.isdecimal() else None, bytearray()
    if length is None or length <= FORGOTTEN:
        async for part in request.stream():
            if len(body) <= MAX_BODY:
                body += part
            elif length is None:
                break
        if len(body) <= MAX_BODY:
            return bytes(body)
    raise view.Refused(f"the command is too large: at most {MAX_BODY} bytes", 413)


def resolve(state: State, command: dict[str, Any]) -> None:
    """Look up what a command names; an episode becomes a line. Raises `Refused` or `NotThere`."""
    run = state.runs.get(command["run"])
    if "report" in command:
        reports.located(run, command["report"])
    if not ("episode" in command or "line" in command):
        return
    episodes = state.episodes(run)
    episodes.refresh(5.0)
    cohort = Chosen(command["step"], command["kind"], command["subset"])
    if "line" in command:
        row = episodes.line(command["line"])
        if "episode" in command and command["episode"] not in (row.id, row.name, *row.trace_ids):
            raise view.Refused("line and episode are not the same episode", 409)
        if not cohort.takes(row):
            raise view.Refused(f"line {row.line} is not in this cohort", 404)
    else:
        command["line"] = line_of(episodes, command["episode"], cohort)
        row = episodes.line(command["line"])
    record = state.records(run).get(row)
    trace = transcript.trace_of(record, command.get("trace", 0))
    nodes = transcript.nodes_of(trace)
    if (branch := command.get("branch", -1)) >= (branches := len(records.leaves(nodes))):
        raise view.Refused(f"branch {branch}: trace {command.get('trace', 0)} has {branches} branches", 404)
    count = len(nodes)
    for number, item in enumerate(command.get("highlight") or []):
        if item["node"] >= count:
            raise view.Refused(f"highlight.{number}.node: trace {command.get('trace', 0)} has {count} messages", 404)
