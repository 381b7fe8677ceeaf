"""The examples run as their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp2.py"


def run(num_ranks: int, num_steps: int, checkpoints: Path) -> dict[int, float]:
    """The losses that the example prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    finished = subprocess.run(
        [sys.executable, *launcher, EXAMPLE, "--steps", str(num_steps), "--checkpoints", checkpoints],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Warning" not in finished.stderr, finished.stderr[-3000:]
    printed = re.findall(r"step (\d+): loss (\S+)", finished.stdout)
    return {int(step): float(loss) for step, loss in printed}


def test_fsdp2_learns_and_continues_from_its_checkpoint(tmp_path) -> None:
    losses = run(2, 20, tmp_path)
    assert list(losses) == [10, 20]
    assert losses[20] < losses[10] < 4.2  # the logarithm of 64 tokens is 4.16
    later = run(1, 40, tmp_path)  # on another number of ranks
    assert list(later) == [30, 40]
    assert later[30] < losses[20]
    assert {path.name for path in tmp_path.iterdir()} == {"step-000020", "step-000040"}
