"""Distributed checkpoints: saved on some ranks, continued on others, bit for bit."""

import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from torchrun import ENGINES, on_ranks, torchrun

WORKER = "sharded_checkpoint_worker.py"

# torch warns that it saves or loads without other ranks, as intended here.
of_one_process = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class KilledRun(NamedTuple):
    folder: Path
    finished: subprocess.CompletedProcess[str]
    seconds: float


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> KilledRun:
    """Four ranks that save checkpoints in several layouts; then one of them is killed in a step."""
    folder = tmp_path_factory.mktemp("four-ranks")
    begun = time.monotonic()
    finished = torchrun(4, ENGINES / WORKER, f"save={folder}", f"die={folder}")
    return KilledRun(folder, finished, time.monotonic() - begun)


def test_a_killed_rank_ends_the_job_with_a_clear_error(killed) -> None:
    assert killed.finished.returncode != 0
    root_cause = killed.finished.stderr.partition("Root Cause")[2]
    assert "Signal 9 (SIGKILL)" in root_cause
    assert "rank      : 1" in root_cause
    assert "a step ended without one of its ranks" not in killed.finished.stderr
    # Most of the time is startup and saving; gloo would wait for half an hour.
    assert killed.seconds < 120


@of_one_process
def test_checkpoints_of_four_ranks_and_of_one_continue_on_two(killed) -> None:
    from sharded_checkpoint_worker import save

    save(killed.folder, None, ["normuon-bf16"])
    compared = on_ranks(2, WORKER, f"load={killed.folder}", "fresh", "full")
    assert {case: wrong for case, wrong in compared.items() if wrong} == {}
    assert "merit: killed -> fsdp" in compared  # the last checkpoint of the killed run
    assert "merit-bf16: hsdp -> fsdp_by_columns" in compared
    assert "MERIT, torch.bfloat16" in compared
    assert "merit-bf16, whole" in compared
    assert "normuon-bf16: fsdp_and_tp -> fsdp_by_columns" in compared
    assert "normuon-bf16: None -> fsdp" in compared
    assert "soap-merit: fsdp_and_tp -> fsdp_by_columns" in compared
    assert len(compared) == 2 * (3 * 8 + 1 + 1) + 18 + 6


@of_one_process
@pytest.mark.slow
def test_checkpoints_of_two_ranks_continue_on_three(tmp_path) -> None:
    on_ranks(2, WORKER, f"save={tmp_path}")
    compared = on_ranks(3, WORKER, f"load={tmp_path}")
    assert {case: wrong for case, wrong in compared.items() if wrong} == {}
    assert len(compared) == 2 * 8


@of_one_process
@pytest.mark.parametrize("saved_in", ["fsdp", "fsdp_and_tp"])
def test_checkpoints_of_four_ranks_continue_in_one_process(killed, saved_in) -> None:
    from sharded_checkpoint_worker import CASES, continued

    compared = {name: continued(killed.folder / saved_in, name, None) for name in CASES}
    assert {case: wrong for case, wrong in compared.items() if wrong} == {}
