"""The pictures of docs/dashboard.md, taken of a real run: `python tests/browser/pictures.py [outputs [folder]]`.

Wants the run of `make demo` below `outputs`, playwright, and Chromium at $RLMAKE_CHROMIUM. Look at them before they are
committed.
"""

import os
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

RUN = "reverse-text/rl"
PICTURES = {
    "overview": (f"?run={RUN}", "Training"),
    "traces": (f"?run={RUN}&tab=traces", "reward"),
    "tokens": (f"?run={RUN}&tab=traces&line=12&overlay=advantage", "assistant"),
    "experiments": ("?view=project&q=outputs/reverse-text/", "reverse-text/sft"),
}
QUIET_MS = 2500  # for charts to be drawn


def take(page: Page, url: str, folder: Path) -> None:
    for name, (query, words) in PICTURES.items():
        page.goto(f"{url}/{query}")
        page.locator("main").get_by_text(words).first.wait_for()
        page.wait_for_timeout(QUIET_MS)
        page.screenshot(path=folder / f"dashboard-{name}.png")


def main(outputs: str = "outputs", folder: str = "docs/images") -> None:
    code = "import sys; from rlmake.dashboard.server import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, outputs, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as play:
        url = server.stdout.readline().split()[-1]
        browser = play.chromium.launch(
            executable_path=os.environ.get("RLMAKE_CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        take(browser.new_page(viewport={"width": 1280, "height": 860}), url, Path(folder))
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
