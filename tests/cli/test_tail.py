"""`rlmake tail` on run directories that somebody has damaged."""

import os

import pytest

from rlmake.cli.tail import tail
from rlmake.core.errors import UserError


@pytest.fixture
def run(tmp_path):
    for folder in ("logs/attempt_1", "launcher"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "logs/latest").symlink_to("attempt_1")
    (tmp_path / "logs/latest/trainer.log").write_text("one\ntwo\n")
    return tmp_path


def test_a_pipe_or_a_folder_among_the_logs_holds_nobody_up(run, capsys):
    os.mkfifo(run / "logs/latest/pipe.log")
    (run / "logs/latest/folder.log").mkdir()
    assert tail([str(run), "--no-follow"]) == 0
    assert [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]


@pytest.mark.parametrize("note", ["[]", "{}", '{"job": 7}', "{"])
def test_a_damaged_note_of_the_job_is_named(run, note):
    (run / "launcher/job.json").write_text(note)
    with pytest.raises(UserError, match=r"job\.json: "):
        tail([str(run), "--no-follow"])


def test_a_negative_number_of_lines_is_refused(run):
    with pytest.raises(UserError, match="--lines: expected a number from 0 on, not -5"):
        tail([str(run), "-n", "-5"])
