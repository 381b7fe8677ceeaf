"""Runs a worker on ranks that are forked from one process, which has imported torch for all of them.

    python forked_ranks.py NUM_RANKS SCRIPT ARGUMENT...

torchrun starts each rank as a process of its own, and each spends seconds of a core on importing. Here the
script is imported once, and its ``main`` runs on every rank, in a process group of gloo.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch._dynamo  # noqa: F401 - each rank would import it at its first DTensor
import torch.distributed as dist
from torch.multiprocessing import start_processes


def main() -> None:
    num_ranks, script = int(sys.argv[1]), Path(sys.argv[2])
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(script.parent))
    worker = importlib.import_module(script.stem)
    with TemporaryDirectory() as folder:
        # If one rank fails, the others are ended, and its traceback is raised here.
        start_processes(run, (worker.main, num_ranks, folder), num_ranks, start_method="fork")


def run(rank: int, work: Callable[[], None], num_ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store?rank={rank}&world_size={num_ranks}")
    work()


if __name__ == "__main__":
    main()
