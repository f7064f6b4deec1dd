"""Local stand-ins of the services that monitors write to: they answer what the SDKs need and keep what they got."""

import gzip
import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """`calls`: `(method, path, body)` in order. `answer(method, path, body)` gives a reply's `(status, JSON)`."""

    def __init__(self):
        self.calls: list[tuple[str, str, Any]] = []
        self.url = ""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        return 200, {}


@contextmanager
def serving(service: Service):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def _handle(self):
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            try:
                body = json.loads(data) if data else None
            except ValueError:
                body = data
            service.calls.append((self.command, self.path, body))
            status, reply = service.answer(self.command, self.path, body)
            payload = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = do_PATCH = _handle

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Wandb(Service):
    """Runs are upserted, files streamed, views listed and saved. `refuse`: so many requests for a run fail first."""

    def __init__(self, refuse: int = 0):
        super().__init__()
        self.refuse, self.views = refuse, []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path != "/graphql":
            return 200, {"exitcode": None, "limits": {}}
        variables = body.get("variables") or {}
        operation = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
        name = operation[1] if operation else ""
        if name == "UpsertBucket":
            if self.refuse > 0:
                self.refuse -= 1
                return 404, {"errors": [{"message": "no such run yet"}]}
            project = {"id": "p", "name": variables["project"] or "prime-rl", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": variables["name"], "displayName": variables["displayName"], "project": project}
            bucket |= {"description": None, "config": "{}", "sweepName": None, "historyLineCount": 0}
            return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in variables["files"]]
            return 200, {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        if name.startswith("Upsert") and "View" in name:
            self.views.append({"id": "v", "displayName": variables["displayName"], "spec": variables["spec"]})
            return 200, {"data": {"upsertView": {"view": {"id": "v", "name": "v"}, "inserted": True}}}
        viewer = {"id": "u", "entity": "me", "username": "me", "name": "me", "flags": "{}", "teams": {"edges": []}}
        versions = {"cliVersionInfo": {"max_cli_version": "9.9.9"}, "latestLocalVersionInfo": None, "features": []}
        views = {"edges": [{"node": view} for view in self.views]}
        return 200, {"data": {"viewer": viewer, "serverInfo": versions, "project": {"allViews": views}}}

    def history(self) -> list[dict[str, Any]]:
        """The rows of all writers, in the order they came."""
        streams = [body["files"] for _, path, body in self.calls if path.endswith("/file_stream") and body.get("files")]
        return [
            json.loads(line)
            for files in streams
            for line in files.get("wandb-history.jsonl", {"content": []})["content"]
        ]

    def runs(self) -> list[dict[str, Any]]:
        return [body["variables"] for _, path, body in self.calls if path == "/graphql" and "UpsertBucket" in str(body)]

    def ends(self) -> list[int]:
        """Exit codes of the writers that ended the run."""
        bodies = [body for _, path, body in self.calls if path.endswith("/file_stream")]
        return [body["exitcode"] for body in bodies if body.get("complete") is True]


class Prime(Service):
    """`status`: what registering answers with."""

    def __init__(self, status: int = 200):
        super().__init__()
        self.status, self.refused = status, ""  # and the name of an evaluation that is refused
        self.silent = threading.Event()  # while set, evaluations are not answered

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        while self.silent.is_set():
            time.sleep(0.05)
        if path.endswith("/evaluations/"):
            known = {"evaluation_id": f"e{len(self.calls)}", "name": body["name"]}
            return (400, {"detail": "no"}) if body["name"] == self.refused else (200, known)
        if "environmentshub" in path:
            return 200, {"data": {"id": "env1"}}
        if path.endswith("/external-runs"):
            return self.status, {"run": {"id": "r1", "name": body["name"]}, "detail": "this team is not enabled"}
        if "presign" in path:
            return 200, {"data": {"presignedUrl": f"{self.url}/object", "s3Key": "k"}}
        return 200, {"data": {}}

    def bodies(self, part: str, exact: bool = False) -> list[Any]:
        return [body for _, path, body in self.calls if (path.endswith(part) if exact else part in path)]
