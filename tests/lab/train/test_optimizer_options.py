"""Names of external optimizers, and their arguments as text."""

import dataclasses
import sys

import pytest

from merit_lab.models import build
from merit_lab.train import OptimizerConfig
from merit_lab.train.optimizer import create_optimizer, options_in_use
from merit_lab.train.optimizer_options import parse_options


@pytest.fixture
def with_optimizer(toy):
    return lambda optimizer: dataclasses.replace(toy, optimizer=optimizer)


def test_a_missing_package_is_reported(with_optimizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ValueError, match=r"install it with pip install '\.\[optim\]'"):
        options_in_use(with_optimizer(OptimizerConfig(name="pytorch-optimizer:SOAP", lr=0.1)))


@pytest.mark.parametrize(
    ("name", "option", "match"),
    [
        ("torch:SGD", "momentm=0.9", r"momentm, which SGD does not take; did you mean 'momentum'\?"),
        ("torch:SGD", "momentum=high", "momentum in optimizer.options is 'high'; it must be a number"),
        ("torch:SGD", "nesterov=1", "nesterov in optimizer.options is 1; it must be true or false"),
        ("torch:Muon", "ns_steps=2.5", r"ns_steps in optimizer.options is 2\.5; it must be a whole number"),
        # It takes any argument and ignores unknown ones.
        (
            "pytorch-optimizer:SOAP",
            "shampo_beta=0.9",
            "which SOAP does not take; did you mean 'shampoo_beta'",
        ),
    ],
)
def test_an_option_that_the_class_does_not_take_is_refused_before_training(
    name, option, match, with_optimizer
):
    config = with_optimizer(OptimizerConfig(name=name, lr=0.1, options=(option,), rest="adamw", rest_lr=0.1))
    with pytest.raises(ValueError, match=match):
        options_in_use(config)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("pytorch-optimizer:AliG", "has no lr in its parameter groups"),
        ("pytorch-optimizer:LOMO", "refuses its arguments, parameter groups and lr"),
        ("pytorch-optimizer:Lookahead", "could not be made with parameter groups and lr|refuses"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_training(name, match, with_optimizer):
    with pytest.raises(ValueError, match=match):
        options_in_use(with_optimizer(OptimizerConfig(name=name, lr=0.1)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=0.9,0.95", (0.9, 0.95)),
        ("a=[[1, 2], [3, 4]]", ((1, 2), (3, 4))),
        ("a=true", True),
        ("a=False", False),
        ("a=None", None),
        ("a=words,more", ("words", "more")),
        ("a=1e-3", 1e-3),
    ],
)
def test_values_as_text(text, value):
    assert parse_options([text], "options") == {"a": value}


def test_a_number_that_is_not_json_is_converted_for_a_float(with_optimizer):
    name, options = "pytorch-optimizer:Prodigy", ("growth_rate=inf", "d0=.5")
    config = with_optimizer(OptimizerConfig(name=name, lr=1.0, options=options))
    group, _ = create_optimizer(config, build(config.model)).param_groups
    assert (group["growth_rate"], group["d0"]) == (float("inf"), 0.5)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"options": ("momentum",)}, r"optimizer\.options has 'momentum'; write OPTION=VALUE"),
        ({"options": ("lr=0.1",)}, r"optimizer\.options has 'lr=0.1'; write --optimizer.lr"),
        ({"rest_lr": 0.1}, r"name it with --optimizer\.rest"),
        ({"rest": "adamv"}, r"optimizer\.rest is 'adamv'; did you mean 'adamw'"),
        ({"rest": "torch:"}, "others are torch:NAME and pytorch-optimizer:NAME"),
        ({"betas": (0.9, 0.9), "options": ("betas=0.9,0.9",)}, "give only one of them"),
    ],
)
def test_fields_that_do_not_fit_together(fields, match):
    with pytest.raises(ValueError, match=match):
        OptimizerConfig(**fields)
