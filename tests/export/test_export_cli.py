"""`rlmake export`: default places, one line per mistake, no torch for either."""

import signal
import subprocess
import sys

import pytest
from export_tiny import make_model, save

from rlmake.core.errors import UserError
from rlmake.export.cli import export


def test_the_way_round(tmp_path, base, capsys):
    step = save(tmp_path / "run", make_model(tied=False), base)
    export(["bf16", str(step), "--max-shard", "0.04MB"])
    assert len(list((step / "weights").glob("*.safetensors"))) > 2
    export(["fp8", str(step / "weights")])
    with pytest.raises(UserError, match="there already"):
        export(["fp8", str(step)])
    export(["fp8", str(step), "--overwrite"])
    export(["dequantize", str(step / "weights-FP8")])
    assert (step / "weights-FP8-BF16" / "model.safetensors").is_file()
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_only_an_export_is_overwritten_and_never_the_source(tmp_path, base):
    step = save(tmp_path / "run", make_model(), base)
    export(["bf16", str(step)])
    weights, precious, link = step / "weights", tmp_path / "precious", tmp_path / "link"
    precious.mkdir()
    (precious / "notes").write_text("mine")
    link.symlink_to(weights)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for format_, source, out, said in (
        ("bf16", step, step, "holds what is to be converted"),
        ("bf16", step, tmp_path / "run", "holds what is to be converted"),
        ("fp8", weights, weights, "holds what is to be converted"),
        ("bf16", step, step / "trainer", "no exported model"),
        ("bf16", step, precious, "no exported model"),
        ("bf16", step, precious / "notes", "no exported model"),
        ("bf16", step, link, "no exported model"),
    ):
        with pytest.raises(UserError, match=said):
            export([format_, str(source), str(out), "--overwrite"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before and link.is_symlink()
    (precious / "notes").unlink()
    export(["bf16", str(step), str(precious), "--overwrite"])
    assert (precious / "model.safetensors").is_file()


KILLED = """
import os, signal, sys
from rlmake.export import cli, staging
real, calls = os.rename, []
def dying(*paths):
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    calls.append(paths)
    real(*paths)
staging.os.rename = dying
cli.export(["bf16", *sys.argv[2:], "--overwrite"])
"""


@pytest.mark.parametrize("renames", [0, 1])
def test_an_export_that_was_being_replaced_comes_back(tmp_path, base, renames):
    step, out = save(tmp_path / "run", make_model(), base), tmp_path / "out" / "weights"
    export(["bf16", str(step), str(out)])
    (out / "mark").write_text("the old one")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(renames), str(step), str(out)], timeout=200)
    assert killed.returncode == -signal.SIGKILL and out.exists() == (renames == 0)
    with pytest.raises(UserError, match="there already"):
        export(["bf16", str(step), str(out)])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    export(["bf16", str(step), str(out), "--overwrite"])
    assert [path.name for path in out.parent.iterdir()] == ["weights"] and not (out / "mark").exists()


def test_what_is_no_checkpoint_is_said(tmp_path, base):
    step = save(tmp_path / "run", make_model(), base)
    with pytest.raises(UserError, match=f"no checkpoint, expected .*; the newest of this run is {step}$"):
        export(["bf16", str(tmp_path / "run"), str(tmp_path / "out")])
    with pytest.raises(UserError, match=r"no checkpoint, expected …/checkpoints/step_<n>$"):
        export(["bf16", str(base), str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bf61", "x"], "did you mean 'bf16'"),
        (["bf16", "nowhere"], "nowhere: no such directory"),
        (["bf16", ".", "--max-shard", "many"], "'many' is no size"),
        (["fp8", ".", "--block-size", "0"], "no block size"),
        (["bf16", ".", "."], "there already"),
        (["bf16"], "required: CHECKPOINT"),
        ([], "required"),
    ],
)
def test_mistakes(argv, said):
    with pytest.raises(UserError, match=said) as caught:
        export(argv)
    assert len(str(caught.value).splitlines()) == 1


def test_no_torch_before_it_is_needed():
    code = "import rlmake.export.cli as c, sys\ntry: c.export(['bf16', 'nowhere'])\nexcept Exception: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_verbs_describe_themselves():
    assert export.__doc__.strip()
