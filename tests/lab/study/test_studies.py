"""`merit compare`, `sweep`, `scale` and `demo`: what is trained, and answers that are those of the runs."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import fake_runs
import polars as pl
import pytest

from merit_lab.runs import Run, table
from merit_lab.study import compare, demo, scale, sweep
from merit_lab.train import TrainConfig

MAINS = {"compare": compare.main, "sweep": sweep.main, "scale": scale.main}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(data: Path, out: Path, fake: fake_runs.Fake) -> Callable[..., int]:
    """Run a study with options."""
    del fake
    common = ["tiny", "--data", str(data), "--out", str(out), *fake_runs.SMALL]
    common += ["--measure.validation-sequences=64"]
    return lambda name, *options: MAINS[name]([*common, *map(str, options)])


def test_a_comparison_trains_each_once_and_reports(
    run: Callable[..., int], out: Path, fake: fake_runs.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--batch=4", "--steps=8", "--lr", "merit=2e-2", "--seeds", 0, 1]
    options += ["--optimizers", "adamw", "merit,clip=0.5"]
    assert run("compare", *options) == 0
    assert [path.name for path in fake.trained] == [
        f"{name}-seed{seed}" for seed in (0, 1) for name in ("adamw-lr0.001", "merit,clip=0.5-lr0.02")
    ]
    printed = capsys.readouterr().out
    runs = table.read(out).runs
    for name, text in (("adamw", "AdamW"), ("merit", "MERIT")):
        mean = runs.filter(pl.col("optimizer.name") == name)["validation_loss"].mean()
        assert re.search(rf"{text}\s+2 finished\s+{mean:.3f} ", printed)
    assert printed.endswith(f"The page: {out / 'report' / 'index.html'}\n")
    fake.trained.clear()
    assert run("compare", *options) == 0
    assert fake.trained == []
    assert run("compare", "--batch=4", "--steps=8", "--optimizers", "lamb-uncorrected", "--seeds", 0) == 0
    assert all(name in (out / "report" / "table.md").read_text() for name in ("AdamW", "MERIT", "LAMB"))
    fake.trained.clear()
    assert run("compare", *options, "--batch=8") == 1
    assert "holds a run with a different batch; choose another folder" in capsys.readouterr().err
    assert fake.trained == []


SWEEP = ("sweep", "--batch=4", "--steps=8", "--optimizers", "adamw", "merit")


def test_a_sweep_finds_the_best_and_says_what_lies_at_an_edge(
    run: Callable[..., int], fake: fake_runs.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ["--lr", "adamw=5e-4", "adamw=1e-3", "merit=5e-3", "merit=1e-2", "merit=2e-2"]
    assert run(*SWEEP, *rates, "--set", "optimizer.options.momentum", 0.9) == 1
    assert "adamw has no such option" in capsys.readouterr().err or fake.trained == []
    assert run(*SWEEP, *rates) == 0
    printed = capsys.readouterr()
    assert "MERIT was best at lr 0.01: 2.800" in printed.out
    assert "AdamW: its best lr 0.001 is the highest that was tried" in printed.err
    assert "MERIT: its best" not in printed.err
    assert re.search(r"AdamW\s+adamw-lr0.001-seed0\s+0.001", printed.out)

    fake.trained.clear()
    assert run(*SWEEP, "--lr", "adamw=2e-3", "adamw=4e-3", "merit=1e-2") == 0  # more values add them
    assert [path.name for path in fake.trained] == ["adamw-lr0.002-seed0", "adamw-lr0.004-seed0"]
    printed = capsys.readouterr()
    assert "AdamW was best at lr 0.002: 3.000" in printed.out
    assert "its best" not in printed.err


def test_a_sweep_over_a_size_finds_the_best_for_each(
    run: Callable[..., int], fake: fake_runs.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(config: TrainConfig) -> float:
        best = 1e-2 / math.sqrt(config.model.width / 16)  # type: ignore[union-attr]
        return 3.0 + math.log2((config.optimizer.lr or 0) / best) ** 2

    fake.loss = loss
    options = ["--optimizers", "merit", "--lr", 2.5e-3, 5e-3, 1e-2, 2e-2, "--set", "model.width", 16, 64]
    assert run("sweep", "--batch=4", "--steps=8", *options) == 0
    printed = capsys.readouterr()
    for lr, width in ((0.01, 16), (0.005, 64)):
        assert f"MERIT was best at lr {lr} and width {width}: 3.000" in printed.out
    assert "its best" not in printed.err


def test_a_scaling_study_finds_the_critical_batch(
    run: Callable[..., int], fake: fake_runs.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(config: TrainConfig) -> float:
        """At the end; a run of 40 (1 + 16 / batch) steps reaches 4.0."""
        needed = 40 * (1 + 16 / config.batch)
        return 5.5 - 1.5 * (config.steps or 0) / needed

    fake.loss = loss
    options = ["scale", "--target", 4, "--steps", 300, "--batches", 4, 8, 16, 32, 64, "--lr", "1e-2"]
    assert run(*options, "--optimizers", "merit") == 0
    printed = capsys.readouterr().out
    assert re.search(r"MERIT\s+4\s+64\s+0.01\s+200 ", printed)
    (critical,) = re.findall(r"MERIT has a critical batch of (\S+) sequences", printed)
    assert float(critical) == pytest.approx(16, rel=0.02)
    limits = {
        TrainConfig.from_dict(Run.open(path).config).batch: int(path.name.rpartition("steps")[2])
        for path in fake.trained
    }
    assert limits == {4: 300, 8: 250, 16: 150, 32: 100, 64: 75}
    fake.trained.clear()
    assert run(*options, "--optimizers", "merit") == 0
    assert fake.trained == []
    assert run(*[4.2 if one == 4 else one for one in options[:3]], *options[3:], "--optimizers", "merit") == 0
    assert len(fake.trained) == 5  # another target is another study


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["compare", "--lr", "lion=1e-4"], "a learning rate is given for lion, which is not one of adamw"),
        (
            ["compare", "--lr", "merit"],
            "cannot parse the learning rate 'merit'; write RATE or OPTIMIZER=RATE",
        ),
        (
            ["compare", "--lr", "merit=-1"],
            "cannot parse the learning rate 'merit=-1'; write RATE or OPTIMIZER=RATE",
        ),
        (["compare", "--optimizers", "maxlamb"], "the paper gives no learning rate for maxlamb"),
        (["compare", "--seed", 3], "--seed 3 is of a single run; `merit compare` takes"),
        (
            ["compare", "--optimizers", "torch:Nothing", "--lr", "torch:Nothing=1"],
            "torch.optim has no such class",
        ),
        (["sweep", "--set", "optimizer.lr", 1], "--lr takes the values of optimizer.lr"),
        (["sweep", "--set", "optimizer.warmpu", 1], "there is no such field"),
        (["sweep", "--set", "batch", "many"], "batch is 'many'"),
        (["sweep", "--set", "batch"], "--set batch has no values"),
        (["sweep", "--set", "batch", 4, 4], "the values of batch are 4, 4"),
        (["sweep", "--set", "measure.validation-every", 1], "changes no result"),
        (["scale", "--target", "nan", "--batches", 4, "--lr", "1e-2"], "the target is nan"),
        (["scale", "--target", 3, "--batches", 4, "--lr", "merit=1e-2"], "adamw has no learning rate"),
        (["scale", "--target", 9, "--batches", 4, "--lr", "1e-2"], "is not below the initial loss"),
    ],
)
def test_bad_input_is_refused(
    options: list[object],
    message: str,
    run: Callable[..., int],
    fake: fake_runs.Fake,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *rest = options
    assert run(name, "--steps=8", *([] if name == "scale" else ["--batch=4"]), *rest) == 1
    assert message in capsys.readouterr().err
    assert fake.trained == [] or "initial" in message


def test_the_demo_ends_with_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: fake_runs.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.main([]) == 0
    printed = capsys.readouterr().out
    for name in ("AdamW", "LAMB", "MERIT", "Muon", "MuonMERIT"):
        assert name in printed
    page = tmp_path / "runs" / "demo" / "report" / "index.html"
    assert printed.endswith(f"The page: {page}\n")
    assert page.exists()
    assert len(fake.trained) == 5
