"""Projects on the test cluster of cluster.py. Without $SLURM_CONF (`make test-slurm` sets it) nothing is
collected, on one with accounting what concerns accounts, else the rest."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "build"))
sys.path.insert(0, str(Path(__file__).parent))

from slurm_project import Project
from slurm_tools import ROOT, clean_up

if "SLURM_CONF" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
elif "accounting_storage/slurmdbd" in Path(os.environ["SLURM_CONF"]).read_text():
    collect_ignore_glob = ["test_slurm_jobs.py", "test_slurm_runs.py", "test_slurm_nodes.py", "test_slurm_signals.py"]
else:
    collect_ignore_glob = ["test_slurm_accounts.py"]


def toy_project(root: Path):
    """A project whose workers are toys (tests/build/build_toys.py): for all that is about jobs, not about training."""
    from build_toys import Project

    root.mkdir()
    project = Project(root)
    project.env |= {"PYTHONPATH": os.pathsep.join([str(root / "site"), str(ROOT / "src")])}
    return project


@pytest.fixture(scope="module")
def toys_made(tmp_path_factory):
    """The toys' model and data, made on this host; every toy project starts with a copy."""
    project = toy_project(tmp_path_factory.mktemp("made") / "a project")
    project.build("outputs/t/model/weights", "outputs/t/data/data")
    return project.root / "outputs"


@pytest.fixture
def bare(tmp_path):
    """A toy project in which nothing is made yet."""
    project = toy_project(tmp_path / "a project")
    yield project
    clean_up(project.root)


@pytest.fixture
def toys(bare, toys_made):
    subprocess.run(["cp", "-a", toys_made, bare.root], check=True)
    return bare


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Data and model, made once by jobs on the cluster; every project starts with a copy of this store."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:  # of several pytest processes one makes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            project = Project(folder.resolve())
            project.finish(project.start("outputs/model/weights", "outputs/data/data"))
            (folder / "made").touch()
    return folder


@pytest.fixture
def project(shared, tmp_path):
    subprocess.run(["cp", "-a", shared / "outputs", tmp_path], check=True)
    project = Project(tmp_path.resolve())
    yield project
    clean_up(project.folder)
