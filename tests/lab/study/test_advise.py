"""`merit advise`: what it answers from records, and what it refuses."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_runs
import pytest

from merit_lab.models import PRESETS
from merit_lab.study.advise import Size, advise, main, read_records
from merit_lab.train import OptimizerConfig, TrainConfig

TINY = PRESETS["tiny"]
NUM = 218_000


@pytest.fixture
def record(data: Path, tmp_path: Path) -> Callable[..., None]:
    """Write a run of an optimizer with a rate; its loss is by default lowest at 0.01."""

    def write(
        name: str,
        lr: float,
        loss: float | None = None,
        *,
        seed: int = 0,
        batch: int = 64,
        steps: int = 200,
        **more: object,
    ) -> None:
        config = TrainConfig(data=data, model=TINY, batch=batch, steps=steps, seed=seed)
        config = replace(config, optimizer=OptimizerConfig(name=name, lr=lr, **more)).resolve(None)  # type: ignore[arg-type]
        found = 3.0 + 0.1 * math.log2(lr / 0.01) ** 2 if loss is None else loss
        fake_runs.write(config, tmp_path / f"{name}-{lr}-{batch}-{steps}-{seed}", found)

    return write


def ask(folder: Path, *options: str) -> int:
    return main([str(folder), "--model", "tiny", *options])


def test_what_was_measured_is_the_answer(
    record: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr in (0.005, 0.01, 0.02):
        record("merit", lr, warmup=0.4)
        record("muon-merit", lr, 2.5 + 10 * abs(lr - 0.02), rate_scale=3.2)
    assert ask(tmp_path, "--batch", "64", "--steps", "200") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Measured, with ")
    lines = [line.split() for line in printed.splitlines()]
    (muon,) = (line for line in lines if line[:1] == ["MuonMERIT"])
    (merit,) = (line for line in lines if line[:1] == ["MERIT"])
    assert lines.index(muon) < lines.index(merit)
    assert muon[1:3] == ["0.02", "(measured)"]
    assert merit[1:3] == ["0.01", "(measured)"]
    assert "3.2" in muon
    assert "merit train tiny --data FOLDER --batch 64 --steps 200 --optimizer.name muon-merit" in printed


def test_rates_follow_the_records_beyond_them(
    record: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (100, 200, 400):  # half the rate for four times the steps
        for factor in (0.5, 1, 2):
            lr = 0.01 * math.sqrt(200 / steps) * factor
            record("merit", lr, 3.0 + 0.5 * math.log2(factor) ** 2, steps=steps)
    (advice,) = advise(read_records(tmp_path), Size(64, NUM, 1600))
    assert advice.lr == pytest.approx(0.01 * math.sqrt(200 / 1600), rel=0.1)
    assert advice.low < advice.lr < advice.high
    assert ask(tmp_path, "--batch", "64", "--steps", "1600") == 0
    assert capsys.readouterr().out.startswith("Beyond what was measured: 1,600 steps (they have 100 to 400)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--batch", "64", "--steps", "2001"],
            "more than 10 times beyond these records: 2,001 steps (they have 200)",
        ),
        (["--batch", "641", "--steps", "200"], "a batch of 641 (they have 64)"),
        (["--batch", "6", "--steps", "200"], "a batch of 6 (they have 64)"),
        (["--steps", "200"], "--steps needs --batch"),
        (["--tokens", "1000000"], "no two batches with the same tokens"),
        (["--batch", "0"], "--batch is 0"),
        (["--batch", "64", "--steps", "2", "--tokens", "2"], "give only one of them"),
    ],
)
def test_what_the_records_cannot_answer_is_refused(
    options: list[str],
    message: str,
    record: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record("merit", 0.01)
    assert ask(tmp_path, *options) == 1
    assert message in capsys.readouterr().err


def test_a_batch_and_hours_are_answered_when_asked(
    record: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch, loss in ((32, 3.0), (64, 3.04), (128, 3.2)):
        record("merit", 0.01, loss, batch=batch, steps=12_800 // batch)
    assert ask(tmp_path, "--tokens", str(12_800 * TINY.context), "--hours") == 0
    printed = capsys.readouterr().out
    assert "Batch: 64, the largest within 0.05 of the lowest loss" in printed
    assert "Time: about" in printed
