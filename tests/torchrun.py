"""Runs scripts on several ranks, with gloo on this machine's CPUs.

Under the real torchrun, on one node or on two; or, where torchrun is not what is tested, on forked ranks,
which start in a fraction of the time.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import forked_ranks

TESTS = Path(__file__).parent
ENGINES = TESTS / "optim" / "engines"
BENCHMARKS = TESTS.parent / "benchmarks"

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_ON_THIS_NODE = ["--standalone"]
_ADDRESSES = ("10.77.0.1", "10.77.0.2")  # those of two_nodes.sh
_ON_TWO_NODES = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=test", "--rdzv-endpoint=10.77.0.1:29500"]


def torchrun(
    num_ranks: int,
    script: Path,
    *arguments: str,
    num_nodes: int = 1,
    max_restarts: int = 0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks, on one node or two, and wait for the end, whatever it is."""
    where = _ON_THIS_NODE if num_nodes == 1 else _ON_TWO_NODES
    options = [*where, f"--nproc-per-node={num_ranks // num_nodes}", f"--max-restarts={max_restarts}"]
    command = [*_TORCHRUN, *options, str(script), *arguments]
    return _finished(command if num_nodes == 1 else on_two_nodes(command), variables)


def forked(
    num_ranks: int,
    script: Path,
    *arguments: str,
    joined: bool = True,
    imports_much: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the ``main`` of a script on so many forked ranks, and wait for the end, whatever it is.

    Unless ``joined``, the script makes the process group, as under torchrun. A script that imports much more
    than torch is imported once for all ranks, in a process of its own.
    """
    # The variable must be set before torch is imported, which imports triton.
    if imports_much or "TRITON_INTERPRET" in variables:
        assert joined
        launcher = [sys.executable, str(TESTS / "forked_ranks.py")]
        return _finished([*launcher, str(num_ranks), str(script), *arguments], variables)
    environment = _environment(variables)
    status, out, err = forked_ranks.launch(num_ranks, script, list(arguments), environment, joined=joined)
    return subprocess.CompletedProcess([str(script), *arguments], status, out, err)


def _finished(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=_environment(variables),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _environment(variables: dict[str, str]) -> dict[str, str]:
    """That of a rank."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [environment.get("PYTHONPATH")])])
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables


def on_ranks(
    num_ranks: int, worker: str, *arguments: str, num_nodes: int = 1, **variables: str
) -> dict[str, list[str]]:
    """What a worker of tests/optim/engines compared on so many ranks, each with what differed."""
    script = ENGINES / worker
    if num_nodes == 1:
        run = forked(num_ranks, script, *arguments, **variables)
    else:
        run = torchrun(num_ranks, script, *arguments, num_nodes=num_nodes, **variables)
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, list[str]] = json.loads(line.removeprefix("RESULT "))
    return found


def on_two_nodes(command: list[str]) -> list[str]:
    """What runs a command on two nodes, which are network namespaces of this machine."""
    # Root may make namespaces where others need one in which they are root.
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    made = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *as_root, *made, "sh", str(TESTS / "two_nodes.sh"), *command]


def why_not_two_nodes() -> str | None:
    """What keeps this machine from being two nodes; None if nothing does."""
    for tool, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        if shutil.which(tool) is None:
            return f"no command {tool}, which is in the package {package}"
    command = on_two_nodes(["ip", "-oneline", "address", "show", "veth0"])
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if shown.returncode:
        return shown.stderr.strip()
    assert {address for address in _ADDRESSES if f" {address}/" in shown.stdout} == {*_ADDRESSES}
    return None
