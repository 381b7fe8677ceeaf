"""Invalid options of directions: each message says what was given, what is allowed, and the way out."""

import re
from typing import Any

import pytest
import torch
from optimizer_cases import assert_unchanged, name_of, random_tensor, snapshot
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


def assert_says(error: BaseException, phrases: str) -> None:
    for phrase in phrases.split(" | "):
        assert phrase in str(error), f"{phrase!r} is not in {error}"


SOAPS = {"direction": "soap"}
# The optimizer, its groups, its options, and the phrases that have to be in the message.
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (MuonMERIT, hidden(5), {}, "blocks.0.weight | (5,) | direction='muon' | vector | direction='adam'"),
    (Muon, hidden(), {}, "blocks.0.weight | () | vector | direction='adam'"),
    (NorMuon, hidden(5, 4, matrix_dims=1), {}, "blocks.0.weight | (5, 4) | vector | direction='adam'"),
    (SOAP, hidden(5, **SOAPS), {}, "blocks.0.weight | direction='soap' | vector | direction='adam'"),
    (MuonMERIT, hidden(8, 6, split=3), {}, "blocks.0.weight | (8, 6) | split=3 | 8 rows | split=None"),
    (Muon, hidden(8, 6, split=(3, 3)), {}, "blocks.0.weight | split=(3, 3) | 8 rows | split=None"),
    (Muon, hidden(6, 8, split=3, split_dim=1), {}, "split=3 | 8 columns | split=None"),
    (Muon, [*hidden(6, 6), rest(split=2)], {}, "norm.weight | (4,) | split=2 | matrix | split=None"),
    (MuonMERIT, [*hidden(12, 4, split=3), rest(split=3)], {}, "split=3 needs a matrix | '*qkv.weight'"),
    (Muon, hidden(6, 6, split=0), {}, "split is 0 | such as 3 | None"),
    (Muon, hidden(6, 6, split=()), {}, "split is () | the size of each | None"),
    (NorMuon, hidden(6, 6, split=2, split_dim=1), {}, "neuron_beta | split_dim=1 | split=None"),
    (SOAP, hidden(4, 4, **SOAPS, split=2), {}, "blocks.0.weight | direction='soap' | split=None"),
    (OrScale, hidden(4, 4, split=2), {}, "blocks.0.weight | calibrated=True | split=None"),
    (MuonMERIT, hidden(4, 4, direction="mune"), {}, "direction is 'mune' | 'adam' | 'muon' | 'soap'"),
    (MuonMERIT, hidden(4, 4, ratio_bounds=(2.0, 0.5)), {}, "ratio_bounds is (2.0, 0.5) | the smallest and"),
    *(
        (Muon, hidden(4, 4), options, phrases)
        for options, phrases in [
            ({"ns_coefficients": "quintik"}, "is 'quintik' | 'quintic', 'polar-express', 'dion' | (a, b, c)"),
            ({"ns_coefficients": (3.0, -4.0)}, "ns_coefficients is (3.0, -4.0) | triple for each"),
            ({"ns_coefficients": [(3.0, -4.0, 2.0), (3.0,)]}, "[(3.0, -4.0, 2.0), (3.0,)] | triple for each"),
            ({"ns_coefficients": (3.0, -4.0, float("nan"))}, "is (3.0, -4.0, nan) | (a, b, c)"),
            ({"ns_coefficients": []}, "ns_coefficients is [] | (a, b, c)"),
            ({"ns_dtype": "float64"}, "ns_dtype is 'float64' | 'bfloat16' | 'float16' | 'float32'"),
            ({"ns_dtype": torch.bfloat16}, "ns_dtype is torch.bfloat16 | 'bfloat16'"),
            ({"scale": "orginal"}, "is 'orginal' | 'rms' | 'match_rms_adamw' | 'original' | 'spectral'"),
            ({"ns_steps": 0}, "ns_steps is 0 | at least 1"),
            ({"ns_steps": 2.5}, "ns_steps is 2.5 | whole number"),
            ({"momentum": 1.0}, "momentum is 1.0 | less than 1"),
            ({"nesterov": "yes"}, "nesterov is 'yes' | True or False"),
            ({"neuron_beta": 1.0}, "neuron_beta is 1.0 | less than 1"),
        ]
    ),
    *(
        (SOAP, hidden(4, 4, **SOAPS), options, phrases)
        for options, phrases in [
            ({"precondition_frequency": 0}, "precondition_frequency is 0 | at least 1"),
            (
                {"precondition_frequency": 4, "refresh_phase": 4},
                "refresh_phase is 4 | from 0 to 3 | None",
            ),
            ({"refresh_phase": -1}, "refresh_phase is -1 | from 0 to 9 | None"),
            ({"refresh_phase": False}, "refresh_phase is False | whole number | None"),
            ({"shampoo_beta": 1.0}, "shampoo_beta is 1.0 | less than 1 | None"),
        ]
    ),
]


def direction_of(optimizer_class: Any) -> str:
    return "soap" if optimizer_class in (SOAP, SOAPMERIT) else "muon"


@pytest.mark.parametrize(("optimizer_class", "groups", "options", "phrases"), REFUSED)
def test_refused_with_the_way_out(optimizer_class, groups, options, phrases) -> None:
    with pytest.raises(ValueError, match=r"\w") as refused:
        optimizer_class([dict(group) for group in groups], **options)
    assert_says(refused.value, phrases)


@pytest.mark.parametrize("refused_group", [hidden(5), hidden(6, 6, split=0), hidden(4, 4, direction="mune")])
def test_a_group_that_is_refused_later_is_not_kept(refused_group) -> None:
    optimizer = MuonMERIT(hidden(3, 3))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"direction|split"):
        optimizer.add_param_group(dict(*refused_group))
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
    assert_says(refused.value, f"{call} | direction={direction_of(optimizer_class)!r} | 'adam'")


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
    phrases += ["param_groups(model, kind_of=", "set direction='adam' in its groups"]
    with pytest.raises(ValueError, match="no weight") as refused:
        optimizer_class(param_groups(nn.LayerNorm(4)))
    assert_says(refused.value, " | ".join(phrases))
    optimizer_class([rest()])
    stage = [{**group, "direction": "adam"} for group in param_groups(nn.LayerNorm(4))]
    assert optimizer_class(stage).param_groups[0]["ratio"] == "none"


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("ns_step", "ns_steps"), ("ns_coefficient", "ns_coefficients"), ("splits", "split"), ("clipp", "clip")],
)
def test_a_misspelt_option_of_a_group_is_refused(misspelt, meant) -> None:
    with pytest.raises(ValueError, match=f"{misspelt!r}.*MuonMERIT does not know; did you mean {meant!r}"):
        MuonMERIT(hidden(4, 4, **{misspelt: 3}))


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("max_grad_nrom", "max_grad_norm"),
        ("momentun", "momentum"),
        ("grad_clip", "max_grad_norm"),  # not clip, which is nearer
    ],
)
def test_a_misspelt_argument_is_refused(misspelt, meant) -> None:
    message = f"unexpected keyword argument {misspelt!r}. Did you mean {meant!r}?"
    with pytest.raises(TypeError, match=re.escape(message)):
        MuonMERIT(hidden(4, 4), **{misspelt: 1})


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
