"""Files and folders that are not what they should be: one line, wherever they are met."""

import os
import shutil
import subprocess
import sys

import pytest

from rlmake.build.registry import Registry
from rlmake.cli import verbs
from rlmake.core.errors import UserError

# Root may read everything; without these capabilities it is refused like anybody.
NOBODY = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-dac_override,-dac_read_search"]


@pytest.mark.parametrize("kind", ["a file", "a link that leads nowhere"])
def test_outputs_is_no_folder(project, kind):
    if kind == "a file":
        (project.root / "outputs").touch()
    else:
        os.symlink("/nowhere/at/all", "outputs")
    (line,) = project.refused("all")
    assert line == f"error: outputs: is {kind}; results go into a folder of this name: mend it or move it away"
    with pytest.raises(UserError, match=r"^outputs: is "):
        verbs.load("plan")([])


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("experiments/t/data.toml", "experiments/t/data.toml: cannot be read: Permission denied"),
        ("experiments/base/cpu.toml", "experiments/base/cpu.toml: cannot be read: Permission denied"),
        ("outputs/.store", "outputs/.store/accepted: Permission denied; whoever starts this needs the right to it"),
    ],
)
def test_what_may_not_be_read(project, path, line):
    prefix = [] if os.getuid() else NOBODY
    if prefix and (not shutil.which("setpriv") or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("root can't be made to lack rights here")
    (project.root / "outputs/.store").mkdir(parents=True)
    os.chmod(path, 0)
    try:
        command = [*prefix, sys.executable, "-m", "rlmake.cli.main", "plan"]
        done = subprocess.run(command, capture_output=True, text=True, env=project.env, timeout=300, check=False)
    finally:
        os.chmod(path, 0o755)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == f"error: {line}", done.stderr
    assert "Traceback" not in done.stderr


def test_junk_in_the_cache_of_contents_is_no_matter(project):
    (project.root / "outputs/.store").mkdir(parents=True)
    for junk in ("[]", "{", '{"/a": 1}', "null", '{"rows.jsonl": []}'):
        (project.root / "outputs/.store/content.json").write_text(junk)
        assert "t/sft" in Registry.load().runs


def test_a_line_break_in_a_name_breaks_no_line(project):
    (line,) = project.refused("outputs/a\nb/weights")
    assert line == r"error: outputs/a\nb/weights: no target; no run's name holds a line break"
    shutil.copy("experiments/t/data.toml", "experiments/t/a\nb.toml")
    (line,) = project.refused("all")
    assert line.startswith(r"error: experiments/t/a\nb.toml: 'a\nb' is no safe name")


def test_a_grid_with_a_value_that_is_no_number(project):
    """Text that spells one too, which no cell could be told from another by."""
    text = (project.root / "experiments/t/sft.toml").read_text()
    for value, line in (
        ("nan", "experiments/t/grid.toml:14: experiment.grid.optim.lr: must be finite, not nan"),
        ("'inf'", "experiments/t/grid.toml:7: optim.lr: must be finite, not 'inf' (cell lr=inf)"),
    ):
        project.write("t/grid.toml", f'{text}[experiment.grid]\n"optim.lr" = [1e-3, {value}]\n')
        assert project.refused("all") == [f"error: {line}"]
