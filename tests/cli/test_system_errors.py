"""What the system refuses to do with a file is one line and an exit code; a mistake of ours stays a traceback."""

import errno
import os
from pathlib import Path

import pytest

from rlmake.core.errors import entry_point, of_system
from rlmake.core.jsonio import write_json


def ends(work, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving:
        entry_point(work)()
    return leaving.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (Path("/etc/passwd/x").read_bytes, "/etc/passwd/x: Not a directory"),
        (lambda: os.mkdir("/proc/x"), "/proc/x: No such file or directory"),
        (lambda: Path("a" * 300).read_text(), "a" * 300 + ": File name too long"),
        (lambda: Path("two\nlines").read_text(), "two\\nlines: No such file or directory"),
        (lambda: write_json("/etc/passwd/x/y.json", {}), "/etc/passwd/x: Not a directory"),
        (lambda: write_json("/proc/y.json", {}), "/proc/y.json: No such file or directory"),
    ],
)
def test_one_line(work, line, capsys):
    assert ends(work, capsys) == (2, f"error: {line}\n")


def test_a_link_in_a_circle(tmp_path, capsys):
    os.symlink("loop", tmp_path / "loop")
    assert ends((tmp_path / "loop").read_bytes, capsys)[1] == (
        f"error: {tmp_path}/loop: Too many levels of symbolic links\n"
    )


def fill():
    with open("/dev/full", "w") as file:
        file.write("x")


def test_a_full_disk(capsys, tmp_path, monkeypatch):
    """Writing to an open file names none; a record names itself, not its temporary file."""
    full = "No space left on device; free some space and start again, what is finished is kept\n"
    assert ends(fill, capsys) == (1, f"error: {full}")

    def fsync(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    assert ends(lambda: write_json(tmp_path / "spec.json", {}), capsys) == (1, f"error: {tmp_path}/spec.json: {full}")
    assert list(tmp_path.iterdir()) == []


def test_weights_on_a_full_disk():
    """As safetensors says it: its errors are no `OSError`."""
    from safetensors import SafetensorError

    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert str(of_system(error)).startswith("No space left on device; free some space")
    assert of_system(error).exit_code == 1
    assert of_system(SafetensorError("Error while deserializing header: invalid header")) is None


def test_what_is_ours_stays_a_traceback():
    for error in (
        OSError("no number"), FileNotFoundError(errno.ENOENT, "no file named"), KeyError("x"), ValueError("x"),
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"), OSError(errno.EBADF, "bad", "file"),
    ):  # fmt: skip
        assert of_system(error) is None

        def work(error=error):
            raise error

        with pytest.raises(type(error)):
            entry_point(work)()


def test_the_traceback_is_there_for_who_asks(capsys, monkeypatch):
    monkeypatch.setenv("RLMAKE_TRACEBACK", "1")
    code, text = ends(fill, capsys)
    assert code == 1 and "Traceback" in text and text.splitlines()[-1].startswith("error: No space left")
