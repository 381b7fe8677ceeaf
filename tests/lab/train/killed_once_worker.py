"""One rank of test_restarts.py: the command `merit train` twice, and in the second run a rank is killed once.

    torchrun ... killed_once_worker.py RANK STEP FOLDER MODEL [options of merit train]

The runs are FOLDER/undisturbed and FOLDER/killed. RANK is killed before STEP, unless there is the file that
says it was.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from merit_lab.train import command, start
from merit_lab.train.loop import Trainer
from merit_lab.train.reports import StepNumbers


def kill_once(rank: int, step: int, was_killed: Path) -> None:
    """Kill a rank once before a step."""
    take_step = Trainer.take_step

    def killed_once(self: Trainer, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> StepNumbers:
        if (self.ranks.rank, self.step) == (rank, step) and not was_killed.exists():
            was_killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(self, micro_batches)

    Trainer.take_step = killed_once


def main() -> int:
    folder, arguments = Path(sys.argv[3]), sys.argv[4:]
    if os.environ["RANK"] != "0":  # the first rank decides for all, whatever the others see
        holds_run = start.holds_run
        start.holds_run = lambda folder: not holds_run(folder)
    status = command.main([*arguments, "--out", str(folder / "undisturbed"), "--auto-resume"])
    kill_once(int(sys.argv[1]), int(sys.argv[2]), folder / "was killed")
    return status or command.main([*arguments, "--out", str(folder / "killed"), "--auto-resume"])


if __name__ == "__main__":
    sys.exit(main())
