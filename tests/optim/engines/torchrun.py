"""Runs a script beside this file under the real torchrun, with gloo on this machine's CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def torchrun(
    num_ranks: int, script: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks and wait for the end, whatever it is."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run(
        [*command, str(script), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def on_ranks(num_ranks: int, worker: str, *arguments: str, **variables: str) -> dict[str, list[str]]:
    """What a worker compared on so many ranks, each with what differed."""
    run = torchrun(num_ranks, HERE / worker, *arguments, **variables)
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, list[str]] = json.loads(line.removeprefix("RESULT "))
    return found
