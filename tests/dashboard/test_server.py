"""The command: ports, bad input in one line, and a real server that ends when asked."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from rlmake.core.errors import UserError
from rlmake.dashboard import server

COMMAND = [sys.executable, "-m", "rlmake.dashboard.server"]


def command(*argv, cwd):
    code = "from rlmake.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "dashboard", *argv], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_the_next_free_port_is_taken(monkeypatch):
    """O04: a port in use is no reason to fail, unless that one was asked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(server, "PORT", port)
        found = server.bind("127.0.0.1", None)
        assert port < found.getsockname()[1] <= port + 99
        found.close()
        with pytest.raises(UserError, match=f"--port {port} .*in use.*leave it out"):
            server.bind("127.0.0.1", port)
    with pytest.raises(UserError, match="--port 99999999"):
        server.bind("127.0.0.1", 99999999)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "nowhere: no such directory"), (["--port", "x"], "invalid int"),
        (["--prot", "1"], "--prot: unknown option; did you mean '--port'?"), (["a.txt"], "not a directory"),
        ([""], "output_dir is empty"), (["--host", ""], "--host is empty"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, argv, words):
    (tmp_path / "a.txt").write_text("")
    done = command(*argv, cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_real_server_serves_the_page_and_ends_at_once(tmp_path):
    code = "import sys; from rlmake.dashboard.server import main; main(sys.argv[1:])"
    (tmp_path / "outputs").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"<title>rlmake dashboard" in answer.read()
        with urllib.request.urlopen(f"{url}/static/plot.js", timeout=20) as answer:
            assert b"export function plot" in answer.read()
        with urllib.request.urlopen(f"{url}/?highlight={'x' * 900_000}", timeout=20) as answer:
            assert answer.status == 200, "the address of a command with long quotes"
        post = urllib.request.Request(f"{url}/api/view", b" " * (4 << 20), {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="413"):  # which the client sees, it is no broken connection
            urllib.request.urlopen(post, timeout=20)
        with urllib.request.urlopen(f"{url}/api/view/events", timeout=20) as events:
            assert events.readline().startswith(b"retry")
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(15)
        assert time.monotonic() - start < 10, "an open page does not hold it"
    finally:
        process.kill()
        process.wait()


def test_the_page_asks_no_other_address_and_parses_no_html():
    """No script or style from elsewhere, and no way by which text from a run could become markup."""
    root = server.Path(server.__file__).parent / "static"
    for path in root.rglob("*.*"):
        text = path.read_text()
        outside = [url for url in re.findall(r"https?://[\w.-]+", text) if url != "http://www.w3.org"]
        assert not outside, f"{path.name}: {outside}"
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert word not in text, f"{path.name}: {word}"
