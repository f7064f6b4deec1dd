"""Weight versions from the trainer to whoever serves them: the handshake of four markers in `broadcasts/step_<n>/`.

    .sender_ready     the trainer's master offers version n (`version.json` is there already) and blocks
    .receiver_ready   the receiver accepts
    .started          the transfer begins (in-memory transports; files are complete before the offer)
    .finished         the trainer commits, the receiver installs

By files, the folder holds the weights themselves (HF names, safetensors) and `version.json` lists them with sizes and
hashes, so a receiver never serves a torn version. Only this module writes or removes what is in `broadcasts/`.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.jsonio import content_hash, read_json, write_json
from rlmake.core.rundir import RunContext, broadcast_dir, numbered
from rlmake.transport.batches import wait_for

SCHEMA = 1
RECORD = "version.json"
OFFERED, ACCEPTED, STARTED, FINISHED = ".sender_ready", ".receiver_ready", ".started", ".finished"
TIMEOUT = 1200.0


def _hash(path: Path) -> str:
    """blake3 with all cores and mapped memory: weights are large."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def _files(folder: Path) -> list[dict]:
    return [
        {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "blake3": _hash(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and path.name != RECORD
    ]


class WeightSender:
    """The trainer's master side. One version at a time: `prepare → (write files) → offer → wait_receiver → start →
    finish`. `prepare` returns the fresh folder into which a filesystem transport writes before the offer."""

    def __init__(self, run_dir: Path, ctx: RunContext):
        self.run_dir, self.ctx = Path(run_dir), ctx
        self.version = -1

    @property
    def folder(self) -> Path:
        return broadcast_dir(self.run_dir, self.version)

    def prepare(self, version: int) -> Path:
        """An empty folder for `version`: shards of a broken earlier attempt never mix with new ones."""
        self.version = version
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self.folder

    def offer(self, version: int, transport: str = "filesystem", kind: str = "full") -> None:
        """Write `version.json` over what lies in the folder, then `.sender_ready`. `kind`: full or adapter."""
        if self.version != version or not self.folder.is_dir():
            self.prepare(version)
        files = _files(self.folder)
        record = {
            "schema": SCHEMA, "run_id": self.ctx.run_id, "attempt": self.ctx.attempt, "version": version,
            "transport": transport, "kind": kind, "files": files, "checksum": content_hash(files),
        }  # fmt: skip
        write_json(self.folder / RECORD, record)
        (self.folder / OFFERED).touch()

    def wait_receiver(self, timeout: float = TIMEOUT) -> None:
        """Until the receiver accepts; `UserError` after `timeout` seconds names it."""
        what = f"the orchestrator (or online evaluation) to accept weights v{self.version} ({self.folder / ACCEPTED})"
        wait_for((self.folder / ACCEPTED).exists, timeout, what)

    def start(self) -> None:
        (self.folder / STARTED).touch()

    def finish(self) -> None:
        """Commit, and remove what is older than the version before: that one may still be being read."""
        (self.folder / FINISHED).touch()
        for version, folder in numbered(self.run_dir / "broadcasts").items():
            if version < self.version - 1:
                shutil.rmtree(folder, ignore_errors=True)


def broadcast(
    sender: WeightSender | None,
    version: int,
    write: Callable[[Path | None], None],
    on_master: Callable[[Callable[[], None]], None],
    *,
    timeout: float = TIMEOUT,
    kind: str = "full",
) -> None:
    """Publish `version` by files; every rank calls it, only the master has a `sender`.

    `write(folder)` is collective: it gathers and, where `folder` is not None, writes. `on_master(action)` runs `action`
    on the master and holds every rank until it has ended, raising everywhere if it failed: no rank may run ahead into
    the next collective while the master still waits for the receiver.
    """

    def prepare() -> None:
        sender.prepare(version)

    def handshake() -> None:
        sender.offer(version, kind=kind)
        sender.wait_receiver(timeout)
        sender.start()
        sender.finish()

    on_master(prepare)
    write(sender.folder if sender else None)
    on_master(handshake)


class WeightReceiver:
    """The side that serves weights. `poll` finds an offer, `ack` accepts it, `wait_finished` returns its folder."""

    def __init__(self, run_dir: Path, ctx: RunContext):
        self.run_dir, self.ctx = Path(run_dir), ctx
        self._refused: set[int] = set()

    def poll(self, after: int) -> int | None:
        """The newest version offered beyond `after`, or None. Offers of another run or attempt are not served."""
        for version, folder in reversed(numbered(self.run_dir / "broadcasts").items()):
            if version <= after:
                return None
            if (folder / OFFERED).exists() and self._ours(folder, version):
                return version
        return None

    def _ours(self, folder: Path, version: int) -> bool:
        try:
            record = read_json(folder / RECORD)
        except UserError:  # the sender is just making the folder anew
            return False
        found = (record.get("schema"), record.get("run_id"), record.get("attempt"), record.get("version"))
        expected = (SCHEMA, self.ctx.run_id, self.ctx.attempt, version)
        if found != expected and version not in self._refused:
            self._refused.add(version)
            logger.warning(
                f"{folder}: foreign weights refused: (schema, run, attempt, version) {found}, expected {expected}"
            )
        return found == expected

    def ack(self, version: int) -> None:
        (broadcast_dir(self.run_dir, version) / ACCEPTED).touch()

    def finished(self, version: int) -> bool:
        return (broadcast_dir(self.run_dir, version) / FINISHED).exists()

    def wait_finished(self, version: int, timeout: float = TIMEOUT) -> Path:
        """Until the trainer commits; then the verified folder. `UserError` on timeout or damage."""
        folder = broadcast_dir(self.run_dir, version)
        wait_for((folder / FINISHED).exists, timeout, f"the trainer to finish sending weights v{version} ({folder})")
        return self.verify(version)

    def verify(self, version: int) -> Path:
        """The folder of a finished version; `UserError` names a file that is missing or not what was offered."""
        folder = broadcast_dir(self.run_dir, version)
        for file in read_json(folder / RECORD)["files"]:
            path = folder / file["path"]
            if not path.is_file() or path.stat().st_size != file["size"] or _hash(path) != file["blake3"]:
                raise UserError(f"{path}: missing or damaged, weights v{version} cannot be served")
        return folder
