"""What a configuration's values point at: targets (parents), files and code of the user's, hub ids.

Every value that is a target's path is a dependency edge; nothing else declares edges. In what is hashed such a value is
replaced by what it stands for, so names and paths never count.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmake.build import local, names, revisions, store
from rlmake.build.fingerprint import leaves, replace_texts
from rlmake.config.faults import located
from rlmake.core.errors import ConfigError, Fault, UserError, nearest

if TYPE_CHECKING:
    from rlmake.build.registry import Registry

# Which keys name what, by the last parts of the dotted key.
FILES = re.compile(r"(source\.paths\.[^.]+(\.\d+)?|tokenizer\.text(\.\d+)?|source\.path)")
MODELS = re.compile(r"((.*\.)?model\.name|(.*\.)?vllm\.model|(.*\.)?tokenizer\.name)")
FROZEN = re.compile(r"(.*\.)?algo\.(teacher|sampling\.source)\.name")
DATA = re.compile(r"(.*\.)?data\.name")
TEMPLATES = re.compile(r"(.*\.)?chat_template")
CODE = re.compile(r"(.*\.)?import_path")
TASKSET = re.compile(r".*\.env\.taskset\.id")
ENV_CODE = re.compile(r".*\.env(\.id|\.agent\.harness\.id)")
ENV = re.compile(r".*\.env\..*")
LISTED = re.compile(r"\.env\.|source\.paths\.|tokenizer\.text\.")
POINTING = {
    "name",
    "model",
    "path",
    "id",
    "text",
    "import_path",
    "chat_template",
}  # last parts of all other keys


def _missing(artefact: store.Artefact, inside: str, data: dict[str, Any] | None) -> str | None:
    """Why there is no `inside` in an artefact, by its manifest or, before it is built, by the configuration of its
    `data`; None where there is, or nobody knows."""
    try:
        there = [row["path"] for row in store.read_brief(artefact.done_path)["files"]]
    except UserError:
        if data is None or data["source"]["type"] != "file":
            return None
        there = [f"{split}.{data['format']}" for split in data["source"]["paths"]]
    if any(path == inside or path.startswith(f"{inside}/") for path in there):
        return None
    return f"no such file in it{nearest(inside, there)}; there are {', '.join(there[:8])}"


class Edges:
    """Collects parents, revisions and faults of one configuration. `raw`: what the user wrote, to name keys by."""

    def __init__(self, registry: "Registry", raw: dict[str, Any], file: str):
        self.registry, self.raw, self.file = registry, raw, file
        self.parents: list[dict[str, Any]] = []
        self.revisions: dict[str, Any] = {}
        self.faults: list[Fault] = []
        self.broken = False  # a parent has faults, which are reported as its own

    def resolve(self, semantic: dict[str, Any]) -> dict[str, Any]:
        """`semantic` with every value that points at something replaced by what it stands for."""
        self.semantic = semantic
        return replace_texts(semantic, self._leaf)

    def fork(self, config: dict[str, Any]) -> None:
        """The checkpoint that a training is forked from, `resume.dir`. Resuming itself is the build's own affair."""
        table = config.get("resume") or (config.get("trainer") or {}).get("resume")
        if not table:
            return
        if table["dir"] is None:
            self._fault("resume", "the build resumes by itself; only resume.dir (a fork) has a meaning here")
        elif fault := names.fault_of_spelling(table["dir"]):
            self._fault("resume.dir", fault)
        elif names.is_output(table["dir"]):
            self._parent("resume.dir", table["dir"], "checkpoint")
            self._compare(config, table["dir"])
        elif not (complete := Path(table["dir"]) / "COMPLETE").is_file():
            self._fault("resume.dir", f"{table['dir']} is no complete checkpoint (it has no file COMPLETE)")
        else:
            self.revisions["resume.dir"] = self.registry.cache.hash(complete)

    def _compare(self, config: dict[str, Any], forked: str) -> None:
        """A fork is a training of the same kind, and has steps left to train."""
        try:
            target = self.registry.target(forked)
        except UserError:
            return  # which is a fault of its own
        kind, other = "rl" if "trainer" in config else "sft", self.registry.runs[target.run].kind
        if target.kind != "checkpoint" or target.step is None or other not in ("rl", "sft"):
            return
        if kind != other:
            self._fault(
                "resume.dir",
                f"{forked} is a checkpoint of kind '{other}', which '{kind}' cannot continue; "
                f'model.name = "outputs/{target.run}/weights" begins with its weights',
            )
        steps = (config.get("trainer") or config).get("max_steps")
        if steps is not None and target.step >= steps:
            self._fault("max_steps", f"{steps} steps are over at {forked}: a fork counts on from there")

    def _leaf(self, key: str, value: str) -> Any:
        if fault := names.fault_of_spelling(value):
            self._fault(key, fault, value)
            return value
        if names.is_output(value):
            model = MODELS.fullmatch(key) or FROZEN.fullmatch(key)
            wanted = "weights" if model else "data" if DATA.fullmatch(key) else None
            return self._parent(key, value, wanted)
        if key.rpartition(".")[2] not in POINTING and not LISTED.search(key):
            return value
        try:
            if CODE.fullmatch(key):
                name = value.partition(":")[2] if ".py:" in value else value
                return {"code": revisions.of_import(value, self.registry.cache), "name": name}
            if TASKSET.fullmatch(key):
                self.revisions[f"taskset:{value}"] = revisions.of_taskset(value, self.registry.cache)
                return value
        except UserError as error:
            self._fault(key, str(error), value)
            return value
        if ENV_CODE.fullmatch(key):
            if key.endswith(".harness.id") and (fault := revisions.fault_of_harness(value)):
                self._fault(key, fault, value)
                return value
            if (found := revisions.of_project(value, self.registry.cache)) is not None:
                self.revisions[f"code:{value}"] = found
            return value
        return self._file(key, value)

    def _file(self, key: str, value: str) -> Any:
        """A local path by its content; a hub id only when its revision is pinned."""
        required, model, data = FILES.fullmatch(key), MODELS.fullmatch(key), DATA.fullmatch(key)
        optional, frozen = TEMPLATES.fullmatch(key) or ENV.fullmatch(key), FROZEN.fullmatch(key)
        if not (required or model or data or optional or frozen):
            return value
        if fault := local.fault(key, value):
            self._fault(key, fault, value)
            return value
        path = Path(value)
        try:
            there = len(value) < 4096 and "\n" not in value and path.exists()
        except (OSError, ValueError):
            there = False
        pinned = dict(leaves(self.raw)).get("source.blake3") if key == "source.path" else None
        if there and (required or model or data or frozen or path.is_file()):
            content = self.registry.cache.tree(path)
            if pinned is not None and content != pinned:
                self._fault("source.blake3", f"{value} has another content, blake3 {content}")
            return {"content": content}
        if pinned is not None:  # to be fetched before the job runs, which checks it
            return {"content": pinned}
        if frozen and not self._served_elsewhere(key):
            self._fault(key, f"{value}: neither a directory nor a target; a server that knows it needs base_url", value)
        if optional or frozen:
            return value
        if required or value.startswith((".", "/", "~")) or value.count("/") > 1:
            self._fault(key, f"{value}: no such file or directory", value)
        elif data:
            if not dict(leaves(self.semantic)).get(key.removesuffix("name") + "revision"):
                self._fault(key, f"{value}: neither a file nor a target, and a hub data set needs data.revision", value)
        else:
            self._fault(
                key,
                f"{value}: neither a directory nor a target; a hub model comes in by an experiment of kind 'import'",
                value,
            )
        return value

    def _served_elsewhere(self, key: str) -> bool:
        """Whether a frozen model's table gives the address of its server; a shared table stands for its sources'."""
        written, table = dict(leaves(self.raw)), key.removesuffix("name")
        shared = re.sub(r"\.source\.\d+\.algo\.", ".algo.", table)
        return any(written.get(f"{name}base_url") for name in (table, shared))

    def _parent(self, key: str, value: str, wanted: str | None) -> Any:
        try:
            target = self.registry.target(value)
            if target.kind in ("eval", "parity", "report") or (wanted and target.kind != wanted):
                expected = f"a target of {wanted or 'data, weights or a checkpoint'}"
                self._fault(key, f"expected {expected}, not {value}", value)
                return value
            artefact = self.registry.artefact(target)
            data = self.registry.work(target.run).config if target.kind == "data" else None
            if target.inside and (missing := _missing(artefact, target.inside, data)):
                self._fault(key, f"{value}: {missing}", value)
                return value
        except ConfigError as error:  # the parent itself is at fault, or the two go in a circle
            self.faults += error.faults
            self.broken = True
            return value
        except UserError as error:
            if self.registry.experiments.is_broken(value.removeprefix(f"{names.OUTPUTS}/")):
                self.broken = True
            else:
                self._fault(key, str(error), value)
            return value
        if all(parent["ref"] != target.path for parent in self.parents):
            self.parents.append({"role": key, **artefact.record(), "ref": target.path})
        return {"parent": [artefact.fingerprint, artefact.step, artefact.kind], "rest": target.rest}

    def _fault(self, key: str, message: str, value: str | None = None) -> None:
        fault = located(message, written(self.raw, key, value), self.raw, self.file)
        if fault not in self.faults:
            self.faults.append(fault)


def written(raw: dict[str, Any], key: str, value: str | None) -> str:
    """The key that the user wrote: a shared one has filled several."""
    return next((name for name, one in leaves(raw) if value is not None and one == value), key)
