"""What is known of an artefact in one record: `card.json` inside what is published, and `README.md` for a model.

Cards are made from the store's records alone (manifests and specifications), when something is published; they are no
part of the artefact's hash. A directory that was copied elsewhere takes its card with it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmake.build import accepted, store
from rlmake.build.fingerprint import leaves, of_parent
from rlmake.build.store import STORE, Artefact
from rlmake.core.errors import UserError
from rlmake.core.jsonio import hash_file, read_json, write_bytes, write_json

SCHEMA = 1
NAME, README = "card.json", "README.md"
NAMES = (NAME, README)
DIFFS = STORE / "diffs"  # what differed from a commit, by its hash
MODEL_KINDS = ("weights", "weights-FP8", "adapter")
WORDS = {
    "sft": "supervised fine-tuning",
    "rl": "reinforcement learning",
    "init": "a new model with random weights",
    "import": "an import",
    "data": "data",
    "best": "a checkpoint chosen by its evaluation",
}


def of(artefact: Artefact) -> dict[str, Any]:
    """The card of an artefact in the store. Raises `UserError` when it is not there."""
    manifest = store.read_manifest(artefact.done_path)
    spec = _spec(artefact.stage, artefact.fingerprint)
    training = _training(_trained(artefact))
    lineage = list(_lineage(artefact))
    standing = [
        {key: record[key] for key in ("changes", "reason", "at")}
        for record in accepted.read().values()
        if (record["stage"], record["stands_for"]) == (artefact.stage, artefact.fingerprint)
    ]
    return {
        "schema": SCHEMA,
        **artefact.record(),
        "name": (spec.get("runs") or [None])[0],
        "runs": spec.get("runs", []),
        "work": manifest["kind"],
        "content": manifest["content"],
        "origin": manifest.get("origin", "built"),
        "facts": manifest.get("facts", {}),
        "specification": spec.get("config", {}),
        "set": _own_settings(spec),
        "parents": manifest["parents"],
        "differences": _differences(artefact, spec),
        "revisions": manifest.get("revisions", {}),
        "evaluations": list(_evaluations(artefact)),
        "code": _code(manifest.get("code") or {}),
        "versions": manifest.get("versions", {}),
        "hardware": manifest.get("hardware", {}),
        "started": manifest.get("started"),
        "ended": manifest.get("ended"),
        "seconds": (training or manifest).get("seconds"),
        "gpu_hours": (training or manifest).get("gpu_hours"),
        "gpu_hours_of_lineage": round(sum(row["gpu_hours"] or 0.0 for row in lineage), 6),
        "lineage": lineage,
        "accepted": standing,
        "files": manifest["files"],
    }


def publish(artefact: Artefact) -> None:
    """Write the card of what was just published; of an evaluation also that of the model it is about."""
    if artefact.kind == "eval":
        _write(artefact)
        for parent in store.read_manifest(artefact.done_path)["parents"]:
            model = store.artefact_of(parent)
            if parent["role"] == "model" and model.done_path.is_file():
                _write(model)
    elif artefact.kind in (*MODEL_KINDS, "data"):
        _write(artefact)


def _write(artefact: Artefact) -> None:
    record, folder = of(artefact), artefact.path
    hashed = {entry["path"] for entry in record["files"]}
    if NAME not in hashed and _differs(folder / NAME, record):
        write_json(folder / NAME, record)
    if artefact.kind in MODEL_KINDS and README not in hashed:
        text = readme(record).encode()
        if not (folder / README).is_file() or (folder / README).read_bytes() != text:
            write_bytes(folder / README, text)


def _differs(path: Path, record: dict[str, Any]) -> bool:
    try:
        return read_json(path) != record
    except UserError:
        return True


def find(path: Path) -> dict[str, Any]:
    """The card of any artefact: a link of the build, a place in the store, or a directory copied elsewhere.

    Raises `UserError` when nothing is known of it, or when its files are not those that its card is about.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if artefact := locate(path):
        return of(artefact)
    folder = path if path.is_dir() else path.parent
    if (folder / NAME).is_file():
        record = read_json(folder / NAME)
        if record.get("schema") != SCHEMA:
            raise UserError(f"{folder / NAME}: schema {record.get('schema')} is unknown, expected {SCHEMA}")
        for entry in record["files"]:
            file = folder / entry["path"]
            if not file.is_file():
                raise UserError(f"{file}: missing; the card beside it is about a directory that has it")
            if file.stat().st_size != entry["size"] or hash_file(file) != entry["blake3"]:
                raise UserError(f"{file}: changed since {record['name'] or 'the artefact'} was published")
        return record
    if same := next(alike(path), None):
        return of(same)
    raise UserError(f"{path}: no card.json, and no artefact of this project's store has the same files")


def locate(path: Path) -> Artefact | None:
    """The artefact in the project's store that a path is, or lies in; None for one elsewhere."""
    real, root = path.resolve(), STORE.resolve()
    if not real.is_relative_to(root):
        return None
    parts = real.relative_to(root).parts
    match = re.fullmatch(rf"({'|'.join(store.STAGES)})-([0-9a-f]{{16}})", parts[0]) if parts else None
    if not match:
        return None
    stage, fingerprint = match.groups()
    if stage != "train":
        found = Artefact(stage, fingerprint, store.KIND_OF_STAGE[stage])
    elif len(parts) > 2 and (step := re.fullmatch(r"step_(\d+)", parts[2])):
        kind = "checkpoint" if parts[1] == "checkpoints" else parts[3] if len(parts) > 3 else "weights"
        found = Artefact(stage, fingerprint, kind, int(step[1]))
    else:
        steps = [one.step for one in store.stored(f"{stage}-{fingerprint}") if one.kind == "checkpoint"]
        found = Artefact(stage, fingerprint, "checkpoint", max(steps, default=0))
    if not found.done_path.is_file():
        raise UserError(f"{path}: not finished")
    return found


def alike(path: Path) -> Iterator[Artefact]:
    """What is in the store with just the files of a directory, by their hashes; or has a file of this content."""
    if path.is_file():
        lone = (path.stat().st_size, hash_file(path))
        yield from (one for one, files in _contents() if lone in files.values())
        return
    found = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name not in NAMES]
    there = {file.relative_to(path).as_posix(): (file.stat().st_size, hash_file(file)) for file in found}
    bare = {name: row for name, row in there.items() if name != store.COMPLETE}  # which a job does not count
    for artefact, files in _contents():
        # beside an evaluation lie its logs
        if files in (there, bare) or (artefact.kind == "eval" and files.items() <= there.items()):
            yield artefact


def _contents() -> Iterator[tuple[Artefact, dict[str, tuple[int, str]]]]:
    """Every artefact in the store with `{path: (size, hash)}` of its files."""
    for artefact in store.stored():
        rows = store.read_manifest(artefact.done_path)["files"]
        yield artefact, {row["path"]: (row["size"], row["blake3"]) for row in rows}


def _code(state: dict[str, Any]) -> dict[str, Any]:
    """The commit, and what differed from it where that was kept."""
    kept = DIFFS / f"{state.get('dirty')}.diff"
    return {**state, "diff": kept.read_text(errors="replace") if state.get("dirty") and kept.is_file() else None}


def _spec(stage: str, fingerprint: str) -> dict[str, Any]:
    try:
        return store.read_spec(stage, fingerprint)
    except UserError:
        return {}


def _manifest(artefact: Artefact) -> dict[str, Any] | None:
    try:
        return store.read_manifest(artefact.done_path)
    except UserError:
        return None


def _training(artefact: Artefact) -> dict[str, Any] | None:
    """The manifest of the checkpoint that an export was made from: that is what cost the time."""
    return (
        _manifest(Artefact("train", artefact.fingerprint, "checkpoint", artefact.step))
        if artefact.stage == "train"
        else None
    )


def _lineage(artefact: Artefact) -> Iterator[dict[str, Any]]:
    """What an artefact descends from, oldest first, itself last: its cost, specification and parents in short."""
    seen: set[tuple[str, str, int | None]] = set()

    def walk(one: Artefact) -> Iterator[dict[str, Any]]:
        key = (one.stage, one.fingerprint, one.step)
        if key in seen:
            return
        seen.add(key)
        manifest = _manifest(one)
        if manifest is None and one.stage == "train":  # the checkpoint may be gone, its export is not
            manifest = _manifest(Artefact("train", one.fingerprint, "weights", one.step))
        spec = _spec(one.stage, one.fingerprint)
        parents = map(store.artefact_of, (manifest or spec or {"parents": []})["parents"])
        for parent in [_trained(one)] if one.stage == "best" and manifest else parents:
            yield from walk(_whole(parent))
        yield {
            "name": (spec.get("runs") or [None])[0],
            "stage": one.stage,
            "kind": (manifest or spec).get("kind") if manifest or spec else None,
            "fingerprint": one.fingerprint,
            "step": one.step,
            "content": manifest and manifest["content"],
            "origin": manifest and manifest.get("origin"),
            "seconds": manifest and manifest.get("seconds"),
            "gpu_hours": manifest and manifest.get("gpu_hours"),
            "ended": manifest and manifest.get("ended"),
        }

    yield from walk(_whole(artefact))


def _whole(artefact: Artefact) -> Artefact:
    """The training behind an export."""
    return (
        Artefact("train", artefact.fingerprint, "checkpoint", artefact.step) if artefact.stage == "train" else artefact
    )


def _own_settings(spec: dict[str, Any]) -> dict[str, Any]:
    """Settings that count and that somebody set."""
    defaults = spec.get("defaults", {})
    return {k: v for k, v in leaves(spec.get("semantic", {})) if k not in defaults and not of_parent(k)}


def _differences(artefact: Artefact, spec: dict[str, Any]) -> list[str]:
    """How a training differs from the training that it began from, key by key, where both are of one kind."""
    for parent in spec.get("parents", []):
        above = _spec(parent["stage"], parent["fingerprint"])
        if parent["kind"] in ("weights", "checkpoint") and above.get("kind") == spec.get("kind"):
            mine, theirs = dict(leaves(spec["semantic"])), dict(leaves(above["semantic"]))
            unsaid = {k for k in spec["defaults"] if k not in theirs} | {k for k in above["defaults"] if k not in mine}
            keys = [k for k in dict.fromkeys([*theirs, *mine]) if k not in unsaid and not of_parent(k)]
            return [f"{k}: {theirs.get(k)} → {mine.get(k)}" for k in keys if mine.get(k) != theirs.get(k)]
    return []


def _trained(artefact: Artefact) -> Artefact:
    """The weights that were chosen, of the best of a run; else the artefact itself."""
    if artefact.stage != "best":
        return artefact
    spec, step = _spec(artefact.stage, artefact.fingerprint), store.read_manifest(artefact.done_path)["facts"]["step"]
    return Artefact("train", spec["train"], "weights", step)


def chosen(card: dict[str, Any]) -> str | None:
    """Which checkpoint the best of a run is, and by what; None of everything else."""
    if card["stage"] != "best":
        return None
    facts = card["facts"]
    value, steps = facts["values"][str(facts["step"])], len(facts["values"])
    what = f"{facts['metric']} {value:.4g} on {'/'.join(filter(None, (facts['suite'], facts['env'])))}"
    return f"step {facts['step']}, the best of {steps} checkpoint{'s' * (steps != 1)}: {what}"


def _evaluations(artefact: Artefact) -> Iterator[dict[str, Any]]:
    """Evaluations in the store of these very weights (of FP8 and adapters: of the weights of the same step)."""
    artefact = _trained(artefact)
    for one in store.stored("eval-"):
        manifest = _manifest(one)
        model = next((p for p in (manifest or {}).get("parents", []) if p["role"] == "model"), None)
        mine = one == artefact or (
            model is not None
            and (model["stage"], model["fingerprint"], model["step"])
            == (artefact.stage, artefact.fingerprint, artefact.step)
        )
        if not mine:
            continue
        try:
            report = read_json(one.path / "report.json")
        except UserError:
            continue
        envs = {}
        for name, env in report["envs"].items():
            numbers = {key: env[key] for key in env if key.startswith(("avg@", "pass@", "pass^"))}
            envs[name] = {"reward": env["reward"], "num_tasks": env.get("num_tasks"), **numbers}
        yield {"suite": report["suite"], "fingerprint": one.fingerprint, "envs": envs}


def readme(card: dict[str, Any]) -> str:
    """A Hugging Face model card: metadata, and the same in prose."""
    name = card["name"] or card["fingerprint"]
    base = next((row for row in card["lineage"] if row["stage"] == "model"), None)
    lines = ["---", "library_name: transformers", "tags:", "- rlmake", f"- {card['work']}"]
    if results := _model_index(card, name):
        lines += results
    lines += ["---", "", f"# {name}", ""]
    step = f", step {card['step']}" if card["step"] is not None else f", {said}" if (said := chosen(card)) else ""
    lines.append(f"Origin: {WORDS.get(card['work'], card['work'])}{step}. Format: {_format(card)}.")
    if card["origin"] != "built":
        lines.append(f"It was {card['origin']}, not built here: {card['facts'].get('source', 'see card.json')}.")
    for record in card["accepted"]:
        lines.append(
            f"Declared equivalent to another specification ({'; '.join(record['changes'])}): {record['reason']}."
        )
    lines += ["", "## Lineage", ""]
    for row in card["lineage"]:
        at = f", step {row['step']}" if row["step"] is not None else ""
        cost = f", {row['gpu_hours']:.4g} GPU-hours" if row["gpu_hours"] else ""
        what = WORDS.get(row["kind"], row["kind"])
        lines.append(f"- {row['name'] or '?'} ({what}{at}{cost}): `{row['stage']}-{row['fingerprint']}`")
    if base:
        lines += ["", f"The base model is {base['name'] or base['fingerprint']}."]
    if card["evaluations"]:
        lines += ["", "## Evaluation", "", "| suite | environment | tasks | reward | 95 % |", "|---|---|---|---|---|"]
        for entry in card["evaluations"]:
            for env, found in entry["envs"].items():
                reward = found["reward"]
                span = reward.get("ci95")
                span = f"{span[0]:.3f} to {span[1]:.3f}" if span else "–"
                mean = "–" if reward["mean"] is None else f"{reward['mean']:.3f}"
                lines.append(f"| {entry['suite']} | {env} | {found['num_tasks']} | {mean} | {span} |")
    if card["set"]:
        lines += [
            "",
            "## Settings",
            "",
            "Those that change the result and are no plain defaults; all others are in `card.json`.",
            "",
        ]
        lines += ["| key | value |", "|---|---|"]
        lines += [f"| `{key}` | `{_cell(value)}` |" for key, value in sorted(card["set"].items())]
    lines += ["", "## Made with", ""]
    code = card["code"]
    if code.get("commit"):
        dirty = f" with uncommitted changes (`{code['dirty']}`)" if code.get("dirty") else ""
        lines.append(f"- commit `{code['commit']}`{dirty}")
    lines += [f"- {name} {version}" for name, version in card["versions"].items()]
    hardware = card["hardware"]
    if hardware:
        gpus = f", {', '.join(hardware['gpus'])}" if hardware.get("gpus") else ""
        lines.append(f"- {hardware.get('cores')} cores of {hardware.get('cpu') or hardware.get('machine')}{gpus}")
    spent = f"{card['seconds']:.0f} s" if card["seconds"] is not None else "unknown time"
    lines.append(f"- {spent}, {card['gpu_hours'] or 0:.4g} GPU-hours; finished {card['ended']}")
    lines.append(f"- fingerprint `{card['fingerprint']}`, content `{card['content']}`")
    return "\n".join(lines) + "\n"


def _format(card: dict[str, Any]) -> str:
    return {"weights": "safetensors", "weights-FP8": "blockwise FP8 safetensors", "adapter": "PEFT adapter"}[
        card["kind"]
    ]


def _cell(value: Any) -> str:
    text = " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= 120 else text[:117] + "…"


def _model_index(card: dict[str, Any], name: str) -> list[str]:
    """Evaluation results as the hub's metadata states them."""
    rows = []
    for entry in card["evaluations"]:
        for env, found in entry["envs"].items():
            if found["reward"]["mean"] is None:
                continue
            rows += [
                "  - task:",
                "      type: text-generation",
                "    dataset:",
                f"      name: {json.dumps(entry['suite'])}",
                f"      type: {json.dumps(env)}",
                "    metrics:",
                "    - type: reward",
                f"      value: {found['reward']['mean']}",
            ]
    return ["model-index:", f"- name: {json.dumps(name)}", "  results:", *rows] if rows else []
