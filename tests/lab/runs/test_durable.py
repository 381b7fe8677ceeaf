"""Files that are whole or not there."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from merit_lab.runs import durable

_WRITER = """
import json, sys
from pathlib import Path
from merit_lab.runs import durable

for _ in range(100):
    durable.write(Path(sys.argv[1]), json.dumps({"text": sys.argv[2] * 20_000}))
"""


def test_the_text_is_there_for_everyone_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for text in ("old", "new"):
        durable.write(path, text)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file.json", "new")]
    (tmp_path / "plain").write_text("")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}) == 1


def test_writers_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    durable.write(path, "{}")
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, path, who], stderr=subprocess.PIPE) for who in "ab"
    ]
    while any(writer.poll() is None for writer in writers):
        json.loads(path.read_text())  # never a part
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors.decode()
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    durable.write(tmp_path / "file.json", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"no space left on device: '.*/file\.json'"):
        durable.write(tmp_path / "file.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file.json", "old")]
