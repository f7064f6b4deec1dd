"""Which engine is asked, and for which model."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "envs"))
from env_fakes import FakeEngine, serving

from rlmake.config.shared import ClientConfig
from rlmake.core.errors import RunFailed, UserError
from rlmake.evals.engine import await_model, published_url


@pytest.fixture
def base_url():
    with serving(FakeEngine(None, str)) as url:
        yield url


async def test_the_model_by_name_or_the_only_one(base_url):
    assert await await_model(ClientConfig(), base_url, "m", run_id="run-1") == "m"
    assert await await_model(ClientConfig(), base_url, None) == "m"
    assert await await_model(ClientConfig(skip_model_check=True), base_url, "adapter") == "adapter"


async def test_another_model_and_another_runs_engine_are_refused(base_url):
    with pytest.raises(UserError, match=r"^model: http.* does not serve 'mm' but m; did you mean 'm'\?$"):
        await await_model(ClientConfig(), base_url, "mm")
    with pytest.raises(UserError, match="belongs to run 'run-1', not to 'run-2'"):
        await await_model(ClientConfig(), base_url, "m", run_id="run-2")


async def test_a_server_that_lists_no_models(base_url):
    """Told at once, with the way out; a URL without its /v1 is the usual reason."""
    root = base_url.removesuffix("/v1")
    with pytest.raises(
        UserError, match=r"/models is not there \(404\); expected a URL that ends in /v1; .*skip_model_check"
    ):
        await await_model(ClientConfig(), root, "m")
    assert await await_model(ClientConfig(skip_model_check=True), root, "m") == "m"


async def test_nobody_answers():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        with pytest.raises(RunFailed, match="no engine answers at"):
            await await_model(ClientConfig(wait_for_ready_timeout=0.4), url, "m")


async def test_the_url_given_or_published(tmp_path):
    file = tmp_path / "inference.address"
    assert await published_url(ClientConfig(base_url="http://h:1/v1/"), file) == "http://h:1/v1"
    waiting = asyncio.create_task(published_url(ClientConfig(base_url=None), file))
    await asyncio.sleep(0.05)
    file.write_text("http://127.0.0.1:77\n")
    assert await asyncio.wait_for(waiting, 5) == "http://127.0.0.1:77/v1"
    with pytest.raises(RunFailed, match="no engine has published itself in"):
        await published_url(ClientConfig(base_url=None, wait_for_ready_timeout=0.2), tmp_path / "none")
