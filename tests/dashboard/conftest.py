"""A directory with runs, and a client of the application over it."""

import pytest
from dashboard_runs import Made, report
from starlette.testclient import TestClient

from rlmake.dashboard.app import create


@pytest.fixture
def outputs(tmp_path):
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder


@pytest.fixture
def run(outputs):
    """A run of three steps with four episodes each, and a report."""
    made = Made(outputs / "demo")
    for step in (1, 2, 3):
        made.step(step)
    made.close()
    report(made.run)
    return made.run


@pytest.fixture
def client(outputs):
    return TestClient(create([outputs]), base_url="http://localhost:7788")


@pytest.fixture
def ask(client, run):
    """`ask("logfiles", key=value)`: JSON of a route of the run; an answer that is no success fails."""

    def ask(route, status=200, name="demo", **pairs):
        answer = client.get(f"/api/runs/{name}/{route}", params=pairs)
        assert answer.status_code == status, answer.text
        return answer.json()

    return ask
