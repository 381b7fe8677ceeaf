"""Readings of several ranks together."""

from pathlib import Path

from torchrun import forked

WORKER = Path(__file__).with_name("ranks_worker.py")


def test_two_ranks_read_what_one_would() -> None:
    """Under DDP and under FSDP2."""
    finished = forked(2, WORKER, CUDA_VISIBLE_DEVICES="")
    assert finished.returncode == 0, finished.stderr[-3000:]
