"""Weight versions from the trainer to whoever serves them: the handshake of four markers in `broadcasts/step_<n>/`.

    .sender_ready     the trainer's master offers version n (`version.json` is there already) and blocks
    .receiver_ready   the receiver accepts
    .started          the transfer begins (in-memory transports; files are complete before the offer)
    .finished         the trainer commits, the receiver installs

By files, the folder holds the weights themselves (HF names, safetensors) and `version.json` lists them with sizes and
hashes, so a receiver never serves a torn version. By a group (`rlmake.transport.collective`) the folder holds the
markers only, and `version.json` says where to meet and what will come; a receiver that cannot come leaves
`.receiver_refused` with the reason instead, and the version is offered again by files. Only this module writes or
removes what is in `broadcasts/`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from loguru import logger

from rlmake.core import jsonio
from rlmake.core.errors import UserError
from rlmake.core.jsonio import content_hash, hash_file, read_json, write_bytes, write_json
from rlmake.core.rundir import RunContext, broadcast_dir, numbered
from rlmake.transport.batches import wait_for

SCHEMA = 1
RECORD = "version.json"
OFFERED, ACCEPTED, STARTED, FINISHED = ".sender_ready", ".receiver_ready", ".started", ".finished"
REFUSED = ".receiver_refused"
TIMEOUT = 1200.0
POLL_S = 0.005


class Offered(msgspec.Struct):
    """A file of a version."""

    path: str
    size: int
    blake3: str


class Record(msgspec.Struct):
    """`version.json`, as far as it is the same for all transports."""

    run_id: str | None
    attempt: int
    version: int
    transport: str
    kind: str
    files: list[Offered]
    checksum: str


def _files(folder: Path, hashes: dict[str, str]) -> list[dict]:
    """`hashes`: of what was meant to be written, by path; a file that is not among them is read for its own."""
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and path.name != RECORD
    }
    return [
        {
            "path": name,
            "size": path.stat().st_size,
            "blake3": hashes.get(name) or hash_file(path, mapped=True, parallel=True),
        }
        for name, path in paths.items()
    ]


def damaged(folder: Path, file: dict, hashes: bool = True) -> bool:
    """Whether a file of a version's record is missing or another than was offered."""
    path = folder / file["path"]
    if not path.is_file() or path.stat().st_size != file["size"]:
        return True
    return hashes and hash_file(path, parallel=True) != file["blake3"]


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

    def offer(
        self,
        version: int,
        transport: str = "filesystem",
        kind: str = "full",
        group: dict | None = None,
        hashes: dict[str, str] | None = None,
    ) -> None:
        """Write `version.json` over what lies in the folder, then `.sender_ready`. `kind`: full or adapter.

        `group`: `rendezvous`, `plan`, `dtype` and `digests` of a transfer by a group. `hashes`: of files in the folder,
        as far as who wrote them knows them.
        """
        if self.version != version or not self.folder.is_dir():
            self.prepare(version)
        files = _files(self.folder, hashes or {})
        record = {
            "schema": SCHEMA, "run_id": self.ctx.run_id, "attempt": self.ctx.attempt, "version": version,
            "transport": transport, "kind": kind, "files": files, "checksum": content_hash(files),
        }  # fmt: skip
        if group is not None:
            record["group"] = group
        write_json(self.folder / RECORD, record)
        (self.folder / OFFERED).touch()

    def wait_receiver(self, timeout: float = TIMEOUT) -> dict:
        """Until the receiver answers; `UserError` after `timeout` seconds names it.

        What it says: `{}` for files; `{"receivers": [names]}` or `{"refused": reason}` for a group.
        """
        accepted, refused = self.folder / ACCEPTED, self.folder / REFUSED
        what = f"the orchestrator (or online evaluation) to accept weights v{self.version} ({accepted})"
        wait_for(lambda: accepted.exists() or refused.exists(), timeout, what, POLL_S)
        said = refused if refused.exists() else accepted
        return json.loads(said.read_bytes() or b"{}")

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
    write: Callable[[Path | None], dict[str, str] | None],
    on_master: Callable[[Callable[[], None]], None],
    *,
    timeout: float = TIMEOUT,
    kind: str = "full",
) -> None:
    """Publish `version` by files; every rank calls it, only the master has a `sender`.

    `write(folder)` is collective: it gathers and, where `folder` is not None, writes; what it returns are hashes of
    files, see `WeightSender.offer`. `on_master(action)` runs `action` on the master and holds every rank until it has
    ended, raising everywhere if it failed: no rank may run ahead into the next collective while the master still waits
    for the receiver.
    """

    def prepare() -> None:
        sender.prepare(version)

    def handshake() -> None:
        sender.offer(version, kind=kind, hashes=hashes)
        sender.wait_receiver(timeout)
        sender.start()
        sender.finish()

    on_master(prepare)
    hashes = write(sender.folder if sender else None)
    on_master(handshake)


def newest_version(ctx: RunContext) -> tuple[int, Path] | None:
    """`(version, folder)` of the newest version that this attempt of the run has committed, if it is whole in files."""
    for version, folder in reversed(numbered(ctx.run_dir / "broadcasts").items()):
        if (folder / FINISHED).exists() and (record := read_record(folder)) and _is_of(record, ctx, version):
            return (version, folder) if (record["transport"], record["kind"]) == ("filesystem", "full") else None
    return None


def read_record(folder: Path) -> dict | None:
    """`version.json` of a folder; None where it is not there or not whole. Raises `UserError` for one that says less
    than it must."""
    try:
        found = read_json(folder / RECORD)
    except UserError:  # the sender is just making the folder anew
        return None
    if isinstance(found, dict) and found.get("schema", SCHEMA) != SCHEMA:
        return found  # left by another version of this program: foreign, not damaged
    return jsonio.checked(found, folder / RECORD, Record, SCHEMA)


def _is_of(record: dict, ctx: RunContext, version: int) -> bool:
    found = (record.get("schema"), record.get("run_id"), record.get("attempt"), record.get("version"))
    return found == (SCHEMA, ctx.run_id, ctx.attempt, version)


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
        record = read_record(folder)
        if record is None:
            return False
        ours = _is_of(record, self.ctx, version)
        if not ours and version not in self._refused:
            self._refused.add(version)
            logger.warning(
                f"{folder}: foreign weights refused: run {record.get('run_id')}, attempt {record.get('attempt')}, "
                f"version {record.get('version')}; expected {self.ctx.run_id}, {self.ctx.attempt}, {version}"
            )
        return ours and not (folder / REFUSED).exists()

    def record(self, version: int) -> dict:
        """What the sender says about an offered version. Raises `UserError` where it is not readable."""
        return jsonio.read_record(broadcast_dir(self.run_dir, version) / RECORD, Record, SCHEMA)

    def ack(self, version: int, receivers: list[str] | None = None) -> None:
        """Accept; `receivers`: who will take it in a group, in the order of their ranks."""
        said = b"" if receivers is None else json.dumps({"receivers": receivers}).encode()
        write_bytes(broadcast_dir(self.run_dir, version) / ACCEPTED, said)

    def refuse(self, version: int, reason: str) -> None:
        """A group cannot be joined: ask for the same version by files."""
        write_bytes(broadcast_dir(self.run_dir, version) / REFUSED, json.dumps({"refused": reason}).encode())

    def finished(self, version: int) -> bool:
        return (broadcast_dir(self.run_dir, version) / FINISHED).exists()

    def wait_finished(self, version: int, timeout: float = TIMEOUT) -> Path:
        """Until the trainer commits; then the verified folder. `UserError` on timeout or damage."""
        folder = broadcast_dir(self.run_dir, version)
        wait_for((folder / FINISHED).exists, timeout, f"the trainer to finish sending weights v{version} ({folder})")
        return self.verify(version)

    def verify(self, version: int, hashes: bool = True) -> Path:
        """The folder of a finished version; `UserError` names a file that is missing or not what was offered.

        `hashes=False`: by their sizes alone, where whoever loads the files hashes them.
        """
        folder = broadcast_dir(self.run_dir, version)
        for file in self.record(version)["files"]:
            if damaged(folder, file, hashes):
                raise UserError(f"{folder / file['path']}: missing or damaged, weights v{version} cannot be served")
        return folder
