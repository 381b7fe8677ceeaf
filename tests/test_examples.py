"""The example of sharded parameters runs as its first lines say, on the ranks of this machine's CPUs."""

import re
import runpy
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from torchrun import torchrun

EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp2.py"


def launch(num_ranks: int, *arguments: str) -> CompletedProcess[str]:
    return torchrun(num_ranks, EXAMPLE, *arguments, CUDA_VISIBLE_DEVICES="")


def run(num_ranks: int, num_steps: int, checkpoints: Path, *arguments: str) -> dict[int, float]:
    """The losses that the example prints."""
    finished = launch(num_ranks, "--steps", str(num_steps), "--checkpoints", str(checkpoints), *arguments)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Warning" not in finished.stderr, finished.stderr[-3000:]
    printed = re.findall(r"step (\d+): loss (\S+)", finished.stdout)
    return {int(step): float(loss) for step, loss in printed}


def test_fsdp2_learns_and_continues_from_its_checkpoint(tmp_path) -> None:
    """With MuonMERIT."""
    losses = run(2, 10, tmp_path)
    assert list(losses) == [5, 10]
    assert losses[10] < 1 < losses[5] < 3  # the logarithm of 64 tokens is 4.16
    later = run(1, 15, tmp_path)  # on another number of ranks
    assert list(later) == [15]
    assert later[15] < losses[10]
    assert {path.name for path in tmp_path.iterdir()} == {"step-000010", "step-000015"}


@pytest.mark.slow
def test_fsdp2_learns_with_soap_too(tmp_path) -> None:
    losses = run(2, 10, tmp_path, "--optimizer", "SOAPMERIT")
    assert losses[10] < 1.5 < losses[5] < 3


def test_fsdp2_refuses_an_unknown_optimizer_before_anything_else(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp2.py", "--optimizer", "muonmert"])
    with pytest.raises(
        ValueError, match=r"unknown optimizer 'muonmert'; did you mean 'MuonMERIT'\? Known optimizers: "
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
