"""The toy project as a fixture, see build_toys."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from build_toys import Project


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = tmp_path / "a project"  # the space is on purpose
    root.mkdir()
    monkeypatch.chdir(root)
    return Project(root)
