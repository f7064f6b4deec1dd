"""`rlmake export`: default places, one line per mistake, no torch for either."""

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
