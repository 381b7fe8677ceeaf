"""One process at a time uses a folder, and the file that says so is never another's."""

import multiprocessing
import os
import signal
import socket
import time

import pytest

from merit_lab.runs import RunInUse, is_locked, lock


def hold(folder, held):
    with lock(folder):
        held.set()
        time.sleep(600)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder."""
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=hold, args=(tmp_path, held))
    process.start()
    assert held.wait(30)
    yield process
    process.kill()
    process.join()


def test_the_second_process_is_refused_and_told_of_the_first(tmp_path, holder):
    assert is_locked(tmp_path)
    with pytest.raises(RunInUse, match=f"process {holder.pid} on {socket.gethostname()}"), lock(tmp_path):
        pass


def test_a_process_that_was_killed_holds_nothing(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (tmp_path / "lock").read_text()
    assert not is_locked(tmp_path)
    with lock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / "lock").read_text()


def test_a_lock_ends_with_an_error(tmp_path):
    with pytest.raises(KeyError), lock(tmp_path / "new"):
        raise KeyError
    assert not is_locked(tmp_path / "new")


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "text", "link to nothing"])
def test_the_file_of_another_is_not_written_over(tmp_path, kind):
    other, folder = tmp_path / "other", tmp_path / "run"
    folder.mkdir()
    path = folder / "lock"
    if kind != "link to nothing":
        other.write_text("process precious")  # as the file of a lock, but another's
    if "link" in kind:
        (path.hardlink_to if kind == "hard link" else path.symlink_to)(other)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("precious")
    with pytest.raises(ValueError, match="is a link, or a file that no run wrote"), lock(folder):
        pass
    assert not is_locked(folder)
    assert other.exists() == (kind != "link to nothing")
    assert not other.exists() or other.read_text() == "process precious"


def test_a_folder_that_takes_no_byte(tmp_path, no_file_larger_than):
    with (
        pytest.raises(OSError, match=r"^nothing can be written to .* \(File too large\)"),
        no_file_larger_than(0),
        lock(tmp_path),
    ):
        pass
    assert not is_locked(tmp_path)
