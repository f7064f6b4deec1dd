"""The dashboard in a real Chromium. Run by `make test-browser`, which says where the browser is (RLMAKE_CHROMIUM)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dashboard"))

if not os.environ.get("RLMAKE_CHROMIUM"):  # `make test` needs no browser
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=os.environ["RLMAKE_CHROMIUM"], args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project") / "outputs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def url(outputs):
    """A real server over `outputs`, on a port of its own."""
    code = "import sys; from rlmake.dashboard.server import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(outputs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()


class Tab:
    """A page that collects what goes wrong on it, and never asks anybody but its own server."""

    def __init__(self, browser, url, width=1280, height=860, theme="light"):
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        self.page.set_default_timeout(90_000)  # of a machine that does much else
        self.url, self.faults, self.foreign = url, [], []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", lambda r: r.url.startswith((url, "data:", "blob:")) or self.foreign.append(r.url))

    def _console(self, message):
        if message.type == "error":
            self.faults.append(f"{message.text} {message.location.get('url', '')}".strip())

    def open(self, query=""):
        self.page.goto(f"{self.url}/{query}")
        return self

    def see(self, text):
        """Wait until the text is on the page."""
        self.page.get_by_text(text, exact=False).locator("visible=true").first.wait_for()
        return self

    def fits(self):
        """Nothing is wider than the window: neither the page nor the view."""
        wide = self.page.evaluate(
            "[document.documentElement.scrollWidth - innerWidth,"
            " document.querySelector('main').scrollWidth - document.querySelector('main').clientWidth]"
        )
        assert max(wide) <= 1, wide
        return self

    def clean(self):
        assert not self.faults and not self.foreign, (self.faults, self.foreign)
        return self


@pytest.fixture
def tab(browser, url):
    opened = []

    def make(query="", **given):
        opened.append(Tab(browser, url, **given))
        return opened[-1].open(query)

    yield make
    for one in opened:
        one.page.close()
