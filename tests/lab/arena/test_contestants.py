"""Contestants of an arena: custom optimizers, options, and second optimizers."""

import json

import pytest

from merit_lab.arena.contestant import Contestant, labels, usual_rate
from merit_lab.arena.search import Point, search
from merit_lab.arena.task import MOMENTUM, TuningTask
from merit_lab.models import PRESETS
from merit_lab.results.style import colours, dashes
from merit_lab.runs import Run
from merit_lab.train import OptimizerConfig, TrainConfig

PAIR = "torch:Muon,momentum=0.95,lr=1e-3,rest=adamw,rest.betas=0.9,0.95"
CANONICAL = "torch:Muon,momentum=0.95,rest=adamw,rest.betas=0.9,0.95"


def test_a_contestant_is_a_name_with_options_and_a_second_optimizer() -> None:
    contestant = Contestant.parse(PAIR)
    assert contestant.text == CANONICAL
    assert Contestant.parse(contestant.text).text == CANONICAL
    assert contestant.begin("lr") == 1e-3
    base = OptimizerConfig(options=("momentum=0.5", "nesterov=false"), warmup=0.1)
    assert contestant.over(base) == OptimizerConfig(
        name="torch:Muon",
        options=("nesterov=false", "momentum=0.95"),
        rest="adamw",
        rest_options=("betas=0.9,0.95",),
        warmup=0.1,
    )
    shared = OptimizerConfig(rest="adamw", rest_lr=0.1, rest_options=("eps=1e-7",))
    assert Contestant("merit").over(shared).rest_options == ("eps=1e-7",)
    other = Contestant("merit", rest="torch:SGD").over(shared)
    assert (other.rest_lr, other.rest_options) == (None, ())


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["muon", "torch:Muon,rest=adamw"], ["Muon", "torch:Muon + AdamW"]),
        (["torch:NAdam", "merit"], ["NAdam", "MERIT"]),
        (
            ["torch:SGD,momentum=0.9,nesterov=true", "torch:SGD,nesterov=true,momentum=0.95", "torch:SGD"],
            ["SGD, momentum 0.9, nesterov true", "SGD, momentum 0.95, nesterov true", "SGD"],
        ),
        (
            ["torch:SGD,momentum=0.9,nesterov=true", "torch:SGD,momentum=0.95,nesterov=true"],
            ["SGD, momentum 0.9", "SGD, momentum 0.95"],
        ),
        (
            ["torch:Muon,rest=adamw", "torch:Muon,rest=adamw,rest.betas=0.9,0.9", "torch:Muon,rest=lion"],
            ["Muon + AdamW", "Muon + AdamW, rest betas 0.9,0.9", "Muon + Lion"],
        ),
    ],
)
def test_labels_say_what_differs(texts, expected) -> None:
    assert list(labels([Contestant.parse(text) for text in texts]).values()) == expected


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("adamw", ["lr", "warmup", "weight_decay"]),
        ("muon-merit", ["lr", "options.rest_lr", "warmup", "options.momentum", "weight_decay"]),
        ("muon-merit,momentum=0.9", ["lr", "options.rest_lr", "warmup", "weight_decay"]),  # it is given
        ("torch:Muon,rest=adamw", ["lr", "rest_lr", "warmup", "options.momentum", "weight_decay"]),
        ("muon,rest=adamw", ["lr", "rest_lr", "warmup", "options.momentum", "weight_decay"]),
        ("adamw,rest=torch:SGD", ["lr", "rest_lr", "warmup", "weight_decay"]),  # the second one has momentum
        ("pytorch-optimizer:Lookahead", ["lr", "warmup", "weight_decay"]),  # it takes any option
        ("torch:LBFGS", ["lr", "warmup"]),  # it has no weight decay
        ("torch:LBFGS,rest=adamw", ["lr", "rest_lr", "warmup", "weight_decay"]),
    ],
)
def test_the_tuned_settings_are_those_that_exist(text, fields) -> None:
    contestant = Contestant.parse(text)
    axes = TuningTask(contestant, contestant.over(OptimizerConfig()), 4).axes
    assert [axis.field.removeprefix("optimizer.") for axis in axes] == fields


def test_a_momentum_given_to_all_contestants_is_not_tuned() -> None:
    contestant = Contestant.parse("muon")
    shared = contestant.over(OptimizerConfig(options=("momentum=0.9",)))
    assert MOMENTUM not in [axis.field for axis in TuningTask(contestant, shared, 4).axes]


@pytest.mark.parametrize(
    ("text", "sign", "momenta"),
    [
        ("muon", 1, [0.95, 0.9, 0.8, 0.6, 0.2]),
        ("muon", -1, [0.95, 0.975, 0.9875, 0.99375]),
        ("torch:SGD", 1, [0.0, 0.5]),  # its default is 0, where the axis ends
        ("torch:SGD", -1, [0.0, 0.5, 0.75, 0.875]),
    ],
)
def test_the_distance_of_a_momentum_from_1_is_tuned_by_factors_of_two(text, sign, momenta) -> None:
    base = TrainConfig(data="x", model=PRESETS["tiny"])
    contestant = Contestant.parse(text)
    task = TuningTask(contestant, contestant.over(base.optimizer), 4)
    start = Point(tuple(task.start(base)[axis.field] for axis in task.axes))
    losses: dict[Point, float] = {}
    while (found := search(start, task.axes, losses.get, 50)).missing:
        losses |= {point: sign * task.settings(point)[MOMENTUM] for point in found.missing}
    tried = {task.settings(point)[MOMENTUM] for point in found.tried}
    assert set(momenta) <= tried  # exactly: 0.9, not 0.9000000001
    assert all(0 <= momentum < 1 for momentum in tried)
    assert found.at_edge == ()  # the end of the axis, not of the budget


def test_starts_of_the_searches() -> None:
    base = TrainConfig(data="x", model=PRESETS["tiny"])

    def start(text: str, optimizer: OptimizerConfig = base.optimizer) -> dict[str, float]:
        contestant = Contestant.parse(text)
        begins = TuningTask(contestant, contestant.over(optimizer), 4).start(base)
        return {field.removeprefix("optimizer."): value for field, value in begins.items()}

    assert start("adamw") == {"lr": 1e-3, "warmup": 0.02, "weight_decay": 0.1}
    assert start("torch:Adadelta")["lr"] == 1.0  # its default
    assert start("torch:Adam,lr=0.1,warmup=0.3,weight_decay=0") == {
        "lr": 0.1,
        "warmup": 0.3,
        "weight_decay": 0,
    }
    # Rates of the rest are shares: the paper's rate of AdamW is 1e-3, Muon starts at 1.6e-2.
    assert start("muon,rest=adamw")["rest_lr"] == pytest.approx(1 / 16)
    assert start("torch:Muon,lr=0.02,rest=lion,rest_lr=0.01")["rest_lr"] == 0.5
    assert start("torch:Muon,lr=0.02", OptimizerConfig(rest="adamw", rest_lr=0.04))["rest_lr"] == 2.0
    assert start("muon-merit")["options.rest_lr"] == 0.4
    assert start("muon-merit,rest_lr=0.02,lr=0.04")["options.rest_lr"] == 0.5
    assert start("muon-merit,lr=0.04", OptimizerConfig(options=("rest_lr=0.02",)))["options.rest_lr"] == 0.5


def test_custom_optimizers_with_the_same_colour_have_different_dashes() -> None:
    names = {f"label {number}": f"torch:Class{number}" for number in range(5)}
    looks = list(zip(colours(names).values(), dashes(names).values(), strict=True))
    assert len(set(looks)) == 5


def test_custom_optimizers_are_tuned_with_their_second_optimizer(arena, trained, tmp_path, capsys):
    contestants = ["muon-merit", PAIR, "torch:SGD", "torch:SGD,momentum=0.3"]
    assert arena("--budget", "7", "--seeds", "0", "1", "--optimizers", *contestants) == 0
    (found,) = json.loads((tmp_path / "out" / "report" / "board.json").read_text())
    names = [standing["optimizer"] for standing in found["standings"]]
    assert names == ["muon-merit", CANONICAL, "torch:SGD", "torch:SGD,momentum=0.3"]
    pair = found["standings"][1]
    assert pair["setting"]["optimizer.lr"] == 2e-3
    tried = [run["setting"] for run in pair["tuning"]]
    shares = {round(setting["optimizer.rest_lr"] / setting["optimizer.lr"], 6) for setting in tried}
    assert len(shares) > 2  # the second rate was tuned
    config = Run.open(next(folder for folder in trained if folder.name.startswith("torch.Muon"))).config[
        "optimizer"
    ]
    assert (config["name"], config["rest"]) == ("torch:Muon", "adamw")
    assert (config["options"], config["rest_options"]) == (["momentum=0.95"], ["betas=0.9,0.95"])
    assert len(trained) == len(set(trained)) == 4 * (7 + 1)
    output = capsys.readouterr().out
    assert "MuonMERIT ends lowest" in output
    assert "below Muon + AdamW" in output
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert all(label in page for label in ("SGD, momentum 0.3", "Muon + AdamW", PAIR.replace("lr=1e-3,", "")))
    assert page.count("rest lr</th>") == 1  # one column for both forms of rest_lr
    first = list(trained)
    assert arena("--budget", "7", "--seeds", "0", "1", "--optimizers", *contestants) == 0
    assert trained == first


@pytest.mark.parametrize(
    ("contestant", "message"),
    [
        ("torch:SGD,momentm=0.9", "momentm, which SGD does not take; did you mean 'momentum'?"),
        ("torch:SGD,momentum=high", "momentum='high', but SGD expects float"),
        ("torch:SGDD", "torch.optim has no such class"),
        ("torch:SGD,rest=adamv", "optimizer.rest is 'adamv'; did you mean 'adamw'"),
        ("torch:SGD,rest=adamw,rest.beta=0.9,0.95", "beta, which AdamW does not take; did you mean 'betas'?"),
        ("torch:SGD,rest.betas=0.9,0.95", "there is none; name it with --optimizer.rest"),
        ("torch:SGD,fast", "cannot parse the contestant 'torch:SGD,fast'; write NAME,OPTION=VALUE"),
        ("torch:SGD,lr=high", "has lr=high; a search starts at a number above 0"),
        ("torch:SGD,rest_lr=0.1", "as in torch:SGD,rest=adamw"),
        ("torch:Muon", "as in --optimizer.rest adamw"),
        ("merit,max_grad_norm=1", "write --optimizer.max-grad-norm"),
        ("pytorch-optimizer:Lookahead", "pytorch-optimizer:Lookahead,lr=1e-3"),
    ],
)
@pytest.mark.usefixtures("trained")
def test_invalid_contestants_are_refused(contestant, message, arena, tmp_path, capsys) -> None:
    assert arena("--optimizers", "adamw", contestant) == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))


def test_duplicate_contestants_are_refused(arena, capsys) -> None:
    assert arena("--optimizers", "torch:SGD,lr=1,momentum=0.9", "torch:SGD,momentum=0.9") == 1
    assert "each may be given only once" in capsys.readouterr().err


def test_a_second_optimizer_without_a_default_rate_needs_one() -> None:
    base = TrainConfig(data="x", model=PRESETS["tiny"])
    with pytest.raises(ValueError, match="rest_lr=1e-3"):
        usual_rate(base, "pytorch-optimizer:Lookahead")
