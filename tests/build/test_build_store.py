"""Manifests, done files, specifications and links on disk."""

import os
from pathlib import Path

import pytest

from rlmake.build import accepted, failure, garbage, lease, plan, publish, store
from rlmake.build.store import Artefact
from rlmake.cli import making, verbs
from rlmake.core.errors import UserError
from rlmake.core.jsonio import list_files, read_json, write_json

FP = "0123456789abcdef"
SPEC = {
    "schema": 1, "stage": "model", "kind": "init", "fingerprint": FP, "config": {}, "semantic": {"a": 1}, "parents": [],
    "revisions": {"init": 1}, "defaults": {}, "resources": {}, "steps": [], "planned_at": "x", "code": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made() -> Artefact:
    artefact = Artefact("model", FP, "weights")
    artefact.path.mkdir(parents=True)
    (artefact.path / "w").write_bytes(b"12345678")
    store.finish(artefact, store.manifest_of(artefact, SPEC, list_files(artefact.root), started="", ended=""))
    return artefact


def test_a_lost_manifest_costs_nothing():
    artefact = made()
    assert os.stat(artefact.manifest_path).st_ino == os.stat(artefact.done_path).st_ino
    artefact.manifest_path.unlink()
    assert store.finished(artefact)
    store.declare(artefact)
    assert read_json(artefact.manifest_path)["content"]
    assert list(store.stored()) == [artefact]


def test_damage_is_named():
    artefact = made()
    manifest = store.read_manifest(artefact.manifest_path)
    assert store.faults(artefact, manifest, hashes=True) == []
    (artefact.path / "w").write_bytes(b"12345679")
    assert store.faults(artefact, manifest) == []
    assert "w: content differs" in store.faults(artefact, manifest, hashes=True)[0]
    (artefact.path / "w").write_bytes(b"1")
    assert store.faults(artefact, manifest) == [f"{artefact.path}/w: 1 bytes, expected 8"]
    assert not store.finished(artefact)
    (artefact.path / "w").unlink()
    assert store.faults(artefact, manifest) == [f"{artefact.path}/w: missing"]


def test_a_manifest_that_is_damaged_itself_is_named_and_withdrawn(capsys):
    """`verify` goes on with the rest."""
    artefact = made()
    artefact.done_path.write_bytes(b"\x00{}")
    assert verbs.load("verify")([]) == 1
    out = capsys.readouterr().out
    assert "done.json: not readable as JSON" in out and "1 artefacts verified, 1 damaged" in out
    assert not artefact.done_path.exists() and not artefact.manifest_path.exists()


def test_records_that_lack_what_they_must_say_are_damaged():
    """JSON as it should be, and yet no record: of a manifest and of a specification, key by key."""
    artefact = made()
    store.write_spec(SPEC)
    spec = store.spec_path("model", FP)
    for path, read, free in (
        (artefact.done_path, store.read_manifest, {"schema", "started", "ended", "step"}),
        (spec, store.spec_at, {"schema", "code", "steps"}),
    ):
        record = read_json(path)
        for key in record.keys() - free:
            without = {name: held for name, held in record.items() if name != key}
            for changed in (without, record | {key: 3}):
                path.unlink()
                write_json(path, changed)
                with pytest.raises(UserError, match=rf"{path.name}: damaged: .*{key}"):
                    read(path)
                assert path == spec or not store.finished(artefact)
        path.unlink()
        write_json(path, record)
        read(path)
    write_json(spec, {"schema": 1})
    assert store.write_spec({**SPEC, "steps": [3]}) and store.read_spec("model", FP)["steps"] == [3]


WRONG = [[], None, 3, {}, {"schema": 1}, {"schema": 1, "epoch": 3, "pid": 1}, {"schema": 1, "seconds": "x", "pins": 3}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_small_records_of_another_shape_are_one_line_or_count_as_none(wrong):
    folder = made().folder
    write_json(folder / "time.json", wrong)
    assert lease.spent(folder) is None and making.spent(folder, 2.0) == 2.0 and lease.spent(folder) == 2.0
    write_json(folder / "lease-3.json", wrong)
    assert lease.read(folder) is None
    write_json(folder / failure.NAME, wrong)
    assert "failure.json: " in failure.describe(failure.read(folder))
    write_json(folder / "damaged.json", wrong)
    assert "damaged.json: " in store.damage(Artefact("model", FP, "weights")) == store.noted()[0]
    write_json(accepted.path("model", FP), wrong)
    with pytest.raises(UserError, match=r"model-.*json: .*; remove it, and accept anew"):
        accepted.read()
    write_json(garbage.PINS, wrong)
    with pytest.raises(UserError, match=r"pins\.json: .*; nothing is removed while it is so"):
        garbage.pins()


def test_a_damaged_done_file_beside_a_whole_manifest_is_damage():
    artefact = made()
    whole = artefact.done_path.read_bytes()
    for content in (b"", b"{}", None):
        artefact.done_path.unlink()
        if content is not None:
            artefact.done_path.write_bytes(content)
        (fault,) = plan._Walk._faults(artefact)
        assert fault.startswith(f"{artefact.done_path}: ")
        artefact.done_path.write_bytes(whole)
        assert plan._Walk._faults(artefact) == []


def test_specifications_keep_steps_and_take_new_runtime_settings():
    assert store.write_spec({**SPEC, "steps": [3]})
    assert not store.write_spec({**SPEC, "steps": [], "planned_at": "later"}), "nothing but the moment differs"
    assert store.write_spec({**SPEC, "steps": [5], "config": {"log": "debug"}})
    assert store.read_spec("model", FP)["steps"] == [3, 5]
    assert store.read_spec("model", FP)["config"] == {"log": "debug"}
    with pytest.raises(UserError, match="written when a build starts"):
        store.read_spec("data", FP)
    store.write_spec({**SPEC, "schema": 2})
    with pytest.raises(UserError, match="schema 2 is unknown"):
        store.read_spec("model", FP)


def test_links_replace_links_only():
    artefact = made()
    link = Path("outputs/a/b/weights")
    assert publish.publish(link, artefact.path)
    assert os.readlink(link) == f"../../.store/model-{FP}/weights"
    assert not publish.publish(link, artefact.path)
    assert publish.publish(link, artefact.folder) and publish.points(link, artefact.folder)
    link.unlink()
    link.mkdir()
    with pytest.raises(UserError, match=r"real directory.*rlmake adopt"):
        publish.publish(link, artefact.path)
    os.symlink("a", "outputs/c")
    with pytest.raises(UserError, match="outputs/c is not a directory of its own"):
        publish.publish(Path("outputs/c/weights"), artefact.path)
    name = "outputs/it's; a/weights"
    assert publish.decode(publish.encode(name)) == name and publish.encode(name).isalnum()


def test_failures_are_kept_until_forgiven():
    folder = Path("outputs/.store/train-x")
    assert failure.read(folder) is None
    failure.record(folder, "diverged", "loss nan", 3)
    assert failure.describe(failure.read(folder)) == "diverged at step 3: loss nan"
    failure.forgive(folder)
    assert failure.read(folder) is None and len(list(folder.glob("failure-*.json"))) == 1
