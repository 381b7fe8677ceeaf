"""Runs the ``main`` of a script on ranks that are forked from one process, which has imported torch for all.

torchrun starts each rank as a process of its own, and each spends seconds of a core on importing. ``launch``
forks them from a server, which starts at the first launch and has imported torch and the lab's training. What
needs other variables before these are imported, or imports much more, has a process of its own to fork from,
which imports the script too:

    python forked_ranks.py NUM_RANKS SCRIPT ARGUMENT...

Ranks run on the CPU. As torchrun's, they find the others by the variables of their environment.
"""

import atexit
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any
from unittest import mock

IMPORTED = ["torch._dynamo", "torch.distributed.tensor.parallel", "merit_lab.train.loop", "pytest"]
_BEFORE_IMPORTS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_TO_END = 20  # seconds that ranks have to end by themselves after one has failed


def launch(
    num_ranks: int, script: Path, arguments: list[str], environment: Mapping[str, str], *, joined: bool
) -> tuple[int, str, str]:
    """Run a script, and return the first status that is not 0, and what all ranks wrote.

    Args:
        num_ranks: the number of ranks.
        script: the file of a module with a function ``main``.
        arguments: arguments of the script.
        environment: all variables of the ranks.
        joined: whether the ranks are in a process group of gloo when ``main`` is called.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, {**environment, **_BEFORE_IMPORTS}):
        forkserver.ensure_running()
    with TemporaryDirectory() as folder:
        written = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in written:
            file.touch()
        status = _run(context, num_ranks, (script, arguments, {**environment}, joined, written))
        out, err = (file.read_text(errors="replace") for file in written)
    return status, out, err


def main() -> None:
    num_ranks, script = int(sys.argv[1]), Path(sys.argv[2])
    _import(script)
    sys.exit(_run(get_context("fork"), num_ranks, (script, sys.argv[3:], {**os.environ}, True, [])))


def _run(context: BaseContext, num_ranks: int, arguments: tuple[Any, ...]) -> int:
    all_forked = context.Event()
    with _store(num_ranks) as variables:
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, variables, all_forked, *arguments))  # type: ignore[attr-defined]
            for rank in range(num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            all_forked.set()
            deadline = monotonic() + 280
            while running := [process.sentinel for process in ranks if process.exitcode is None]:
                connection.wait(running, deadline - monotonic())
                if any(process.exitcode for process in ranks):
                    deadline = min(deadline, monotonic() + _TO_END)
                if monotonic() >= deadline:
                    break
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return next((process.exitcode for process in ranks if process.exitcode), 0)


@contextmanager
def _store(num_ranks: int) -> Iterator[dict[str, str]]:
    """By which the ranks meet, as torchrun's agent has it: the variables that lead to it."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
    }


def _rank(
    rank: int,
    num_ranks: int,
    variables: dict[str, str],
    all_forked: Event,
    script: Path,
    arguments: list[str],
    environment: dict[str, str],
    joined: bool,
    written: list[Path],
) -> None:
    os.environ.clear()
    os.environ.update(
        environment | _BEFORE_IMPORTS | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    )
    for descriptor, file in enumerate(written, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    # A thread of the store looks up the address of each rank that connects. A rank forked meanwhile would
    # inherit the lock of that, and wait for ever.
    all_forked.wait()
    sys.argv = [str(script), *arguments]
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if joined:
            import torch.distributed as dist

            dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        status = _import(script).main()
        atexit._run_exitfuncs()  # multiprocessing does not
    except Exception:
        traceback.print_exc()
        status = 1
    sys.exit(status)


def _import(script: Path) -> Any:
    sys.path.insert(0, str(script.parent))
    return importlib.import_module(script.stem)


if __name__ == "__main__":
    main()
