"""Optimizers by name, with the settings of the MERIT paper."""

import inspect

import pytest
import torch
from optimizer_cases import BY_SHAPE, OWN, created, parameters

from merit_optim import (
    LAMB,
    MERIT,
    OPTIMIZERS,
    SOAP,
    SOAPMERIT,
    Lion,
    MaxLAMB,
    Muon,
    MuonMERIT,
    MuonSphere,
    Muown,
    NorMuon,
    NorMuonSphere,
    OrScale,
    SOAPMuon,
    SophiaG,
    create,
    optimizer_class,
)
from merit_optim.optim.registry import FAMILY

# Section 5.1 and table 4 of the paper, repeated here.
PEAK_LEARNING_RATES = {
    "adamw": (1e-3, 4e-3, 2e-3),
    "lion": (1e-4, 8e-5, 8e-5),
    "sophiag": (1e-4, 1e-4, 2e-4),
    "lamb-uncorrected": (1e-2, 1e-2, 8e-3),
    "merit": (9e-3, 9e-3, 6e-3),
}
CLASSES = {
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "sophiag": SophiaG,
    "lamb-uncorrected": LAMB,
    "maxlamb": MaxLAMB,
    "merit": MERIT,
}
NOT_IN_THE_PAPER = {
    "lamb": LAMB,
    "muon": Muon,
    "normuon": NorMuon,
    "orscale": OrScale,
    "soap": SOAP,
    "muon-merit": MuonMERIT,
    "soap-merit": SOAPMERIT,
    "muon-sphere": MuonSphere,
    "normuon-sphere": NorMuonSphere,
    "muown": Muown,
    "soap-muon": SOAPMuon,
}
BETAS = {"lion": (0.95, 0.98), "sophiag": (0.92, 0.99)}


def test_every_optimizer_has_a_name() -> None:
    classes = {**CLASSES, **NOT_IN_THE_PAPER}
    assert {name: preset.optimizer for name, preset in OPTIMIZERS.items()} == classes
    in_package = {getattr(cls, "optimizer_class", cls) for cls in OWN}
    assert in_package | {torch.optim.AdamW} == set(classes.values())


@pytest.mark.parametrize("name", CLASSES)
def test_a_name_gives_the_class_with_the_papers_settings(name) -> None:
    optimizer = create(name, parameters(), lr=0.5)
    assert type(optimizer) is CLASSES[name]
    group = optimizer.param_groups[0]
    assert group["betas"] == BETAS.get(name, (0.9, 0.95))
    assert (group["weight_decay"], group["lr"]) == (0.1, 0.5)


@pytest.mark.parametrize("name", NOT_IN_THE_PAPER)
def test_other_names_give_the_class_with_its_defaults(name) -> None:
    optimizer = created(name, parameters(), lr=0.5)
    assert type(optimizer) is NOT_IN_THE_PAPER[name]
    assert optimizer.defaults == BY_SHAPE.get(name, LAMB)(parameters(), lr=0.5).defaults
    assert optimizer.param_groups[0]["algorithm"] == name


@pytest.mark.parametrize("name", PEAK_LEARNING_RATES)
@pytest.mark.parametrize(("number", "model"), [(0, "gpt2-small"), (1, "gpt2-medium"), (2, "gpt2-large")])
def test_a_model_gives_the_papers_learning_rate(name, number, model) -> None:
    optimizer = create(name, parameters(), model=model)
    assert optimizer.param_groups[0]["lr"] == PEAK_LEARNING_RATES[name][number]


def test_presets_that_are_not_the_classes_defaults() -> None:
    assert create("lamb", parameters()).defaults == LAMB(parameters()).defaults
    assert create("lamb-uncorrected", parameters(), lr=1.0).param_groups[0]["bias_correction"] is False
    assert create("sophiag", parameters(), lr=1.0).hessian_interval == 10


def test_options_override_the_papers() -> None:
    optimizer = create("merit", parameters(), model="gpt2-large", lr=0.5, weight_decay=0.0, clip=None)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["clip"]) == (0.5, 0.0, None)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ValueError, match=r"unknown optimizer 'merti'; did you mean 'merit'\? Known optimizers: adamw, "
    ):
        create("merti", parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"unknown model 'gpt2-smal'; did you mean 'gpt2-small'\?"):
        create("merit", parameters(), model="gpt2-smal")
    with pytest.raises(ValueError, match="unknown model 'gpt2-smal'"):
        create("merit", parameters(), model="gpt2-smal", lr=0.1)


@pytest.mark.parametrize("name", {**CLASSES, **NOT_IN_THE_PAPER})
def test_a_name_may_be_spelt_in_both_ways(name: str) -> None:
    cls = {**CLASSES, **NOT_IN_THE_PAPER}[name]
    for spelling in (cls.__name__, cls.__name__.lower(), name.upper()):
        params = [{"params": parameters(), "direction": "adam"}] if name in NOT_IN_THE_PAPER else parameters()
        assert type(create(spelling, params, lr=0.5)) is cls
    if cls.__name__ in FAMILY and name != "lamb-uncorrected":  # its class has LAMB's own defaults
        assert optimizer_class(name) is optimizer_class(cls.__name__.lower()) is cls


def test_the_nearest_class_is_found() -> None:
    with pytest.raises(
        ValueError, match=r"unknown optimizer 'MounMERIT'; did you mean 'MuonMERIT'\? Known optimizers: "
    ):
        optimizer_class("MounMERIT")


def test_a_missing_learning_rate_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"merit needs a learning rate: pass lr=\.\.\., or model= one of gpt2-small"
    ):
        create("merit", parameters())


@pytest.mark.parametrize("name", ["maxlamb", *NOT_IN_THE_PAPER])
def test_a_learning_rate_that_the_paper_does_not_give_is_the_default_of_the_class(name) -> None:
    default = inspect.signature(OPTIMIZERS[name].optimizer).parameters["lr"].default
    assert default > 0
    assert created(name, parameters()).defaults["lr"] == default
    with pytest.raises(ValueError, match=r"unknown model 'gpt2-smal'.*'gpt2-small'"):
        created(name, parameters(), model="gpt2-smal", lr=0.1)
