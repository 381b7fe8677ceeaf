"""`merit sweep`: which runs are trained and reused, what is written, and what is refused."""

import csv
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sweep_runs import write_finished_run

from merit_lab.runs import Run
from merit_lab.study import runner
from merit_lab.study.fields import LR
from merit_lab.sweep.command import main
from merit_lab.sweep.grid import SweepGrid
from merit_lab.train import Interrupted, TrainConfig
from merit_lab.train.command import parse as parse_train


def runs_of(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/config.json")}


def test_trains_the_grid_once_and_writes_the_findings(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command += ["--optimizers", "lamb", "merit", "--lr", "1e-2", "2e-2", "merit=4e-2"]
    command += ["--set", "optimizer.weight-decay", "0", "0.1"]
    assert main(command) == 0
    output, progress = capsys.readouterr()
    rates = {"lamb": ("0.01", "0.02"), "merit": ("0.01", "0.02", "0.04")}
    names = {
        f"{name}-lr{rate}-weight_decay={decay}-seed0"
        for name, name_rates in rates.items()
        for rate in name_rates
        for decay in ("0", "0.1")
    }
    assert runs_of(out) == names
    config = TrainConfig.from_dict(Run.open(out / "merit-lr0.04-weight_decay=0-seed0").config)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("merit", 0.04, 0)
    assert f"The page: {out / 'report' / 'index.html'}" in output
    assert "was best at a learning rate of" in output
    assert "[1 of 10] lamb-lr0.01-weight_decay=0-seed0 starts" in progress

    with (out / "report" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == names
    svg = (out / "report" / "learning-rate.svg").read_text()
    assert all(text in svg for text in ("MERIT, weight decay 0.1", "peak learning rate", "0.04"))

    # best.json has the lowest row of the table, with options that `merit train` accepts.
    found = json.loads((out / "report" / "best.json").read_text())
    assert list(found) == ["lamb", "merit"]
    lowest = min(
        (row for row in rows if row["optimizer"] == "merit"), key=lambda row: float(row["validation_loss"])
    )
    assert found["merit"]["validation_loss"] == pytest.approx(float(lowest["validation_loss"]))
    assert found["merit"]["lr"] == float(lowest["lr"])
    best = parse_train([*command[:3], *found["merit"]["train_options"]]).config
    assert best is not None
    assert (best.optimizer.name, best.optimizer.lr) == ("merit", float(lowest["lr"]))
    assert best.optimizer.weight_decay == float(lowest["optimizer.weight_decay"])
    assert TrainConfig.from_dict(found["merit"]["config"]).optimizer == best.optimizer

    before = {name: (out / name / "metrics.jsonl").read_bytes() for name in names}
    assert main(command) == 0
    assert capsys.readouterr().err.count("is already done") == len(names)
    assert before == {name: (out / name / "metrics.jsonl").read_bytes() for name in names}


def test_the_best_value_of_a_flag_is_an_option_of_train(command: list[str], tmp_path: Path) -> None:
    fields = ["--set", "model.qk-norm", "True", "False", "--set", "compile", "False", "None"]
    assert main([*command, "--optimizers", "merit", "--lr", "1e-2", *fields]) == 0
    found = json.loads((tmp_path / "out" / "report" / "best.json").read_text())["merit"]
    best = parse_train([*command[:3], *found["train_options"]]).config
    assert best is not None
    assert best.model.qk_norm == found["config"]["model"]["qk_norm"]
    assert best.compile == found["config"]["compile"]


def test_the_vocabulary_cannot_be_varied_if_the_data_decide_it(base: TrainConfig, tmp_path: Path) -> None:
    fields = {"model.vocab_size": [512, 1024]}
    grid = SweepGrid(base=base, folder=tmp_path, learning_rates={"merit": [0.01]}, fields=fields, seeds=[0])
    values = {LR: 0.01, "model.vocab_size": 512}
    with pytest.raises(ValueError, match=r"model\.vocab_size 512: the data decide it; add --no-fit-vocab"):
        grid.run(SimpleNamespace(vocab_size=256), "merit", values, 0)
    grid.run(SimpleNamespace(vocab_size=None), "merit", values, 0)


def test_extends_the_grid_until_the_best_lies_inside(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig, folder: Path, *, resume: bool, **_: object) -> None:
        assert not resume
        assert config.optimizer.lr is not None
        write_finished_run(config, folder, 2 + abs(math.log2(config.optimizer.lr / 0.025)))

    monkeypatch.setattr(runner, "train", train)
    command += ["--optimizers", "merit", "--lr", "1e-1", "2e-1"]
    assert main(command) == 0
    assert "is the lowest that was tried: a lower one may be better. Extend the" in capsys.readouterr().err
    assert main([*command, "--extend"]) == 0
    output, error = capsys.readouterr()
    assert [line for line in error.splitlines() if "next" in line] == [
        f"The best lies at the edge of the grid; next: merit-lr{rate}" for rate in (0.05, 0.025, 0.0125)
    ]
    assert "best at a learning rate of 0.025, with" in output
    assert "merit sweep:" not in error  # no warnings
    extended = {f"merit-lr{rate:g}-seed0" for rate in (0.0125, 0.025, 0.05, 0.1, 0.2)}
    assert runs_of(tmp_path / "out") == extended

    assert main([*command, "--extend"]) == 0  # nothing to do
    assert " starts" not in capsys.readouterr().err
    # A later call without --extend still includes these runs.
    assert main(command) == 0
    with (tmp_path / "out" / "report" / "table.csv").open(newline="") as file:
        assert {row["run"] for row in csv.DictReader(file)} == extended


def test_runs_of_merit_keep_are_cells_of_the_grid(
    command: list[str],
    tmp_path: Path,
    keep_only: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(config: TrainConfig, folder: Path, *, resume: bool, **_: object) -> None:
        assert not resume
        write_finished_run(config, folder, 2.0)

    monkeypatch.setattr(runner, "train", train)
    command += ["--optimizers", "merit", "--lr", "1e-1"]
    assert main(command) == 0
    keep_only(tmp_path / "out")
    assert main([*command, "2e-1"]) == 0
    assert capsys.readouterr().err.count(" starts") == 2
    assert runs_of(tmp_path / "out") == {"merit-lr0.2-seed0"}
    with (tmp_path / "out" / "report" / "table.csv").open(newline="") as file:
        rows = {row["run"] for row in csv.DictReader(file)}
    assert rows == {"merit-lr0.1-seed0", "merit-lr0.2-seed0"}
    assert main([*command, "--batch", "8"]) == 1
    assert "a different batch" in capsys.readouterr().err


def test_diverged_runs_are_drawn_and_reported_and_never_best(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command += ["--optimizers", "adamw", "--lr", "1e-4", "1e-3", "1e30"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "AdamW was best at a learning rate of 0.00" in output
    report = tmp_path / "out" / "report"
    page = (report / "index.html").read_text()
    assert "diverged at step" in page
    assert '<td class=" trouble">1 diverged</td>' in page
    assert "diverged at step" in (report / "learning-rate.svg").read_text()


def test_a_signal_prints_how_to_continue(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any, **__: Any) -> None:
        raise Interrupted(signal.SIGTERM, "stopped by SIGTERM, with a checkpoint")

    monkeypatch.setattr(runner, "train", train)
    assert main(command) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.splitlines()[-1] == (
        "merit sweep: stopped by SIGTERM, with a checkpoint. Run the same command again to continue."
    )


def test_the_default_rates_are_the_papers_and_its_neighbours(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "train", lambda config, folder, **_: write_finished_run(config, folder, 2.0))
    assert main([*command, "--optimizers", "merit"]) == 0
    rates = (0.00225, 0.0045, 0.009, 0.018, 0.036)
    assert runs_of(tmp_path / "out") == {f"merit-lr{rate:g}-seed0" for rate in rates}


def test_runs_of_another_configuration_are_refused_before_training(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command += ["--optimizers", "merit", "--lr"]
    assert main([*command, "1e-2"]) == 0
    capsys.readouterr()
    for rate in ("2e-2", "1e-2"):
        assert main([*command, rate, "--batch", "8"]) == 1
        error = capsys.readouterr().err
        assert "merit-lr0.01-seed0 holds a run with a different batch; the runs of a sweep differ in" in error
    assert runs_of(tmp_path / "out") == {"merit-lr0.01-seed0"}


def test_another_run_with_the_same_folder_name_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command += ["--optimizers", "merit", "--lr"]
    assert main([*command, "0.1"]) == 0
    assert main([*command, "0.1000000001"]) == 1
    assert "merit-lr0.1-seed0 holds a run with a different optimizer.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "lion=1e-4"], "a learning rate is given for lion, which is not one of adamw, lamb, merit"),
        (["--optimizers", "maxlamb"], "or --lr maxlamb=RATE where optimizers are compared"),
        (["--optimizers", "mertt"], "did you mean 'merit'?"),
        (["--lr", "fast"], "cannot parse the learning rate 'fast'; write RATE, as in 9e-3, or OPTIMIZER"),
        (
            ["--lr", "=1e-3"],
            "cannot parse the learning rate '=1e-3'; write RATE, as in 9e-3, or OPTIMIZER=RATE",
        ),
        (["--lr", "0", "1"], "a learning rate of adamw is 0; it must be above 0"),
        (["--lr", "1e-2", "1e-2"], "the learning rates of adamw are 0.01, 0.01; each may be given only once"),
        (["--lr", "1e-2", "--extend"], "has only the learning rate 0.01; give it two or more"),
        (["--seeds", "1", "1"], "the seeds are 1, 1; each may be given only once"),
        (["--set", "optimizer.weight-decai", "1"], "did you mean 'optimizer.weight_decay'?"),
        (["--set", "xyzzy", "1"], "--set xyzzy: there is no such field. The fields are"),
        (["--set", "measure.entropy-every", "1"], "measure.entropy_every changes no result"),
        (["--set", "checkpoint.keep", "1"], "checkpoint.keep changes no result"),
        (
            ["--steps", "None", "--set", "tokens", "128", "256"],
            "--set tokens 128: a run's length is kept in steps; use --set steps",
        ),
        (
            ["--lr", "1e-2", "--set", "optimizer.weight-decay", "0.1", "0.10000001"],
            "optimizer.weight_decay 0.1 and 0.10000001 would share the folder",
        ),
        (["--set", "steps", "2", "None"], "--set steps none: every run has a length; give numbers"),
        (["--set", "optimizer.lr", "1"], "--lr takes the values of optimizer.lr"),
        (["--set", "seed", "1"], "--seeds takes the values of seed"),
        (["--set", "batch", "many"], "'many' is not a valid value; the field takes int"),
        (["--set", "batch"], "--set batch has no values"),
        (["--set", "batch", "0", "4"], "batch is 0; it must be a whole number of at least 1"),
        (["--set", "optimizer.decay", "0.1", "0.3"], "it is for --optimizer.schedule wsd"),
        (["--measure.validation-every", "0"], "a sweep compares final validation losses"),
        (
            ["--lr", "1e-2", "--set", "model.context", "16", "20000"],
            "merit sweep: the run adamw-lr0.01-context=20000-seed0 cannot be trained: ",
        ),
        (["--seed", "3"], "--seed 3 applies to a single run; in a sweep write for example --seeds 0 1 2"),
    ],
)
def test_invalid_options_are_refused(
    command: list[str], options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt2-smal"])
    assert "did you mean 'gpt2-small'?" in capsys.readouterr().err
