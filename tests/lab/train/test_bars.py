"""Runs that end early: abandoned above a bar, finished at a target."""

from pathlib import Path

import pytest

from merit_lab.models import ModelConfig
from merit_lab.train import Bar, MeasureConfig, OptimizerConfig, TrainConfig, train


@pytest.fixture
def config(data: Path) -> TrainConfig:
    return TrainConfig(
        data=data,
        model=ModelConfig(width=16, heads=2, layers=1, context=16, vocab_size=256),
        optimizer=OptimizerConfig(lr=1e-2),
        measure=MeasureConfig(validation_every=2, validation_sequences=8, attention_every=0),
        batch=4,
        steps=6,
    )


def test_a_run_ends_at_the_first_bar_that_it_exceeds(config, tmp_path) -> None:
    run = train(config, tmp_path / "run", bars=[Bar(2, 100.0), Bar(4, 0.5), Bar(6, 0.1)])
    assert run.status == "abandoned"
    event = run.metrics("event")[-1]
    assert event["step"] == 4
    assert event["message"].endswith("is above 0.500")
    assert [row["step"] for row in run.metrics("validation")] == [0, 2, 4]


def test_bars_do_not_change_a_run_that_stays_below_them(config, tmp_path) -> None:
    runs = [train(config, tmp_path / name, bars=bars) for name, bars in (("a", [Bar(4, 100.0)]), ("b", []))]
    assert [run.status for run in runs] == ["finished", "finished"]
    assert runs[0].metrics("validation") == runs[1].metrics("validation")


def test_a_run_finishes_at_its_target(config, tmp_path) -> None:
    whole = train(config, tmp_path / "whole")
    losses = {row["step"]: row["loss"] for row in whole.metrics("validation")}
    run = train(config, tmp_path / "run", target=losses[4])
    assert run.status == "finished"
    assert run.metrics("validation") == whole.metrics("validation")[:3]
    assert run.metrics("event")[-1]["message"].endswith("after 4 of 6 steps")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000004"]
    assert train(config, tmp_path / "run", resume="auto").status == "finished"
