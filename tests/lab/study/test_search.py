"""Trials are carried out once each, whatever ends the processes that train them."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest

from merit_lab.models import ModelConfig
from merit_lab.runs import Run, RunInUse
from merit_lab.study import search
from merit_lab.study.search import carry_out
from merit_lab.study.trial import Trial
from merit_lab.study.trials import Trials
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig
from merit_lab.train.jobs import Done, Job
from merit_lab.train.loop import train
from merit_lab.train.pool import Pool

NUM, STEPS = 5, 40
_FORKS = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def config(data: Path) -> TrainConfig:
    return TrainConfig(
        data=data,
        model=ModelConfig(width=16, heads=2, layers=1, context=16, vocab_size=256),
        optimizer=OptimizerConfig(lr=1e-2),
        measure=MeasureConfig(validation_every=20, validation_sequences=64, attention_every=0),
        checkpoint=CheckpointConfig(every_steps=7),
        batch=4,
        steps=STEPS,
    ).resolve(256)


@pytest.fixture(scope="module")
def calm(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm") / "study"
    carry_out(trials(config, folder), folder)
    return folder


def trials(config: TrainConfig, folder: Path, num: int = NUM) -> list[Trial]:
    return [Trial(folder / f"seed{seed}", replace(config, seed=seed)) for seed in range(num)]


def losses(planned: list[Trial]) -> list[list[float]]:
    """The training losses of every run; an error if a step is there twice or missing."""
    found = []
    for trial in planned:
        lines = Run.open(trial.folder).metrics("train")
        assert [line["step"] for line in lines] == list(range(1, trial.config.steps + 1))
        found.append([line["loss"] for line in lines])
    return found


def told(folder: Path) -> list[int]:
    """The numbers of the trials that Optuna was told of, in the journal."""
    lines = [json.loads(line) for line in (folder / "study.journal").read_text().splitlines()]
    return [line["trial_id"] for line in lines if line.get("state") in (1, 3)]


def disturbed(planned: list[Trial], folder: Path, storage: str | None = None) -> None:
    """Two processes carry out the trials; five times one of them is killed, and begun again."""

    def begin() -> Any:
        process = _FORKS.Process(target=carry_out, args=(planned, folder, 1, storage))
        process.start()
        return process

    running, chance = [begin(), begin()], random.Random(1)
    for _ in range(5):
        time.sleep(chance.uniform(0.1, 0.8))
        victim = chance.choice(running)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        running[running.index(victim)] = begin()
    for process in running:
        process.join()
        assert process.exitcode == 0


def test_killed_processes_lose_and_double_no_trial(config: TrainConfig, calm: Path, tmp_path: Path) -> None:
    planned = trials(config, tmp_path)
    disturbed(planned, tmp_path)
    assert losses(planned) == losses(trials(config, calm))
    assert sorted(told(tmp_path)) == list(range(NUM))


@pytest.fixture
def postgresql() -> Iterator[str]:
    """The URL of a database of Debian's PostgreSQL, which refuses to run as root."""
    pytest.importorskip("psycopg")
    if not (initdb := shutil.which("initdb", path=f"/usr/lib/postgresql/15/bin:{os.environ['PATH']}")):
        pytest.skip("PostgreSQL is not installed")
    user: Any = "nobody" if os.geteuid() == 0 else None
    control = Path(initdb).resolve().with_name("pg_ctl")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        if user:
            shutil.chown(folder, user)
        files, options = f"{folder}/files", f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
        run = partial(subprocess.run, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
        run([initdb, "-D", files, "-U", "merit", "--auth=trust"])
        run([control, "-D", files, "-l", f"{folder}/log", "-o", options, "-w", "start"])
        try:
            yield f"postgresql://merit@127.0.0.1:{port}/postgres"
        finally:
            run([control, "-D", files, "-m", "immediate", "stop"])


@pytest.mark.slow
def test_a_database_holds_the_trials_of_several_machines(
    config: TrainConfig, calm: Path, tmp_path: Path, postgresql: str
) -> None:
    planned = trials(config, tmp_path)
    disturbed(planned, tmp_path, postgresql)
    assert losses(planned) == losses(trials(config, calm))
    storage = optuna.storages.RDBStorage(postgresql)
    study = optuna.load_study(study_name=tmp_path.name, storage=storage)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * NUM
    storage.remove_session()
    storage.engine.dispose()
    assert not (tmp_path / "study.journal").exists()


def test_the_journal_is_made_again_from_the_runs(config: TrainConfig, calm: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(calm, tmp_path / "study")
    planned = trials(config, folder)
    before = [(trial.folder / "metrics.jsonl").read_bytes() for trial in planned]
    journal = folder / "study.journal"
    with journal.open("a") as file:
        file.write('{"op_code": 4, "tri')  # of a process that was killed
    carry_out(planned, folder)
    assert told(folder) == list(range(NUM))

    content = journal.read_bytes()
    journal.write_bytes(content[:100] + b"\xff" + content[101:])
    with pytest.raises(ValueError, match=r"remove .*study.journal: the same command makes it again"):
        carry_out(planned, folder)
    journal.unlink()
    carry_out(planned, folder)
    assert told(folder) == list(range(NUM))
    assert before == [(trial.folder / "metrics.jsonl").read_bytes() for trial in planned]

    shutil.rmtree(planned[0].folder)  # the run directory is the truth
    carry_out(planned, folder)
    assert losses(planned) == losses(trials(config, calm))


def in_turn(jobs: Iterator[Job], num: int, logs: Path) -> Iterator[Done]:
    """What several processes do, in this one: each takes a job before one is done."""
    del logs
    taken: list[Job] = []
    pool = Pool()
    while taken := [*taken, *itertools.islice(jobs, num - len(taken))]:
        folder, config = taken.pop(0)
        yield Done(folder, train(config, folder, pool=pool).status)


@pytest.mark.parametrize("are_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_jobs_train_the_same(
    are_real: bool, config: TrainConfig, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not are_real:
        monkeypatch.setattr(search, "hand_out", in_turn)
    seen: list[int] = []
    planned = trials(config, tmp_path, num=3)
    carry_out(planned, tmp_path, jobs=2, conclude=lambda: seen.append(1))
    assert losses(planned) == losses(trials(config, calm, num=3))
    assert len(seen) == 3
    assert sorted(told(tmp_path)) == [0, 1, 2]


def test_a_job_that_fails_leaves_the_others(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(jobs: Iterator[Job], num: int, logs: Path) -> Iterator[Done]:
        for place, job in enumerate(jobs):
            yield (
                Done(job[0], "failed", "out of memory")
                if place == 0
                else next(in_turn(iter([job]), num, logs))
            )

    monkeypatch.setattr(search, "hand_out", fails)
    planned = trials(config, tmp_path, num=2)
    with pytest.raises(ChildProcessError, match="1 runs failed; seed0: out of memory"):
        carry_out(planned, tmp_path, jobs=2)
    assert [trial.is_done for trial in planned] == [False, True]


def test_a_run_that_another_command_trains_is_waited_for(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trial,) = planned = trials(config, tmp_path, num=1)
    monkeypatch.setattr(search, "_POLL_SECONDS", 0.01)
    calls = []

    def busy_at_first(config: TrainConfig, folder: Path, *, pool: Pool) -> Run:
        calls.append(folder)
        if len(calls) == 1:
            raise RunInUse("in use")
        return train(config, folder, pool=pool)

    monkeypatch.setattr(search, "train", busy_at_first)
    carry_out(planned, tmp_path)
    assert calls == [trial.folder, trial.folder]
    assert told(tmp_path) == [0]


def test_what_is_not_the_same_study_is_refused(
    config: TrainConfig, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = shutil.copytree(calm, tmp_path / "here" / "study"), tmp_path / "elsewhere" / "study"
    url = f"sqlite:///{tmp_path}/trials.db"
    planned = trials(config, here)
    carry_out(planned, here, storage=url)
    with pytest.raises(ValueError, match=r"whose runs are not in .*elsewhere"):
        carry_out(trials(config, elsewhere), elsewhere, storage=url)
    with pytest.raises(ValueError, match=r"cannot be read.*check --storage"):
        carry_out(planned, here, storage="nonsense://")
    first = Trial(here / "seed9", replace(config, seed=9))
    Trials(here, url).add([first])
    oftener = replace(config.measure, validation_every=2)
    Trials(here, url).add([replace(first, config=replace(first.config, measure=oftener))])
    with pytest.raises(ValueError, match="has planned seed9 with other settings"):
        Trials(here, url).add([replace(first, config=replace(first.config, steps=8))])
    with pytest.raises(ValueError, match="different batch"):
        carry_out([Trial(here / "seed0", replace(config, batch=8))], here)
    with pytest.raises(ValueError, match="a whole number of at least 1"):
        carry_out(planned, here, jobs=0)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with pytest.raises(ValueError, match="SQLite, which several machines cannot share"):
        carry_out(planned, here, storage=url)
