"""Prepares a small corpus repeatedly, each time killed by SIGKILL at another line, and then resumed.

Usage: kill_worker.py FOLDER TOKENIZER NUM_KILLS. The tokenizer "bytes-over-bpe" is "bytes" in a folder with
data of another recipe, which are to be replaced. Prints how many kills were survived: NUM_KILLS that are
spread evenly, and some more at the beginning and the end.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from merit_lab import durable
from merit_lab.data import corpora, parts
from merit_lab.data import prepare as preparing
from merit_lab.data.prepare import prepare
from merit_lab.data.tokens import Dataset

WATCHED = {durable.__file__, parts.__file__, preparing.__file__}


def main(folder: Path, tokenizer: str, num_kills: int) -> None:
    text = folder / "text.jsonl"
    line = '{"text": "line %d of some text, %d"}\n'
    text.write_text("".join(line % (number, number**2) for number in range(600)))

    tokenizer, _, older = tokenizer.partition("-over-")

    def run(name: str) -> None:
        corpus = corpora.text_files([text], 0.1)
        prepare(corpus, folder / name, tokenizer=tokenizer, overwrite=bool(older), part_bytes=3_000)

    def run_older() -> None:
        prepare(corpora.text_files([text], 0.2), folder / "older", tokenizer=f"{older}-300")

    if older:
        assert in_a_child(run_older) == 0
        shutil.copytree(folder / "older", folder / "whole")
    assert in_a_child(lambda: count_lines(run, folder / "count")) == 0
    num_lines = int((folder / "count").read_text())
    wanted = Dataset.open(folder / "whole").fingerprint
    # Spread over the whole, and many of the beginning and the end, where files are replaced and completed.
    lines = {1 + kill * num_lines // num_kills for kill in range(num_kills)}
    lines |= {*range(1, 100, 7), *range(num_lines - 30, num_lines + 1, 3)}
    for at in sorted(lines):
        if older:
            shutil.copytree(folder / "older", folder / "stopped")
        assert in_a_child(lambda at=at: killed_at(at, run)) == -signal.SIGKILL, at
        check_what_opens(folder / "stopped")
        assert in_a_child(lambda: run("stopped")) == 0, at
        dataset = Dataset.open(folder / "stopped")
        dataset.verify()
        assert dataset.fingerprint == wanted, at
        shutil.rmtree(folder / "stopped")
    print(len(lines))


def check_what_opens(folder: Path) -> None:
    """A folder opens only if it is complete."""
    try:
        dataset = Dataset.open(folder)
    except ValueError:
        return
    dataset.verify()


def in_a_child(work: Any) -> int:
    """Run a function in a forked process and return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_lines(run: Any, path: Path) -> None:
    """Count the lines of an uninterrupted call."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1

    watch(count)
    run("whole")
    sys.settrace(None)
    path.write_text(str(seen))


def killed_at(at: int, run: Any) -> None:
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(count)
    run("stopped")


def watch(on_line: Any) -> None:
    """Call a function before every line of the watched modules."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            on_line()
        return trace

    sys.settrace(trace)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
