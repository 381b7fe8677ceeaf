"""One rank of test_ranks.py: trains or resumes, and is disturbed before a step.

    disturbed_worker.py CONFIG FOLDER STEP HOW

CONFIG is a configuration, or "resume". Before STEP the process dies, or rank 1 is told to stop or begins to
meet a disk that cannot be read once: HOW is "die", "signal" or "unreadable".
"""

import errno
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from merit_lab.train import Interrupted, TrainConfig, checkpoint, train
from merit_lab.train.loop import Trainer
from merit_lab.train.reports import StepNumbers


def disturb(step: int, how: str) -> None:
    take_step, hash_file = Trainer.take_step, checkpoint.hash_file

    def unreadable(path: Path) -> str:
        del path
        checkpoint.hash_file = hash_file
        raise OSError(errno.EIO, "Input/output error")

    def disturbed(self: Trainer, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> StepNumbers:
        if self.step == step:
            if how == "die":
                os._exit(7)
            if self.ranks.rank == 1:  # a signal, or a fault, may reach one rank alone
                if how == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    checkpoint.hash_file = unreadable
        return take_step(self, micro_batches)

    Trainer.take_step = disturbed


def main() -> None:
    config, folder, step, how = sys.argv[1:]
    disturb(int(step), how)
    resume = config == "resume"
    try:
        train(None if resume else TrainConfig.from_dict(json.loads(config)), folder, resume=resume)
    except Interrupted as interrupted:
        print(f"rank {os.environ['RANK']}: {interrupted}")


if __name__ == "__main__":
    main()
