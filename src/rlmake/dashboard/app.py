"""The routes. Handlers that read files are plain functions, so that they run beside the event loop."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from rlmake.dashboard import files, reports, view
from rlmake.dashboard.answers import reply
from rlmake.dashboard.app_episodes import checked, episode_routes, view_routes
from rlmake.dashboard.confine import NotThere, fault, inside, regular
from rlmake.dashboard.guard import Guard
from rlmake.dashboard.metrics import Columns, thin
from rlmake.dashboard.panels import panels
from rlmake.dashboard.paths import PREFIX, RunPaths
from rlmake.dashboard.run import Run
from rlmake.dashboard.state import State
from rlmake.monitors.traces import read

STATIC = Path(__file__).parent / "static"
MAX_SERIES = 64


def create(
    dirs: Sequence[Path] | Callable[[], list[Path]], host: str = "127.0.0.1", allowed: tuple[str, ...] = ()
) -> FastAPI:
    """The application over output directories, or over what a function says they are now."""
    state = State(dirs if callable(dirs) else lambda: list(dirs))
    app = FastAPI(title="rlmake dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.dashboard = state
    app.add_middleware(RunPaths, known=state.runs.known, patterns=lambda: patterns)
    app.add_middleware(Guard, host=host, allowed=allowed)

    @app.exception_handler(NotThere)
    async def not_there(_: Request, error: NotThere) -> Response:
        return reply({"error": f"not there: {error}"}, 404)

    @app.exception_handler(read.Torn)
    async def torn(_: Request, error: read.Torn) -> Response:
        return reply({"error": f"torn: {error}"}, 422)

    @app.exception_handler(view.Refused)
    async def refused(_: Request, error: view.Refused) -> Response:
        more = {"connection": "close"} if error.status == 413 else {}  # what was not read of the body is not waited for
        return reply({"error": str(error)}, error.status, **more)

    episode_routes(app, state)
    run_routes(app, state)
    view_routes(app, state)
    page_routes(app)
    patterns = [route.path_regex for route in app.routes if getattr(route, "path", "").startswith(PREFIX)]
    return app


def run_routes(app: FastAPI, state: State) -> None:
    runs = state.runs

    @app.get("/api/runs")
    def listed() -> Response:
        rows = [runs.meta(run) for run in runs.all().values()]
        rows.sort(key=lambda row: -row["updated"])
        return reply({"dirs": [str(folder) for folder in runs.dirs], "runs": rows})

    @app.get("/api/project")
    def project(force: bool = False) -> Response:
        return reply({"projects": [one.state(force=force) for one in state.projects()]})

    @app.get("/api/meta")
    def meta(run: str) -> Response:
        return reply(runs.meta(runs.get(run)))

    @app.get("/api/runs/{run:run}/logfiles")
    def logfiles(run: str, attempt: str = "latest") -> Response:
        return reply(files.log_files(runs.get(run), attempt))

    @app.get("/api/runs/{run:run}/log")
    def log(
        run: str,
        file: str,
        attempt: str = "latest",
        start: int | None = None,
        end: int | None = None,
        tail: int | None = None,
    ) -> Response:
        return reply(files.log_part(runs.get(run), attempt, file, start, end, tail))

    @app.get("/api/runs/{run:run}/configs")
    def configs(run: str, attempt: str = "latest") -> Response:
        return reply(files.configs(runs.get(run), attempt))

    @app.get("/api/runs/{run:run}/config")
    def config(run: str, file: str, attempt: str = "latest") -> Response:
        return reply(files.config(runs.get(run), attempt, file))

    @app.get("/api/runs/{run:run}/reports")
    def reports_of(run: str) -> Response:
        return reply({"reports": reports.listed(runs.get(run))})

    @app.get("/api/runs/{run:run}/report")
    def report(run: str, file: str) -> Response:
        return reply(reports.report(runs.get(run), file))

    @app.get("/api/runs/{run:run}/check")
    def check(run: str, file: str, id: str) -> Response:
        return reply(checked(state, runs.get(run), file, id))

    @app.get("/api/runs/{run:run}/metrics")
    def raw_metrics(run: str, offset: int = 0) -> Response:
        found = runs.get(run)
        try:
            path, stat = regular(found.metrics, found.reach)
        except OSError:
            return reply({"rows": [], "offset": 0, "size": 0, **told(found)})
        tail = read.Tail(path, max(0, offset))
        rows = [row for _, row in tail.rows(limit=4 << 20)]
        return reply({"rows": rows, "offset": tail.offset, "size": stat.st_size, "torn": tail.torn, **told(found)})

    @app.get("/api/runs/{run:run}/keys")
    def keys(run: str, etag: str = "") -> Response:
        """Names of the metrics; without them when they are those that `etag` stands for."""
        columns, said = followed(run)
        found = columns.keys()
        mark = f"{columns.started:x}.{len(found)}"
        return reply({"keys": None if etag == mark else found, "etag": mark, **said})

    @app.get("/api/runs/{run:run}/panels")
    def overview(run: str) -> Response:
        columns, said = followed(run)
        return reply({"sections": panels(tuple(columns.keys())), **said})

    @app.get("/api/runs/{run:run}/series")
    def series(run: str, key: Annotated[list[str], Query()], points: int = 600) -> Response:
        columns, said = followed(run)
        found = {}
        for name in key[:MAX_SERIES]:
            part = thin(columns.series(name), min(max(points, 10), 5000))
            found[name] = {
                "step": [int(step) for step in part["step"]], "time": [round(t, 2) for t in part["time"].tolist()],
                "value": part["value"].tolist(),
            }  # fmt: skip
        return reply({"series": found, **said})

    def followed(run: str) -> tuple[Columns, dict[str, Any]]:
        """The columns to draw from, and what is said of the file that they come from."""
        found = runs.get(run)
        metrics = state.metrics(found)
        metrics.refresh(wait=0.0 if metrics.long else 0.3)
        columns, whole = metrics.best()
        said = {"whole": whole, "progress": metrics.progress, "torn": metrics.torn, "size": metrics.size}
        return columns, {**said, **told(found)}


def told(run: Run) -> dict[str, str | None]:
    """Why there are no metrics, where a file is there that can't be read or they are written elsewhere."""
    return {"fault": run.elsewhere or fault(run.metrics, run.reach)}


def page_routes(app: FastAPI) -> None:
    fresh = {"cache-control": "no-cache"}

    @app.get("/static/{name:path}")
    def static(name: str) -> Response:
        if not re.fullmatch(r"[a-z_/]+\.(js|css|svg)", name):
            raise NotThere(name)
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        return Response(inside(STATIC, name, (STATIC.resolve(),)).read_bytes(), media_type=kind, headers=fresh)

    @app.get("/api/{rest:path}")
    def unknown(rest: str) -> Response:
        return reply({"error": f"no such route: /api/{rest}"}, 404)

    @app.get("/")
    def page() -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html", headers=fresh)
