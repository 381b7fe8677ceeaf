"""Options for kinds of weights, and rates that are a multiple of the optimizer's."""

from typing import Any

import pytest
import torch
from optimizer_cases import assert_same_bits, name_of, random_tensor
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from merit_optim import MERIT, SOAPMERIT, Lion, MuonMERIT, SophiaG, param_groups

every_direction = pytest.mark.parametrize(
    "optimizer_class", [MERIT, MuonMERIT, SOAPMERIT, Lion, SophiaG], ids=name_of
)
SCALES = {"hidden": 1.0, "embedding": 4.0, "head": 0.5, "vector": 0.25}
"""Powers of two, so that rates in float32 and float64 are the same."""


def model() -> nn.ModuleDict:
    """A model with a weight of each kind."""
    torch.manual_seed(0)
    parts = {"embedding": nn.Embedding(7, 4), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 7)}
    return nn.ModuleDict(parts)


def build(optimizer_class: type[Any], scales: dict[str, float] = SCALES, **options: Any) -> Any:
    kinds = {kind: {"rate_scale": scale} for kind, scale in scales.items()}
    return optimizer_class(param_groups(model()), kinds=kinds, **options)


def take_steps(optimizer: Optimizer, number: int) -> list[torch.Tensor]:
    """The weights after a step; SOAP's first one changes none."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for again in range(2):
        for place, param in enumerate(params):
            param.grad = random_tensor(param.shape, 100 * number + 10 * again + place)
        optimizer.step()
    return [param.detach().clone() for param in params]


def of_kinds(optimizer: Optimizer, option: str) -> dict[str, Any]:
    return {group["kind"]: group[option] for group in optimizer.param_groups}


# --- rates ------------------------------------------------------------------------------------------------


@every_direction
@pytest.mark.parametrize("way", ["loop", "schedule", "tensor", "tensor of one element"])
def test_all_kinds_move_in_proportion_to_the_learning_rate(optimizer_class, way) -> None:
    """Steps are those of an optimizer whose groups have their own rates."""
    peak: Any = 2.0**-6
    if way.startswith("tensor"):
        peak = torch.full((1,) if way.endswith("element") else (), peak)
    ours, expected = build(optimizer_class, lr=peak), build(optimizer_class, dict.fromkeys(SCALES, 1.0))
    schedule = LambdaLR(ours, lambda step: 2.0**-step) if way == "schedule" else None
    for step in range(3):
        lr = 2.0 ** -(6 + step)
        for group in expected.param_groups:
            group["lr"] = lr * SCALES[group["kind"]]
        if isinstance(peak, torch.Tensor):
            peak.fill_(lr)
        elif way == "loop":
            for group in ours.param_groups:
                group["lr"] = lr
        assert_same_bits(take_steps(ours, step), take_steps(expected, step))
        if schedule is not None:
            schedule.step()


@every_direction
def test_a_scale_may_change_in_every_step(optimizer_class) -> None:
    """As a rate does: it takes effect at once, and options are not read again."""
    ours, expected = build(optimizer_class, lr=2**-6), build(optimizer_class, {}, lr=2**-6)
    for group in expected.param_groups:
        group["rate_scale"] = 1.0
    take_steps(ours, 0)
    specs = ours._specs
    for group in expected.param_groups:
        group["lr"] = 2**-6 * SCALES[group["kind"]]
    take_steps(expected, 0)
    for mine, other in zip(ours.param_groups, expected.param_groups, strict=True):
        mine["rate_scale"], other["lr"] = 8.0, 2**-3
    assert_same_bits(take_steps(ours, 1), take_steps(expected, 1))
    assert ours._specs is specs
    ours.param_groups[0]["rate_scale"] = -1.0
    with pytest.raises(ValueError, match=r"rate_scale is -1\.0; it must be a finite number"):
        ours.step()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_step_follows_a_scale(device) -> None:
    """Without a compilation for each value: torch makes a number dynamic when it first changes."""
    models = model().to(device), model().to(device)
    compiled, plain = (MuonMERIT(param_groups(one), lr=torch.tensor(0.01, device=device)) for one in models)
    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend="aot_eager")
    for number in range(6):
        for optimizer in (compiled, plain):
            optimizer.param_groups[0]["rate_scale"] = 1.5 + number
            optimizer.param_groups[0]["lr"].fill_(0.01 / (1 + number))
            for group in optimizer.param_groups:
                for place, param in enumerate(group["params"]):
                    param.grad = random_tensor(param.shape, 10 * number + place, device=device)
        with torch._dynamo.config.patch(error_on_recompile=number >= 3):
            step()
        plain.step()
    torch.testing.assert_close(*(list(one.parameters()) for one in models), rtol=1e-4, atol=1e-5)


# --- other options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [MERIT, MuonMERIT, Lion], ids=name_of)
def test_options_of_a_kind_are_those_of_its_groups(optimizer_class) -> None:
    kinds = {"embedding": {"weight_decay": 0.0, "betas": (0.5, 0.6)}, "vector": {"weight_decay": 0.3}}
    optimizer = optimizer_class(param_groups(model(), weight_decay=0.1), kinds=kinds)
    decays = {"hidden": 0.1, "embedding": 0.0, "head": 0.1, "vector": 0.3}
    assert of_kinds(optimizer, "weight_decay") == decays
    betas = {group["kind"]: group.get("betas") for group in optimizer.param_groups}
    assert (betas["embedding"], betas["head"] == betas["embedding"]) == ((0.5, 0.6), False)


def test_what_a_group_sets_itself_wins() -> None:
    groups = param_groups(model(), overrides={"head.weight": {"rate_scale": 7.0}})
    optimizer = MuonMERIT(groups, kinds={"head": {"rate_scale": 2.0, "eps": 1e-5}})
    (head,) = [group for group in optimizer.param_groups if group["kind"] == "head"]
    assert (head["rate_scale"], head["eps"]) == (7.0, 1e-5)


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        ({"heads": {}}, ValueError, "a kind in kinds is 'heads'; it must be one of .* did you mean 'head'"),
        ({"head": {"beta": 0.9}}, ValueError, "kinds sets 'beta' for 'head', .* did you mean 'betas'"),
        ({"head": {"betas": 0.9}}, ValueError, "betas is 0.9; it must be two numbers"),
        ({"head": {"rate_scale": -1}}, ValueError, "rate_scale is -1; it must be a finite number"),
        ({"head": {"lr": 0.1}}, ValueError, "kinds sets lr=0.1 for 'head', .*{'rate_scale': ...}"),
        ({"head": {"max_grad_norm": 1.0}}, ValueError, "it must be equal for the whole step"),
        ({"*.gate.weight": "vector"}, TypeError, r"it must give options by kind, .*kind_of="),
        (3, TypeError, "kinds is 3; it must give options by kind"),
    ],
)
def test_refusals(kinds, error, message) -> None:
    for optimizer_class in (MERIT, MuonMERIT):
        with pytest.raises(error, match=message):
            optimizer_class(param_groups(model()), kinds=kinds)


def test_groups_that_do_not_say_their_kind_are_refused() -> None:
    """Else the options would have no effect."""
    for params in (model().parameters(), [{"params": model().parameters()}]):
        with pytest.raises(ValueError, match=r"does not say of which kind .* Use param_groups\(model\)"):
            MERIT(params, kinds={"head": {"rate_scale": 2.0}})
    MERIT([{"params": model().parameters(), "kind": "hidden"}], kinds={"head": {"rate_scale": 2.0}})
