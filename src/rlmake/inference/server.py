"""The inference server's process: `python -m rlmake.inference.server @ inference.json [--address-file FILE]`."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from rlmake.config import InferenceConfig, load_resolved
from rlmake.core import log
from rlmake.core.errors import RunFailed, UserError, entry_point
from rlmake.core.jsonio import write_bytes
from rlmake.core.procs import claim_port, die_with_parent, launcher_mark
from rlmake.core.rundir import RUN_ID, RunContext
from rlmake.transport.weights import newest_version

if TYPE_CHECKING:
    from rlmake.inference.engines.base import Engine

GRACE = 3  # seconds that open connections get at the end


def serve(cfg: InferenceConfig, address_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT. The address is written when the server answers; port 0 is chosen by the system.

    Raises `UserError` for a port in use or a model that can't be loaded, `RunFailed` when the engine dies.
    """
    sock = claim_port(cfg.server.host, cfg.server.port, "inference.server.port")
    # uvicorn ends in order at SIGTERM and then raises it again; while the model loads, leave at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            died = runner.run(_serve(cfg, sock, address_file))
    finally:
        sock.close()
    if died:
        raise RunFailed("the engine has failed; see the log above")
    logger.info("inference server ended")


async def _serve(cfg: InferenceConfig, sock: socket.socket, address_file: Path | None) -> bool:
    """Load the engine and serve it; whether it ended of itself."""
    import uvicorn

    from rlmake.inference.app import make_app, watching
    from rlmake.inference.engines import opened

    name = cfg.vllm.served_model_name or cfg.vllm.model
    died = closing = False

    def stop() -> None:
        """The engine has ended: of itself, unless we closed it."""
        nonlocal died
        died, server.should_exit = not closing, True

    def leave(number: int, frame: Any) -> None:
        """End the engine first, so that requests under way are answered (503) and nothing waits for them."""
        nonlocal closing
        closing = True
        threading.Thread(target=engine.close, daemon=True).start()
        uvicorn.Server.handle_exit(server, number, frame)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any):
        async with watching(engine, stop):
            # The socket listens already, so whoever reads the address now is answered as soon as this returns.
            address = _url(cfg.server.host, sock.getsockname()[1])
            if address_file is not None:
                write_bytes(address_file, address.encode())
            logger.info(f"serving {name} on {address}")
            yield

    async with opened(cfg) as engine:
        await asyncio.to_thread(catch_up, cfg, engine)
        app = make_app(engine, name, _run_id(cfg), cfg.server.liveness_timeout_seconds, lifespan, cfg.vllm.enable_lora)
        options = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": GRACE, "backlog": 2048}
        # Clients (httpx) drop idle connections after 5 s, uvicorn's default too: one who reuses such would fail.
        options["timeout_keep_alive"] = 75
        server = uvicorn.Server(uvicorn.Config(app, **options))
        server.handle_exit = leave
        await server.serve(sockets=[sock])
    return died


def catch_up(cfg: InferenceConfig, engine: "Engine") -> None:
    """Serve the newest version that this attempt of the run has committed to files, if there is one already.

    So an engine that died and was started again never answers with the weights of the run's beginning. An adapter needs
    no such care: until one is loaded, its name is not served.
    """
    if cfg.output_dir is None or (found := newest_version(RunContext.from_env(cfg.output_dir))) is None:
        return
    version, folder = found
    logger.info(f"v{version} of this run is there already")
    engine.update_weights(folder, version)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _url(host: str, port: int) -> str:
    """Where clients on this machine, or of the network where the host is a wildcard, find the server."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _run_id(cfg: InferenceConfig) -> str | None:
    """The run this server belongs to; None for one that was started alone."""
    if cfg.output_dir is not None:
        return RunContext.from_env(cfg.output_dir).run_id
    return os.environ.get(RUN_ID)


@entry_point
def main(argv: list[str] | None = None) -> None:
    die_with_parent()
    os.environ.update(launcher_mark() | os.environ)
    argv = sys.argv[1:] if argv is None else argv
    address_file = None
    if len(argv) == 4 and argv[2] == "--address-file":
        address_file = Path(argv[3])
        argv = argv[:2]
    if len(argv) != 2 or argv[0] != "@":
        raise UserError("usage: python -m rlmake.inference.server @ inference.json [--address-file FILE]")
    cfg = load_resolved(InferenceConfig, argv[1])
    log.setup("inference", cfg.log.level)
    serve(cfg, address_file)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # one of vLLM's processes: it would outlive a server that was killed
    die_with_parent()
