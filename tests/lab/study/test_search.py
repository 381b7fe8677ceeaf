"""Trials are carried out once each, whatever ends the processes that train them."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from merit_lab.models import ModelConfig
from merit_lab.runs import Run, RunInUse
from merit_lab.study import search
from merit_lab.study.search import carry_out
from merit_lab.study.trial import Trial
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig

NUM, STEPS = 5, 40
_FORKS = multiprocessing.get_context("fork")


@pytest.fixture
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


def _forked(planned: list[Trial], folder: Path) -> Any:
    process = _FORKS.Process(target=carry_out, args=(planned, folder))
    process.start()
    return process


def test_killed_processes_lose_and_double_no_trial(config: TrainConfig, tmp_path: Path) -> None:
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    carry_out(trials(config, calm), calm)
    expected = losses(trials(config, calm))

    planned, chance = trials(config, wild), random.Random(1)
    running = [_forked(planned, wild) for _ in range(2)]
    for _ in range(5):
        time.sleep(chance.uniform(0.1, 0.8))
        victim = chance.choice(running)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        running[running.index(victim)] = _forked(planned, wild)
    for process in running:
        process.join()
        assert process.exitcode == 0
    assert losses(planned) == expected
    assert sorted(told(wild)) == list(range(NUM))


def test_the_journal_is_made_again_from_the_runs(config: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    planned = trials(config, folder, num=3)
    carry_out(planned[:2], folder)
    before = [(trial.folder / "metrics.jsonl").read_bytes() for trial in planned[:2]]
    journal = folder / "study.journal"
    with journal.open("a") as file:
        file.write('{"op_code": 4, "tri')  # of a process that was killed
    carry_out(planned, folder)
    assert told(folder) == [0, 1, 2]

    content = journal.read_bytes()
    journal.write_bytes(content[:100] + b"\xff" + content[101:])
    with pytest.raises(ValueError, match=r"remove .*study.journal: the same command makes it again"):
        carry_out(planned, folder)
    journal.unlink()
    carry_out(planned, folder)
    assert told(folder) == [0, 1, 2]
    assert before == [(trial.folder / "metrics.jsonl").read_bytes() for trial in planned[:2]]


def test_several_jobs_train_the_same(config: TrainConfig, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    seen: list[int] = []
    carry_out(trials(config, one, num=3), one)
    carry_out(trials(config, two, num=3), two, jobs=2, conclude=lambda: seen.append(1))
    assert losses(trials(config, two, num=3)) == losses(trials(config, one, num=3))
    assert seen
    assert sorted(told(two)) == [0, 1, 2]


def test_a_run_that_another_command_trains_is_waited_for(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trial,) = planned = trials(config, tmp_path, num=1)
    monkeypatch.setattr(search, "_POLL_SECONDS", 0.01)
    train, calls = search.Pool.train, []

    def busy_at_first(pool: search.Pool, config: TrainConfig, folder: Path) -> Run:
        calls.append(folder)
        if len(calls) == 1:
            raise RunInUse("in use")
        return train(pool, config, folder)

    monkeypatch.setattr(search.Pool, "train", busy_at_first)
    carry_out(planned, tmp_path)
    assert calls == [trial.folder, trial.folder]
    assert told(tmp_path) == [0]


def test_what_is_not_the_same_study_is_refused(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here" / "study", tmp_path / "elsewhere" / "study"
    url = f"sqlite:///{tmp_path}/trials.db"
    planned = trials(config, here, num=1)
    carry_out(planned, here, storage=url)
    with pytest.raises(ValueError, match=r"whose runs are not in .*elsewhere"):
        carry_out(trials(config, elsewhere, num=1), elsewhere, storage=url)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with pytest.raises(ValueError, match="SQLite, which several machines cannot share"):
        carry_out(planned, here, storage=url)
    with pytest.raises(ValueError, match=r"cannot be read.*check --storage"):
        carry_out(planned, here, storage="nonsense://")
    other = [Trial(planned[0].folder, replace(config, batch=8))]
    with pytest.raises(ValueError, match="different batch"):
        carry_out(other, here)
    shutil.rmtree(planned[0].folder)
    carry_out(planned[:0], here)
    with pytest.raises(ValueError, match="a whole number of at least 1"):
        carry_out(planned, here, jobs=0)
