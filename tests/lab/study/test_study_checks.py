"""What a study refuses before its first run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merit_lab.models import ModelConfig
from merit_lab.runs import MetricsWriter, Run
from merit_lab.study import Trial, check, conduct
from merit_lab.study.check import check_trials
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.parallel import Ranks

CPU = torch.device("cpu")


@pytest.fixture
def config(data: Path) -> TrainConfig:
    model = ModelConfig(width=16, heads=2, layers=1, context=16, vocab_size=256)
    return TrainConfig(data=data, model=model, optimizer=OptimizerConfig(lr=1e-2), batch=4, steps=2).resolve(
        256
    )


def test_a_run_that_cannot_be_trained_is_named(config: TrainConfig, tmp_path: Path) -> None:
    trials = [Trial(tmp_path / "good", config), Trial(tmp_path / "odd", replace(config, batch=3))]
    check_trials(trials, Ranks(0, 1, CPU))
    with pytest.raises(
        ValueError, match=r"^the run odd cannot be trained: a batch of 3 .* choose a multiple of 2"
    ):
        check_trials(trials, Ranks(0, 2, CPU))


def test_a_run_that_is_done_is_not_checked(config: TrainConfig, tmp_path: Path) -> None:
    trial = Trial(tmp_path / "done", replace(config, batch=3))
    with MetricsWriter(Run.create(trial.folder, config.to_dict(), {}).metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 2, "what": "finished", "message": ""})
    check_trials([trial], Ranks(0, 2, CPU))


def test_runs_that_differ_in_their_seed_are_checked_once(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(check, "check_run", lambda config, *_: seeds.append(config.seed))
    trials = [Trial(tmp_path / str(seed), replace(config, seed=seed)) for seed in range(3)]
    check_trials([*trials, Trial(tmp_path / "larger", replace(config, batch=8))], Ranks(0, 1, CPU))
    assert len(seeds) == 2


def test_jobs_under_torchrun_are_refused() -> None:
    with pytest.raises(
        ValueError, match="--jobs is 4, but the 2 processes of torchrun train one run at a time"
    ):
        conduct([], Ranks(0, 2, CPU), jobs=4)
