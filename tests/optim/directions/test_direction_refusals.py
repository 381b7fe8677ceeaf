"""Invalid options of directions: each message says what was given, what is allowed, and the way out."""

import re
from typing import Any

import pytest
import torch
from optimizer_cases import assert_same_bits, assert_unchanged, name_of, random_tensor, snapshot
from torch import nn

from merit_optim import (
    MERIT,
    SOAP,
    SOAPMERIT,
    Muon,
    MuonMERIT,
    NorMuon,
    OrScale,
    SophiaG,
    compose,
    param_groups,
)
from merit_optim.optim.axes.registered import AXES

HIDDEN = [MuonMERIT, Muon, NorMuon, OrScale, SOAPMERIT, SOAP]
every_class = pytest.mark.parametrize("optimizer_class", HIDDEN, ids=lambda cls: cls.__name__)


def hidden(*shape: int, direction: str = "muon", **options: Any) -> list[dict[str, Any]]:
    """One group with one named weight."""
    named = [("blocks.0.weight", nn.Parameter(random_tensor(shape, 1)))]
    return [{"params": named, "direction": direction, **options}]


def rest(**options: Any) -> dict[str, Any]:
    return {
        "params": [("norm.weight", nn.Parameter(torch.ones(4)))],
        "direction": "adam",
        **options,
    }


def assert_says(error: BaseException, phrases: list[str]) -> None:
    for phrase in phrases:
        assert phrase in str(error), f"{phrase!r} is not in {error}"


# The optimizer, its groups, its options, and the phrases that have to be in the message.
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {
    "a vector": (
        MuonMERIT,
        hidden(5),
        {},
        ["blocks.0.weight", "(5,)", "direction='muon'", "vector", "direction='adam'"],
    ),
    "a scalar": (Muon, hidden(), {}, ["blocks.0.weight", "()", "vector", "direction='adam'"]),
    "rows as separate vectors": (
        NorMuon,
        hidden(5, 4, matrix_dims=1),
        {},
        ["blocks.0.weight", "(5, 4)", "vector", "direction='adam'"],
    ),
    "a vector for soap": (
        SOAP,
        hidden(5, direction="soap"),
        {},
        ["blocks.0.weight", "(5,)", "direction='soap'", "vector", "direction='adam'"],
    ),
    "a split that does not divide": (
        MuonMERIT,
        hidden(8, 6, split=3),
        {},
        ["blocks.0.weight", "(8, 6)", "split=3", "8 rows", "split=None"],
    ),
    "sizes that do not add up": (
        Muon,
        hidden(8, 6, split=(3, 3)),
        {},
        ["blocks.0.weight", "split=(3, 3)", "8 rows", "split=None"],
    ),
    "a split that does not divide columns": (
        Muon,
        hidden(6, 8, split=3, split_dim=1),
        {},
        ["blocks.0.weight", "split=3", "8 columns", "split=None"],
    ),
    "a split vector": (
        Muon,
        [*hidden(6, 6), rest(split=2)],
        {},
        ["norm.weight", "(4,)", "split=2", "matrix", "split=None"],
    ),
    "no number of parts": (Muon, hidden(6, 6, split=0), {}, ["split is 0", "such as 3", "None"]),
    "no sizes": (Muon, hidden(6, 6, split=()), {}, ["split is ()", "the size of each", "None"]),
    "another dimension": (Muon, hidden(6, 6, split=2, split_dim=2), {}, ["split_dim is 2", "0, 1"]),
    "columns split with an average a row": (
        NorMuon,
        hidden(6, 6, split=2, split_dim=1),
        {},
        ["blocks.0.weight", "neuron_beta", "split_dim=1", "split=None"],
    ),
    "an unknown direction": (
        MuonMERIT,
        hidden(4, 4, direction="mune"),
        {},
        ["direction is 'mune'", "'adam'", "'muon'", "'soap'"],
    ),
    "an unknown direction for the rest": (
        MuonMERIT,
        [*hidden(4, 4), {**rest(), "direction": "sgdm"}],
        {},
        ["direction is 'sgdm'", "'adam'", "'muon'", "'soap'"],
    ),
    "unknown coefficients": (
        MuonMERIT,
        hidden(4, 4),
        {"ns_coefficients": "quintik"},
        ["ns_coefficients is 'quintik'", "'quintic'", "'polar-express'", "'dion'", "(a, b, c)"],
    ),
    "two coefficients": (
        MuonMERIT,
        hidden(4, 4),
        {"ns_coefficients": (3.0, -4.0)},
        ["ns_coefficients is (3.0, -4.0)", "'quintic'", "(a, b, c)", "triple for each"],
    ),
    "a pass of two coefficients": (
        Muon,
        hidden(4, 4),
        {"ns_coefficients": [(3.0, -4.0, 2.0), (3.0, -4.0)]},
        ["ns_coefficients is [(3.0, -4.0, 2.0), (3.0, -4.0)]", "triple for each"],
    ),
    "a coefficient that is no number": (
        Muon,
        hidden(4, 4),
        {"ns_coefficients": (3.0, -4.0, float("nan"))},
        ["ns_coefficients is (3.0, -4.0, nan)", "(a, b, c)"],
    ),
    "no coefficients": (Muon, hidden(4, 4), {"ns_coefficients": []}, ["ns_coefficients is []", "(a, b, c)"]),
    "products in float64": (
        MuonMERIT,
        hidden(4, 4),
        {"ns_dtype": "float64"},
        ["ns_dtype is 'float64'", "'bfloat16'", "'float16'", "'float32'"],
    ),
    "a dtype by itself": (
        Muon,
        hidden(4, 4),
        {"ns_dtype": torch.bfloat16},
        ["ns_dtype is torch.bfloat16", "'bfloat16'"],
    ),
    "a scale misspelt": (
        Muon,
        hidden(4, 4),
        {"scale": "orginal"},
        ["scale is 'orginal'", "'rms'", "'match_rms_adamw'", "'original'", "'spectral'"],
    ),
    "no passes": (Muon, hidden(4, 4), {"ns_steps": 0}, ["ns_steps is 0", "at least 1"]),
    "half a pass": (Muon, hidden(4, 4), {"ns_steps": 2.5}, ["ns_steps is 2.5", "whole number"]),
    "all momentum": (Muon, hidden(4, 4), {"momentum": 1.0}, ["momentum is 1.0", "less than 1"]),
    "nesterov by name": (Muon, hidden(4, 4), {"nesterov": "yes"}, ["nesterov is 'yes'", "True or False"]),
    "neurons that never change": (
        NorMuon,
        hidden(4, 4),
        {"neuron_beta": 1.0},
        ["neuron_beta is 1.0", "less than 1"],
    ),
    "soap in a graph": (
        SOAP,
        hidden(4, 4, direction="soap"),
        {"capturable": True},
        ["direction='soap'", "capturable=False"],
    ),
    "soap for autograd": (
        SOAPMERIT,
        hidden(4, 4, direction="soap"),
        {"differentiable": True},
        ["direction='soap'", "differentiable=False"],
    ),
    "soap in bfloat16": (
        SOAP,
        hidden(4, 4, direction="soap"),
        {"state_dtype": torch.bfloat16},
        ["direction='soap'", "bfloat16", "torch.float32"],
    ),
    "a bias that is split with its weight": (
        MuonMERIT,
        [*hidden(12, 4, split=3), rest(split=3)],
        {},
        ["split=3 needs a matrix", "split=None", "'*qkv.weight'"],
    ),
    "soap split": (
        SOAP,
        hidden(4, 4, direction="soap", split=2),
        {},
        ["blocks.0.weight", "direction='soap'", "split=None"],
    ),
    "soap that is never refreshed": (
        SOAP,
        hidden(4, 4, direction="soap"),
        {"precondition_frequency": 0},
        ["precondition_frequency is 0", "at least 1"],
    ),
    "soap refreshed beyond its cycle": (
        SOAP,
        hidden(4, 4, direction="soap"),
        {"precondition_frequency": 4, "refresh_phase": 4},
        ["refresh_phase is 4", "from 0 to 3", "precondition_frequency=4", "None"],
    ),
    "soap refreshed before its cycle": (
        SOAPMERIT,
        hidden(4, 4, direction="soap", refresh_phase=-1),
        {},
        ["refresh_phase is -1", "from 0 to 9", "None"],
    ),
    "soap refreshed by a flag": (
        SOAP,
        hidden(4, 4, direction="soap"),
        {"refresh_phase": False},
        ["refresh_phase is False", "whole number", "None"],
    ),
    "soap with all of its past": (
        SOAP,
        hidden(4, 4, direction="soap"),
        {"shampoo_beta": 1.0},
        ["shampoo_beta is 1.0", "less than 1", "None"],
    ),
    "wrong betas for the rest": (
        MuonMERIT,
        [*hidden(4, 4, kind="hidden"), rest(kind="vector")],
        {"kinds": {"vector": {"betas": (0.9, 1.0)}}},
        ["betas is (0.9, 1.0)", "less than 1"],
    ),
    "one first ratio for several matrices": (
        OrScale,
        hidden(4, 4, split=2),
        {},
        ["blocks.0.weight", "calibrated=True", "split=None"],
    ),
    "ratios that are out of order": (
        MuonMERIT,
        hidden(4, 4, ratio_bounds=(2.0, 0.5)),
        {},
        ["ratio_bounds is (2.0, 0.5)", "the smallest and the largest", "None"],
    ),
}


def direction_of(optimizer_class: Any) -> str:
    return "soap" if optimizer_class in (SOAP, SOAPMERIT) else "muon"


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_way_out(case) -> None:
    optimizer_class, groups, options, phrases = REFUSED[case]
    with pytest.raises(ValueError, match=r"\w") as refused:
        optimizer_class([dict(group) for group in groups], **options)
    assert_says(refused.value, phrases)


@pytest.mark.parametrize("case", ["a vector", "an unknown direction", "no number of parts", "soap split"])
def test_a_group_that_is_refused_later_is_not_kept(case) -> None:
    optimizer_class, (refused_group,), _, _ = REFUSED[case]
    optimizer = optimizer_class(hidden(3, 3, direction=direction_of(optimizer_class)))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"direction|split"):
        optimizer.add_param_group(dict(refused_group))
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize(
    ("optimizer_class", "direction"),
    [(MERIT, "muon"), (MERIT, "soap"), (MuonMERIT, "soap"), (NorMuon, "soap"), (SOAP, "muon")],
)
def test_another_direction_has_its_defaults_and_the_class_s_ratio(optimizer_class, direction) -> None:
    default = {MERIT: "adam", SOAP: "soap"}.get(optimizer_class, "muon")
    groups = [*hidden(4, 4, direction=default), *hidden(4, 4, direction=direction)]
    optimizer = optimizer_class(groups)
    group = optimizer.param_groups[1]
    for option, value in AXES["direction"][direction]().options.items():
        assert group[option] == value
    for option in ("ratio", "hold", "lr"):
        assert group[option] == optimizer.param_groups[0][option]


def test_groups_can_set_all_options_of_another_direction() -> None:
    """Three directions in one optimizer."""
    of_soap = {
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "bias_correction": True,
        "shampoo_beta": None,
        "precondition_frequency": 2,
        "max_precond_dim": 100,
    }
    optimizer = MuonMERIT([*hidden(4, 4), *hidden(4, 4, direction="soap", **of_soap), rest()])
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    keys = [set(optimizer.state[group["params"][0]]) for group in optimizer.param_groups]
    assert [len(names) for names in keys] == [3, 7, 3]


@every_class
@pytest.mark.parametrize("named", [False, True])
def test_parameters_without_kinds_are_refused(optimizer_class, named) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="parameters alone do not tell which is which") as refused:
        optimizer_class(model.named_parameters() if named else model.parameters())
    call = f"{optimizer_class.__name__}(param_groups(model), lr=...)"
    assert_says(refused.value, [call, f"direction={direction_of(optimizer_class)!r}", "'adam'"])


@every_class
def test_a_model_is_refused(optimizer_class) -> None:
    with pytest.raises(TypeError, match=r"params is a model \(Linear\).*param_groups\(model\)"):
        optimizer_class(nn.Linear(4, 4))


@every_class
def test_no_hidden_matrix_at_all_is_refused(optimizer_class) -> None:
    """If sorted by kind. Groups that all set their directions may be one stage of a pipeline."""
    kinds = ["hidden", "experts"] + ["embedding", "head"] * (optimizer_class is SOAP)
    direction = direction_of(optimizer_class)
    phrases = [optimizer_class.__name__, f"direction={direction!r}", *map(repr, kinds), "describe_groups"]
    with pytest.raises(ValueError, match="no weight") as refused:
        optimizer_class(param_groups(nn.LayerNorm(4)))
    assert_says(
        refused.value, [*phrases, "param_groups(model, kind_of=", "set direction='adam' in its groups"]
    )
    optimizer_class([rest()])
    stage = [{**group, "direction": "adam"} for group in param_groups(nn.LayerNorm(4))]
    assert optimizer_class(stage).param_groups[0]["ratio"] == "none"


def test_an_embedding_is_not_a_hidden_matrix() -> None:
    groups = param_groups(nn.Embedding(8, 4))
    with pytest.raises(ValueError, match="no weight"):
        MuonMERIT(groups)
    SOAP(param_groups(nn.Embedding(8, 4)))


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("ns_step", "ns_steps"), ("ns_coefficient", "ns_coefficients"), ("splits", "split"), ("clipp", "clip")],
)
def test_a_misspelt_option_of_a_group_is_refused(misspelt, meant) -> None:
    with pytest.raises(ValueError, match=f"{misspelt!r}.*MuonMERIT does not know; did you mean {meant!r}"):
        MuonMERIT(hidden(4, 4, **{misspelt: 3}))


@pytest.mark.parametrize(
    ("misspelt", "meant", "value"),
    [("beta", "betas", (0.5, 0.5)), ("bias_corection", "bias_correction", False)],
)
@pytest.mark.parametrize("by", ["group", "kinds"])
def test_a_misspelt_option_of_adam_s_is_refused_too(misspelt, meant, value, by) -> None:
    """Adam's options are not defaults of an optimizer with Muon's direction, but of its other kinds."""
    groups = [*hidden(4, 4), rest(**({misspelt: value} if by == "group" else {}))]
    options = {"kinds": {"head": {misspelt: value}}} if by == "kinds" else {}
    with pytest.raises(ValueError, match=f"{misspelt!r}.*did you mean {meant!r}"):
        MuonMERIT(groups, **options)


@pytest.mark.parametrize(
    ("optimizer_class", "misspelt", "meant"),
    [
        (MuonMERIT, "max_grad_nrom", "max_grad_norm"),
        (MuonMERIT, "momentun", "momentum"),
        (SOAP, "state_type", "state_dtype"),
        (SOAP, "beta", "betas"),
        (MuonMERIT, "grad_clip", "max_grad_norm"),  # not clip, which is nearer
    ],
)
def test_a_misspelt_argument_is_refused(optimizer_class, misspelt, meant) -> None:
    message = f"unexpected keyword argument {misspelt!r}. Did you mean {meant!r}?"
    with pytest.raises(TypeError, match=re.escape(message)):
        optimizer_class(hidden(4, 4, direction=direction_of(optimizer_class)), **{misspelt: 1})


@pytest.mark.parametrize("optimizer_class", [MERIT, MuonMERIT, SophiaG], ids=name_of)
@pytest.mark.parametrize("name", ["rest_lr", "adam_lr", "lr_scale", "rate_scale"])
def test_a_rate_for_some_weights_as_an_argument_is_refused_with_its_place(optimizer_class, name) -> None:
    message = f"argument {name!r}. Did you mean kinds={{'embedding': {{'rate_scale': ...}}, ...}}?"
    with pytest.raises(TypeError, match=re.escape(message)):
        optimizer_class(hidden(4, 4), **{name: 1})


def test_an_argument_that_is_not_like_any_is_refused() -> None:
    with pytest.raises(TypeError, match=r"argument 'amsgrad'\. help\(MuonMERIT\) says what it takes"):
        MuonMERIT(hidden(4, 4), amsgrad=True)


@pytest.mark.parametrize(("name", "value"), [("betas", (0.9, 0.99)), ("bias_correction", False)])
def test_an_option_of_adam_s_as_an_argument_is_refused_with_its_place(name, value) -> None:
    with pytest.raises(TypeError, match=re.escape(f"kinds={{'embedding': {{{name!r}: {value!r}}}, ...}}")):
        MuonMERIT(hidden(4, 4), **{name: value})


@pytest.mark.parametrize(
    ("where", "name", "owner"),
    [
        ("argument", "momentum", "direction='muon' or direction='sgd'"),
        ("argument", "element_wise", "ratio='merit'"),
        ("group", "element_wise", "ratio='merit'"),
        ("kinds", "ns_steps", "direction='muon' or direction='soap-muon'"),
        ("override", "angular", "hold='rows'"),
    ],
)
def test_an_option_of_another_choice_is_refused_with_the_choice_that_has_it(where, name, owner) -> None:
    groups = param_groups(nn.Linear(4, 4), overrides={"weight": {name: 3}} if where == "override" else None)
    if where == "group":
        groups[0][name] = 3
    options: Any = {"argument": {name: 3}, "kinds": {"kinds": {groups[0]["kind"]: {name: 3}}}}.get(where, {})
    with pytest.raises((TypeError, ValueError), match=f"{name!r}.* option of {owner}"):
        compose(groups, direction="adam", lr=0.1, **options)


@pytest.mark.parametrize(
    "changed",
    [{"split": 3}, {"matrix_dims": 1}, {"direction": "adam"}, {"neuron_beta": 0.9}, {"ns_steps": 0}],
    ids=str,
)
def test_options_that_became_invalid_are_refused_before_anything_changes(changed) -> None:
    """Options that do not fit the weights or their state, and options that are never allowed."""
    optimizer = MuonMERIT([rest(), *hidden(4, 4)], neuron_beta=None)

    def step() -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = random_tensor(param.shape, 1)
        optimizer.step()

    step()
    before, options = snapshot(optimizer), dict(optimizer.param_groups[1])
    optimizer.param_groups[1].update(changed)
    with pytest.raises(ValueError, match=next(iter(changed))):
        step()
    optimizer.param_groups[1].clear()
    optimizer.param_groups[1].update(options)
    assert_unchanged(optimizer, before)
    step()


def test_the_direction_of_a_group_can_be_chosen_by_pattern() -> None:
    """The way out in the messages: overrides and kinds of param_groups."""
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    groups = param_groups(model, overrides={"1.*": {"direction": "adam"}})
    optimizer = MuonMERIT(groups)
    directions = {
        name: group["direction"] for group in optimizer.param_groups for name in group["param_names"]
    }
    assert directions == {"0.weight": "muon", "1.weight": "adam"}
    by_kind = MuonMERIT(param_groups(model, kind_of={"1.*": "head"}))
    again = {name: group["direction"] for group in by_kind.param_groups for name in group["param_names"]}
    assert again == directions
    assert_same_bits(by_kind.param_groups[0]["params"][0].detach(), model[0].weight.detach())
