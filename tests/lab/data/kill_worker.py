"""Prepares a small corpus repeatedly, killed by SIGKILL before each change of a file, and then resumed.

Usage: kill_worker.py FOLDER TOKENIZER. The tokenizer "bytes-over-bpe" is "bytes" in a folder with data of
another recipe, which are to be replaced. Prints how many kills were survived.
"""

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from merit_lab.data.corpora import text_files
from merit_lab.data.prepare import prepare
from merit_lab.data.tokens import Dataset

CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.truncate"}


def main(folder: Path, tokenizer: str) -> None:
    text = folder / "text.jsonl"
    line = '{"text": "line %d of some text, %d"}\n'
    text.write_text("".join(line % (number, number**2) for number in range(600)))
    tokenizer, _, older = tokenizer.partition("-over-")

    def run(name: str) -> None:
        corpus = text_files([text], 0.1)
        prepare(corpus, folder / name, tokenizer=tokenizer, overwrite=bool(older), part_bytes=8_000)

    def run_older() -> None:
        prepare(text_files([text], 0.2), folder / "older", tokenizer=f"{older}-300")

    assert in_a_child(lambda: run("whole")) == 0
    wanted = Dataset.open(folder / "whole").fingerprint
    assert not older or in_a_child(run_older) == 0
    stopped = folder / "stopped"
    for number in itertools.count(1):
        if older:
            shutil.copytree(folder / "older", stopped)
        status = in_a_child(lambda number=number: killed_at(number, run, stopped))
        if status == 0:
            print(number - 1)
            return
        assert status == -signal.SIGKILL, number
        check_what_opens(stopped)
        assert in_a_child(lambda: run("stopped")) == 0, number
        dataset = Dataset.open(stopped)
        dataset.verify()
        assert dataset.fingerprint == wanted, number
        shutil.rmtree(stopped)


def check_what_opens(folder: Path) -> None:
    """A folder opens only if it is complete."""
    try:
        dataset = Dataset.open(folder)
    except ValueError:
        return
    dataset.verify()


def in_a_child(work: Callable[[], None]) -> int:
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


def killed_at(number: int, run: Callable[[str], None], folder: Path) -> None:
    """Prepare the folder, and end before the change of this number."""
    left = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in CHANGES and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    run(folder.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
