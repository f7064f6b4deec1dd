"""`dashboard [output_dir …]`: command line, port, and the server's life."""

import argparse
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from setproctitle import setproctitle

from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError
from rlmake.dashboard.view import LONGEST, Hub

PORT, NEXT = 7788, 99
DEFAULT_DIR = "outputs"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="dashboard", description="Runs in a browser: metrics, traces, logs, configurations, reports. Read-only."
    )
    parser.add_argument(
        "output_dirs",
        nargs="*",
        metavar="output_dir",
        help="directories that hold runs (default: $PRL_OUTPUT_DIR, else outputs)",
    )
    parser.add_argument("--port", type=int, default=None, help=f"port (default: {PORT}, or the next free one)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name under which it may be asked",
    )
    args = parser.parse_args(argv)
    if "" in args.output_dirs:
        raise UserError("dashboard: output_dir is empty; expected a directory that holds runs")
    if not args.host:
        raise UserError("dashboard: --host is empty; expected an address to listen on, as 127.0.0.1")
    return args


def bind(host: str, port: int | None) -> socket.socket:
    """A bound socket. A port that was asked for is taken or refused; else the first free one from 7788 on."""
    last: OSError | None = None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port is not None else range(PORT, PORT + NEXT + 1):
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, candidate))
            found.listen(128)
            return found
        except (OSError, OverflowError) as error:
            found.close()
            last = error if isinstance(error, OSError) else OSError(str(error))
    why = last.strerror or last if last else "no port"
    if port is not None:
        raise UserError(f"--port {port} on {host}: {why}; leave it out to take the next free one")
    raise UserError(f"no port from {PORT} to {PORT + NEXT} on {host}: {why}")


class Server(uvicorn.Server):
    """Ends open event streams when it is asked to end."""

    def __init__(self, config: uvicorn.Config, hub: Hub):
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: object) -> None:
        self._hub.close()
        super().handle_exit(sig, frame)


def main(
    argv: list[str],
    dirs: Callable[[], list[Path]] | None = None,
    ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until interrupted. `dirs` takes the place of the command line's; `ready` is told the address."""
    args = parse(argv)
    given = [Path(folder) for folder in args.output_dirs or [os.environ.get("PRL_OUTPUT_DIR") or DEFAULT_DIR]]
    for folder in given if dirs is None else ():
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: not a directory")
        if not folder.exists() and args.output_dirs:
            raise UserError(f"{folder}: no such directory")
    bound = bind(args.host, args.port)
    from rlmake.dashboard.app import create  # FastAPI, which --help needs not wait for

    setproctitle("PRL::Dashboard")
    sys.setswitchinterval(0.001)  # answers do not wait for the threads that read long files
    port = bound.getsockname()[1]
    shown = "localhost" if args.host in ("127.0.0.1", "::1", "0.0.0.0", "::") else args.host
    app = create(dirs or given, args.host, tuple(args.allow_host))
    url = f"http://{shown}:{port}"
    print(f"dashboard of {', '.join(map(str, given)) if dirs is None else 'what is launched'}: {url}", flush=True)
    if ready is not None:
        ready(url)
    if args.host not in ("127.0.0.1", "::1", "localhost"):
        print("warning: it answers other machines too, without asking who they are", file=sys.stderr)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        server_header=False,
        http="h11",
        h11_max_incomplete_event_size=2 * LONGEST,  # an address with highlights is asked for again on reload
    )
    Server(config, app.state.dashboard.hub).run(sockets=[bound])
    return 0
