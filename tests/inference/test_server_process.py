"""The server as a process: ports, bad models, and its end."""

import socket
import threading
import time

import httpx


def test_port_in_use_and_bad_models_are_one_line(models, start, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            f"127.0.0.1:{port} is already in use": {"server": {"port": port}},
            "no such directory": {"vllm": {"model": str(tmp_path / "nothing")}},
            "max_model_len": {"vllm": {"model": str(models["a"]), "max_model_len": 4096}},
        }
        started = [(m, start(tmp_path / str(i), **change)) for i, (m, change) in enumerate(cases.items())]
        for message, server in started:
            code, log = server.process.wait(120), server.log.read_text()
            assert code == 2 and message in log and "Traceback" not in log, log
            assert len([line for line in log.splitlines() if line.startswith("error:")]) == 1
            assert not server.address.exists()


def test_sigterm_with_requests_in_flight(start, tmp_path):
    server = start(tmp_path).wait()
    server.post("/pause", {})
    found = []

    def request():
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 200}}
        try:
            found.append(httpx.post(server.url + "/inference/v1/generate", json=body, timeout=60).status_code)
        except httpx.TransportError as error:
            found.append(type(error).__name__)

    thread = threading.Thread(target=request)
    thread.start()
    time.sleep(1)
    began = time.monotonic()
    code, log = server.stop()
    thread.join(10)
    assert code == 0 and time.monotonic() - began < 60, log  # about a second on an idle machine
    assert found and found[0] != 200
    assert "Traceback" not in log, log
