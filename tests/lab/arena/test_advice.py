"""`merit advise`: the power law fitted to the best rates of arenas, and its predictions."""

import json
import math
import shlex
from dataclasses import replace

import pytest

from merit_lab.arena.advice import (
    PRIOR_WITH_RATIOS,
    PRIOR_WITHOUT,
    RateObservation,
    RunSize,
    StandingRecord,
    determines_exponents,
    observe,
    predict,
    prior_of,
    rank,
    read_boards,
)
from merit_lab.arena.advise_command import main
from merit_lab.models import PRESETS
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.command import parse as parse_train

LR = "optimizer.lr"
SMALL = RunSize(batch=64, parameters=1_000_000, steps=200)


def standing_of(rates: dict[float, float], best: float, deviation: float = 0.0) -> StandingRecord:
    tuning = [({LR: lr, "optimizer.warmup": 0.1}, loss) for lr, loss in rates.items()]
    best_setting = {LR: best, "optimizer.warmup": 0.1}
    return StandingRecord("merit", 3.0, SMALL, best_setting, tuning, deviation, TrainConfig(data="x"))


def test_the_best_rate_is_the_minimum_of_a_parabola() -> None:
    even = observe(standing_of({0.5: 3.1, 1.0: 3.0, 2.0: 3.1}, 1.0))
    assert even.rate == pytest.approx(0.0)
    # The loss is lower at twice the rate than at half of it, so the minimum is above.
    uneven = observe(standing_of({0.5: 3.3, 1.0: 3.0, 2.0: 3.1}, 1.0))
    assert 0 < uneven.rate < math.log(2) / 2
    steep = observe(standing_of({0.5: 4.0, 1.0: 3.0, 2.0: 4.0}, 1.0))
    assert steep.deviation < even.deviation < math.log(2)
    noisy = observe(standing_of({0.5: 3.1, 1.0: 3.0, 2.0: 3.1}, 1.0, deviation=0.1))
    assert noisy.deviation == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "rates", [{1.0: 3.0}, {0.5: 3.0, 1.0: 3.0, 2.0: 3.0}, {0.5: 3.5, 1.0: 3.0, 2.0: math.inf}]
)
def test_without_worse_neighbours_a_rate_is_known_to_a_factor_of_two(rates) -> None:
    observation = observe(standing_of(rates, 1.0))
    assert (observation.rate, observation.deviation) == (0.0, math.log(2))


def test_losses_of_boards_that_are_equally_near_are_not_mixed() -> None:
    """Twice the batch and half of it are equally far; with a larger batch losses are lower here."""

    def standing(optimizer: str, mean: float, batch: int) -> StandingRecord:
        size = SMALL._replace(batch=batch)
        return replace(standing_of({1.0: mean}, 1.0), optimizer=optimizer, mean=mean, size=size)

    boards = [
        *(standing("adamw", 5.1, 32), standing("merit", 5.2, 32)),
        *(standing("merit", 4.0, 128), standing("adamw", 4.1, 128)),
    ]
    assert rank(boards, SMALL) == ["adamw", "merit"]
    assert rank(boards, SMALL._replace(batch=128)) == ["merit", "adamw"]
    again = [standing("adamw", 5.4, 32), standing("merit", 5.2, 32)]
    assert rank([*boards, *again], SMALL) == ["merit", "adamw"]  # each once, by its mean


@pytest.mark.parametrize("text", ["x", "{}", "[1]", '[{"batch": 2}]', '[{"batch": 2, "standings": [{}]}]'])
def test_a_file_that_is_no_board_is_named(tmp_path, text) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "board.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"board\.json is not as `merit arena` writes it|nothing to recommend"
    ):
        read_boards([tmp_path])


def test_one_board_is_extrapolated_by_the_prior() -> None:
    board = RateObservation(SMALL, math.log(0.01), 0.1)
    longer = SMALL._replace(steps=16 * SMALL.steps)
    mean, deviation = predict([board], longer, PRIOR_WITH_RATIOS)
    assert mean == pytest.approx(math.log(0.0025), abs=0.01)  # one over the square root of 16
    assert deviation == pytest.approx(math.hypot(0.1, 0.25 * math.log(16)), rel=0.01)
    assert predict([board], longer, PRIOR_WITHOUT)[0] == pytest.approx(math.log(0.01), abs=0.01)
    larger = RunSize(16 * SMALL.batch, 16 * SMALL.parameters, SMALL.steps)  # one doubles it, one halves it
    assert predict([board], larger, PRIOR_WITHOUT)[0] == pytest.approx(math.log(0.01), abs=0.01)
    here, certainty = predict([board], SMALL, PRIOR_WITHOUT)
    assert here == pytest.approx(math.log(0.01), abs=1e-3)
    assert certainty == pytest.approx(0.1, rel=0.01)


def test_several_boards_outweigh_the_prior() -> None:
    boards = [
        RateObservation(SMALL._replace(batch=batch), math.log(0.01 * batch / 64), 0.05)
        for batch in (64, 128, 256, 512)
    ]
    mean, deviation = predict(boards, SMALL._replace(batch=1024), PRIOR_WITHOUT)
    assert mean == pytest.approx(math.log(0.16), abs=0.05)  # the rates grow linearly with the batch
    assert deviation < 0.15


@pytest.mark.parametrize(
    ("optimizer", "prior"),
    [
        ("muon-merit", PRIOR_WITH_RATIOS),
        ("pytorch-optimizer:Lamb", PRIOR_WITH_RATIOS),
        ("adamw", PRIOR_WITHOUT),
        ("flambe:Own", PRIOR_WITHOUT),  # a module's name says nothing
    ],
)
def test_rates_with_trust_ratios_fall_with_the_steps(optimizer: str, prior: object) -> None:
    assert prior_of(optimizer) == prior


def test_batches_with_as_many_tokens_do_not_tell_batch_from_steps() -> None:
    sizes = [RunSize(64, 10, 800), RunSize(128, 10, 400), RunSize(256, 20, 200), RunSize(512, 20, 100)]
    assert not determines_exponents(sizes)
    assert determines_exponents([*sizes, RunSize(512, 20, 200)])


def write_board(folder, rate: float, mean: float = 3.0) -> None:
    config = TrainConfig(
        data="x", model=PRESETS["tiny"], steps=200, optimizer=OptimizerConfig(name="muon-merit", lr=rate)
    )
    rest = "optimizer.options.rest_lr"
    setting = {LR: rate, rest: 2 * rate, "optimizer.warmup": 0.04}
    tuning = [
        {"setting": {**setting, LR: rate * f, rest: 2 * rate * f}, "loss": mean + 0.2 * math.log2(f) ** 2}
        for f in (0.5, 1.0, 2.0)
    ]
    standing = {"optimizer": "muon-merit", "setting": setting, "losses": {"0": mean}, "tuning": tuning}
    standing["config"] = config.to_dict()
    worse = {**standing, "optimizer": "adamw", "losses": {"0": mean + 1, "1": "inf"}}
    (folder / "report").mkdir(parents=True)
    board = [{"batch": 64, "target": 3.0, "standings": [standing, worse]}]
    (folder / "report" / "board.json").write_text(json.dumps(board))


def test_the_output_ends_with_a_training_command(tmp_path, capsys) -> None:
    write_board(tmp_path / "arena", 0.04)
    options = ["--model", "tiny", "--batch", "64", "--steps", "3200"]
    assert main([str(tmp_path / "arena"), *options]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "MuonMERIT 0.01" in output
    assert "AdamW" not in output  # one of its seeds diverged
    assert "218k parameters, batches of 64 and 200 steps" in output
    assert "size**-0.25, and steps**-0.5 with trust ratios or steps**0 without, each ± 0.25" in output
    assert "Learning rates alone are carried over, a rest_lr as the same share of the other" in output
    assert (
        "merit train tiny --data FOLDER --batch 64 --steps 3200 --optimizer.name muon-merit "
        "--optimizer.lr 0.01 --optimizer.warmup 0.04 --optimizer.options rest_lr=0.02" in output
    )


def test_the_prior_is_named_if_one_optimizer_needs_it(tmp_path, capsys) -> None:
    """AdamW's boards determine its exponents, MuonMERIT is on one of them."""
    sizes = [(64, 200, 128), (256, 200, 128), (64, 800, 128), (64, 200, 64)]
    for number, (batch, steps, width) in enumerate(sizes):
        write_board(tmp_path / f"{number}", 0.04)
        path = tmp_path / f"{number}" / "report" / "board.json"
        (board,) = json.loads(path.read_text())
        board["batch"] = batch
        ours, adamw = board["standings"]
        adamw["losses"] = {"0": 4.0}
        for standing in (ours, adamw):
            model = {**standing["config"]["model"], "width": width}
            standing["config"] |= {"batch": batch, "steps": steps, "model": model}
        board["standings"] = [adamw] if number else [ours, adamw]
        path.write_text(json.dumps([board]))
    options = ["--model", "tiny", "--batch", "64", "--steps", "200"]
    folders = [str(tmp_path / f"{number}") for number in range(len(sizes))]
    assert main([*folders[1:], folders[0], *options]) == 0
    assert "come from a prior" in capsys.readouterr().out
    path = tmp_path / "0" / "report" / "board.json"
    (board,) = json.loads(path.read_text())
    del board["standings"][0]
    path.write_text(json.dumps([board]))
    assert main([*folders, *options]) == 0
    assert "come from a prior" not in capsys.readouterr().out


def test_a_run_has_the_length_of_merit_train_unless_it_is_given(tmp_path, capsys) -> None:
    write_board(tmp_path / "arena", 0.04)
    assert main([str(tmp_path / "arena"), "--model", "tiny", "--batch", "64"]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    config = parse_train(command[2:]).config
    assert config.steps == parse_train(["tiny", "--data=x", "--batch=64"]).config.resolve(None).steps > 200


@pytest.mark.usefixtures("trained")
def test_advice_has_the_momentum_that_an_arena_found(arena, tmp_path, capsys) -> None:
    write_board(tmp_path / "old", 0.08)  # from before momenta were tuned
    assert arena("--budget", "11", "--seeds", "0", "--optimizers", "muon") == 0
    capsys.readouterr()
    size = ["--model", "tiny", "--batch", "4", "--steps", "8"]  # nearest to the new arena
    for names, momentum in ((["out", "old"], ["momentum=0.9"]), (["old"], [])):
        assert main([*(str(tmp_path / name) for name in names), *size]) == 0
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        options = parse_train(command[2:]).config.optimizer.options
        assert [text for text in options if text.startswith("momentum")] == momentum


@pytest.mark.usefixtures("trained")
def test_advice_for_custom_optimizers_has_their_options_and_second_optimizers(
    arena, tmp_path, capsys
) -> None:
    pair = "torch:Muon,momentum=0.95,lr=2e-3,rest=torch:AdamW,rest_lr=4e-3,rest.betas=0.9,0.95"
    contestants = ["--optimizers", "torch:SGD", "torch:SGD,momentum=0.5", pair, "adamw"]
    assert arena("--budget", "3", "--seeds", "0", *contestants, "--optimizer.final", "0.2") == 0
    capsys.readouterr()
    assert main([str(tmp_path / "out"), "--model", "tiny", "--batch", "16"]) == 0
    output = capsys.readouterr().out
    table = " ".join(output.split())
    assert "Muon + torch:AdamW 0.0012" in table  # a larger model and batch
    assert "SGD, momentum 0.5" in table
    command = shlex.split(output.splitlines()[-1])
    assert command[:2] == ["merit", "train"]
    config = parse_train(command[2:]).config
    assert config.optimizer == OptimizerConfig(
        name="torch:Muon",
        lr=0.0012,
        options=("momentum=0.95",),
        rest="torch:AdamW",
        rest_lr=0.0024,
        rest_options=("betas=0.9,0.95",),
        final=0.2,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nano", "--batch", "4"], "unknown model 'nano'; did you mean 'nano-33m'"),
        (["--model", "tiny", "--batch", "0"], "--batch is 0; it must be a whole number of at least 1"),
        (
            ["--model", "tiny", "--batch", "4", "--steps", "0"],
            "--steps is 0; it must be a whole number of at least 1",
        ),
        (["--model", "tiny", "--batch", "4"], "holds no report of an arena; `merit arena ... --out"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, options, message, capsys) -> None:
    assert main([str(tmp_path), *options]) == 1
    assert message in capsys.readouterr().err


def test_no_arena_is_refused(capsys) -> None:
    assert main(["--model", "tiny", "--batch", "16"]) == 1
    assert "merit advise: no arena is given; name the folders" in capsys.readouterr().err
