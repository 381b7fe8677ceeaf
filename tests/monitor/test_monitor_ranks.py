"""Readings of several ranks together."""

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("ranks_worker.py")


def test_two_ranks_read_what_one_would() -> None:
    """Under DDP and under FSDP2."""
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WORKER],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
