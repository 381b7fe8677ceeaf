"""`merit sweep --set optimizer.options.NAME`: options of optimizers as fields, and second optimizers."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sweep_runs import write_finished_run

from merit_lab.runs import Run
from merit_lab.study import runner
from merit_lab.study.fields import value_of, with_values
from merit_lab.sweep.command import main
from merit_lab.train import TrainConfig
from merit_lab.train.command import parse as parse_train

MOMENTUM = "optimizer.options.momentum"


@pytest.fixture
def sgd(command: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A sweep of torch's SGD, whose loss is lower the nearer the momentum is to 0.9."""

    def train(config: TrainConfig, folder: Path, *, resume: bool, **_: object) -> None:
        assert not resume
        momentum = value_of(config, MOMENTUM)
        write_finished_run(config, folder, 2 + abs(0.9 - (momentum or 0)))

    monkeypatch.setattr(runner, "train", train)
    return lambda *more: main([*command, "--optimizers", "torch:SGD", "--lr", "0.1", *more])


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "report" / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def options_of(folder: Path) -> list[list[str]]:
    return [
        Run.open(path.parent).config["optimizer"]["options"] for path in sorted(folder.glob("*/config.json"))
    ]


def test_an_option_is_an_axis_and_has_its_default_where_a_run_does_not_set_it(sgd, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert sgd() == 0  # a run that does not set the momentum
    assert sgd("--set", MOMENTUM, "0.5", "0.9", "0.95") == 0
    assert "SGD was best at a momentum of 0.9, with a validation loss of 2.000" in capsys.readouterr().out
    assert options_of(out) == [["momentum=0.5"], ["momentum=0.9"], ["momentum=0.95"], []]
    assert [row[MOMENTUM] for row in rows_of(out)] == ["0", "0.5", "0.9", "0.95"]
    page = (out / "report" / "index.html").read_text()
    assert "<h1>Momentum sweep</h1>" in page
    assert "Best momentum" in page
    best = json.loads((out / "report" / "best.json").read_text())["torch:SGD"]
    config = parse_train(["tiny", "--data", "x", *best["train_options"]]).config
    assert config is not None
    assert config.optimizer.options == ("momentum=0.9",)


def test_the_default_value_of_an_option_is_the_existing_run(sgd, tmp_path) -> None:
    assert sgd() == 0
    assert sgd("--set", MOMENTUM, "0", "0.9") == 0
    assert options_of(tmp_path / "out") == [[], ["momentum=0.9"], []]
    assert [row[MOMENTUM] for row in rows_of(tmp_path / "out")] == [
        "0",
        "0.9",
    ]  # one of the three is a repeat


def test_optimizers_with_and_without_an_option_may_share_a_folder(sgd, command, tmp_path) -> None:
    assert main([*command, "--optimizers", "adamw", "--lr", "0.1"]) == 0
    assert sgd("--set", MOMENTUM, "0.5", "0.9") == 0
    assert [row[MOMENTUM] for row in rows_of(tmp_path / "out")] == ["none", "0.5", "0.9"]


def test_a_swept_option_keeps_the_other_options(sgd, tmp_path) -> None:
    more = ["--optimizer.options", "momentum=0.3", "maximize=false"]
    assert sgd(*more, "--set", MOMENTUM, "0.3", "0.9", "--set", "optimizer.options.nesterov", "true") == 0
    assert options_of(tmp_path / "out") == [
        ["momentum=0.3", "maximize=false", "nesterov=true"],
        ["maximize=false", "momentum=0.9", "nesterov=true"],
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["optimizer.options.momentm", "0.9"], "momentm, which SGD does not take; did you mean 'momentum'?"),
        (["optimizer.options.momentum", "high"], "momentum='high', but SGD expects float"),
        (["optimizer.options.weight-decay", "1"], "write --optimizer.weight-decay"),
        (["optimizer.rest-options.betas", "0.9,0.95"], "there is none; name it with --optimizer.rest"),
        (["optimizer.rest-lr", "1e-3"], "there is none; name it with --optimizer.rest"),
        (
            ["optimizer.options.kwargs", '{"a": [1, 2]}'],
            "vary the options as a whole, as in --set optimizer.options 'kwargs={\"a\": [1, 2]}'",
        ),
        (["optimizer.optins.momentum", "0.9"], "did you mean 'optimizer.options'?"),
    ],
)
def test_invalid_fields_are_refused(sgd, fields, message, tmp_path, capsys) -> None:
    assert sgd("--set", *fields) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_options_and_one_of_them_cannot_be_varied_together(sgd, capsys) -> None:
    assert sgd("--set", "optimizer.options", "dampening=0.1", "--set", MOMENTUM, "0.9") == 1
    assert "--set optimizer.options sets all options and" in capsys.readouterr().err


def test_a_misspelled_option_of_a_built_in_optimizer_gets_a_suggestion(command, capsys) -> None:
    assert (
        main([*command, "--optimizers", "muon", "--lr", "0.1", "--set", "optimizer.options.momentm", "0.9"])
        == 1
    )
    assert "momentm, which Muon does not take; did you mean 'momentum'?" in capsys.readouterr().err


# --- a second optimizer ------------------------------------------------------------------------------------

REST = ["--optimizer.rest", "adamw"]


def test_the_rate_of_a_second_optimizer_is_swept(sgd, tmp_path) -> None:
    rates = ["--set", "optimizer.rest-lr", "1e-3", "2e-3"]
    betas = ["--set", "optimizer.rest-options.betas", "0.9,0.95", "0.9,0.99"]
    assert sgd(*REST, *rates, *betas) == 0
    first, *_ = rows = rows_of(tmp_path / "out")
    assert len(rows) == 4
    assert first["run"] == "SGD-lr0.1-rest_lr=0.001-rest_betas=0.9,0.95-seed0"
    assert first["optimizer.rest_lr"] == "0.001"
    assert first["optimizer.rest_options.betas"] == "0.9, 0.95"


def test_runs_with_and_without_a_second_optimizer_are_distinguished(sgd, capsys) -> None:
    assert sgd() == 0
    assert sgd(*REST, "--set", "optimizer.rest-lr", "1e-3", "2e-3") == 1
    assert "SGD-lr0.1-seed0 holds a run with a different optimizer.rest" in capsys.readouterr().err
    assert sgd("--set", "optimizer.rest-lr", "None") == 0  # the value that they have


def test_runs_without_a_second_optimizer_are_cells_if_it_is_varied(sgd, tmp_path) -> None:
    assert sgd() == 0
    more = ["--set", "optimizer.rest", "adamw", "--set", "optimizer.rest-lr", "1e-3", "2e-3"]
    assert sgd(*more) == 0
    assert [row["optimizer.rest_lr"] for row in rows_of(tmp_path / "out")] == ["none", "0.001", "0.002"]


def test_none_is_not_a_rate_of_a_second_optimizer(sgd, capsys) -> None:
    assert sgd(*REST, "--set", "optimizer.rest-lr", "None", "2e-3") == 1
    assert "--set optimizer.rest_lr none: every second optimizer has a rate" in capsys.readouterr().err


def test_written_values_are_read_back(base) -> None:
    for field, value in (
        ("optimizer.options.betas", (0.8, 0.95)),
        ("optimizer.options.norm", "l2"),
        ("optimizer.options.clip", None),
        ("optimizer.options.eps", 1.234567891e-9),
    ):
        assert value_of(with_values(base, {field: value}), field) == value
