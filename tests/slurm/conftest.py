"""Projects on the test cluster of cluster.py. Without $SLURM_CONF (`make test-slurm` sets it) nothing is
collected, on one with accounting what concerns accounts, else the rest."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "build"))
sys.path.insert(0, str(Path(__file__).parent))

from slurm_tools import ROOT, clean_up

if "SLURM_CONF" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
elif "accounting_storage/slurmdbd" in Path(os.environ["SLURM_CONF"]).read_text():
    collect_ignore_glob = ["test_slurm_jobs.py", "test_slurm_runs.py", "test_slurm_signals.py"]
else:
    collect_ignore_glob = ["test_slurm_accounts.py"]


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A project whose workers are toys (tests/build/build_toys.py): for all that is about jobs, not about training."""
    from build_toys import Project

    root = tmp_path / "a project"
    root.mkdir()
    monkeypatch.chdir(root)
    project = Project(root)
    project.env |= {"PYTHONPATH": os.pathsep.join([str(root / "site"), str(ROOT / "src")])}
    yield project
    clean_up(root)
