"""Workers: their progress, and what happens when they fail."""

import importlib
import io
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from merit_lab.data import Dataset
from merit_lab.paper.records import plan, read
from merit_lab.paper.setups import EntryTrial, Scale
from merit_lab.runs import MetricsWriter, Run, lock
from merit_lab.study import workers as workers_module
from merit_lab.study.progress import StudyProgress
from merit_lab.study.state import is_done, last_step
from merit_lab.study.trial import Trial
from merit_lab.study.workers import Workers, WorkersEnded, _take_gpu
from merit_lab.train.signals import Interrupted, StopRequest


@pytest.fixture
def planned(toy: Scale, dataset: Dataset, tmp_path: Path) -> list[Trial]:
    trials = [toy.trial(toy.gpt2[0], "merit", seed) for seed in range(3)]
    return [trial for _, trial in plan(trials, tmp_path / "runs", dataset)]


def write(planned: Trial, *, steps: int, end: str | None) -> None:
    run = Run.create(planned.folder, planned.config.to_dict(), {})
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "started", "message": ""})
        for step in range(1, steps + 1):
            metrics.write({"kind": "train", "step": step, "loss": 2.5})
        if end is not None:
            metrics.write({"kind": "event", "step": steps, "what": end, "message": ""})


def test_a_run_is_done_when_it_finished_or_diverged(planned: list[Trial]) -> None:
    for trial, end in zip(planned, ("finished", "diverged", None), strict=True):
        write(trial, steps=2, end=end)
    assert [is_done(trial.folder) for trial in planned] == [True, True, False]


def test_a_kept_run_is_done(planned: list[Trial], tmp_path: Path, keep_only: Callable[[Path], None]) -> None:
    for trial, end in zip(planned, ("finished", "diverged"), strict=False):
        write(trial, steps=2, end=end)
    keep_only(tmp_path / "runs")
    assert (tmp_path / "runs.parquet").is_file()
    assert [is_done(trial.folder) for trial in planned] == [True, True, False]
    trials = [EntryTrial(config=trial.config, series="MERIT", panel="toy") for trial in planned]
    trial_records = read(list(zip(trials, planned, strict=True)))
    assert [record.status for record in trial_records.all] == ["finished", "diverged", "missing"]


def test_a_run_of_the_same_name_in_another_folder_is_another_run(
    planned: list[Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, end in (("here", "finished"), ("there", None)):
        write(replace(planned[0], folder=tmp_path / name / "run"), steps=2, end=end)
    monkeypatch.chdir(tmp_path / "here")
    assert is_done(Path("run"))
    monkeypatch.chdir(tmp_path / "there")
    assert not is_done(Path("run"))


def test_progress_shows_finished_and_current_runs(
    planned: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    write(planned[0], steps=4, end="finished")
    console = Console(file=io.StringIO(), width=120)
    progress = StudyProgress(planned, console)
    write(planned[1], steps=1, end=None)
    now = 600.0  # until the first step; it says nothing about the others
    with lock(planned[1].folder):
        progress.show()
        metrics = planned[1].folder / "metrics.jsonl"
        with MetricsWriter(metrics, offset=metrics.stat().st_size) as writer:
            writer.write({"kind": "train", "step": 3, "loss": 2.5})
        now = 840.0  # two steps in four minutes, five are left
        progress.show()
    run = planned[1].folder.name
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "1 of 3 runs",
        f"  {run}  step 1/4  loss 2.500",
        "1 of 3 runs, about 10 min left",
        f"  {run}  step 3/4  loss 2.500",
    ]


def test_no_time_is_left_when_all_runs_are_done(
    planned: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=120)
    progress = StudyProgress(planned, console)
    for run in planned:
        write(run, steps=4, end="finished")
        now += 60.0
        progress.show()
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "1 of 3 runs",
        "2 of 3 runs, about 1 min left",
        "3 of 3 runs",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_no_loss_before_the_first_step_but_a_real_nan(
    planned: list[Trial], terminal: bool
) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)
    progress = StudyProgress(planned, console)
    write(planned[0], steps=0, end=None)
    write(planned[1], steps=0, end=None)
    with MetricsWriter(planned[1].folder / "metrics.jsonl", offset=0) as writer:
        writer.write({"kind": "train", "step": 1, "loss": math.nan})
    with lock(planned[0].folder), lock(planned[1].folder):
        console.print(progress._picture())
    _, starting, diverging = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert starting == f"  {planned[0].folder.name}  starting"
    assert diverging == f"  {planned[1].folder.name}  step 1/4  loss nan"


def test_the_last_step_is_read_from_the_end_of_the_file(planned: list[Trial]) -> None:
    trial = planned[0]
    assert last_step(trial) == (0, None)
    write(trial, steps=2000, end=None)
    metrics = trial.folder / "metrics.jsonl"
    with metrics.open("r+b") as file:
        file.write(b"?" * 40)  # the whole file is no longer valid JSON
    assert last_step(trial) == (2000, 2.5)
    with MetricsWriter(metrics) as writer:
        writer.write({"kind": "train", "step": 2001, "loss": math.nan})
        writer.write({"kind": "update", "step": 2001, "parameters": {"a" * 200_000: {}}})
    with metrics.open("ab") as file:
        file.write(b'{"kind": "train", "step": 2002, "lo')
    step, loss = last_step(trial)
    assert step == 2001
    assert loss is not None
    assert math.isnan(loss)


def test_a_run_that_has_only_started_has_done_no_step(planned: list[Trial]) -> None:
    write(planned[0], steps=0, end=None)
    assert last_step(planned[0]) == (0, None)
    with MetricsWriter(planned[0].folder / "metrics.jsonl", offset=0) as writer:
        writer.write({"kind": "train", "step": 1, "loss": 2.5})  # the only line
    assert last_step(planned[0]) == (1, 2.5)


def test_failing_workers_report_their_error(planned: list[Trial], tmp_path: Path) -> None:
    config = replace(planned[0].config, data=tmp_path / "gone")
    broken = [Trial(planned[0].folder, config)]
    with pytest.raises(WorkersEnded, match="gone"), Workers(broken, 1, tmp_path / "logs") as workers:
        for _ in workers.waiting(broken, StopRequest()):
            pass
    assert "Traceback (most recent call last)" in (tmp_path / "logs" / "worker-0.log").read_text()


def test_the_error_is_that_of_the_worker_that_failed(planned: list[Trial], tmp_path: Path) -> None:
    """The other worker exited normally: it had left the last run to the one that failed."""
    workers = Workers(planned, 2, tmp_path)
    workers._processes = [SimpleNamespace(exitcode=code) for code in (0, 1)]  # type: ignore[misc]
    (tmp_path / "worker-0.log").write_text("[3 of 3] is being worked on by another process\n")
    (tmp_path / "worker-1.log").write_text("[3 of 3] begins\nOSError: no space left\n")
    assert workers._last_words().endswith("worker-1.log: OSError: no space left")


@pytest.mark.parametrize(
    ("signum", "cause"),
    [
        (signal.SIGKILL, "killed by SIGKILL, most likely for lack of memory; run .* with fewer --jobs"),
        (signal.SIGSEGV, "ended by SIGSEGV"),
    ],
)
def test_the_error_and_the_log_name_the_signal_that_ended_a_worker(
    signum: int, cause: str, planned: list[Trial], tmp_path: Path
) -> None:
    workers = Workers(planned, 2, tmp_path)
    killed, ended = (SimpleNamespace(exitcode=code, is_alive=lambda: False) for code in (-signum, 0))
    workers._processes = [ended, killed]  # type: ignore[list-item]
    for number in (0, 1):
        (tmp_path / f"worker-{number}.log").write_text("[1 of 3] starts\n")
    with pytest.raises(WorkersEnded, match=rf"worker-1\.log: {cause}"):
        list(workers.waiting(planned, StopRequest()))
    assert (tmp_path / "worker-0.log").read_text() == "[1 of 3] starts\n"
    assert re.fullmatch(rf"\[1 of 3\] starts\n{cause}.*\n", (tmp_path / "worker-1.log").read_text())


def test_runs_that_another_process_works_on_are_waited_for(
    planned: list[Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_POLL_SECONDS", 0)
    workers = Workers(planned[:1], 1, tmp_path)
    workers._processes = [SimpleNamespace(exitcode=0, is_alive=lambda: False)]  # type: ignore[list-item]
    with lock(planned[0].folder):
        waiting = workers.waiting(planned[:1], StopRequest())
        next(waiting)
        next(waiting)
        write(planned[0], steps=4, end="finished")
    assert list(waiting) == []


def test_a_signal_is_named(planned: list[Trial], tmp_path: Path) -> None:
    stop = StopRequest()
    stop.signum = signal.SIGTERM
    waiting = Workers([], 0, tmp_path / "logs").waiting(planned[2:], stop)
    with pytest.raises(Interrupted, match="stopped by SIGTERM, with checkpoints"):
        next(waiting)


def test_ctrl_c_does_not_reach_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import torch for seconds, where KeyboardInterrupt would print a traceback."""
    (tmp_path / "worker_to_interrupt.py").write_text(
        "import os, signal\n"
        "def work(runs, place, num, log):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    log.write_text('still here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers_module, "_work", importlib.import_module("worker_to_interrupt").work)
    with Workers([], 1, tmp_path / "logs"):
        pass
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "still here"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("num_gpus", "num", "shares"), [(1, 1, [1]), (1, 4, [1 / 4] * 4), (2, 3, [1 / 2, 1, 1 / 2])]
)
def test_workers_that_share_a_gpu_divide_its_memory(
    num_gpus: int, num: int, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, float]] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda share, gpu: taken.append((gpu, share))
    )
    for place in range(num):
        monkeypatch.setenv("LOCAL_RANK", "")
        _take_gpu(place, num)
        assert os.environ["LOCAL_RANK"] == str(place % num_gpus)
    assert taken == [(place % num_gpus, share) for place, share in enumerate(shares)]
