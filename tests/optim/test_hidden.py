"""One direction for hidden matrices and another for the rest: how weights are sorted and displayed."""

import copy
import pickle

import pytest
import torch
from torch import nn

from merit_optim import (
    MERIT,
    SOAP,
    SOAPMERIT,
    Muon,
    MuonMERIT,
    NorMuon,
    OrScale,
    describe_groups,
    param_groups,
)


def pickled(optimizer: MuonMERIT) -> MuonMERIT:
    """The optimizer after a round trip through pickle."""
    copied: MuonMERIT = pickle.loads(pickle.dumps(optimizer))
    return copied


class Model(nn.Module):
    """An embedding, a block with a fused query, key and value, stacked experts, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(4, 2) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(3, 5, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 11, bias=False)


@pytest.mark.parametrize("optimizer_class", [MuonMERIT, SOAPMERIT, Muon, NorMuon, OrScale])
def test_hidden_matrices_take_the_direction_and_the_rest_adam_s(optimizer_class) -> None:
    optimizer = optimizer_class(param_groups(Model()))
    directions = {name: g["direction"] for g in optimizer.param_groups for name in g["param_names"]}
    others = {name for name, direction in directions.items() if direction == "adam"}
    weights = {f"blocks.{i}.{name}" for i in range(2) for name in ("in_proj_weight", "out_proj.weight")}
    assert directions.keys() - others == weights | {"experts"}
    for group in optimizer.param_groups:
        is_stack = group["param_names"] == ["experts"]
        assert group["matrix_dims"] == (2 if is_stack else None)


def test_soap_takes_all_matrices() -> None:
    optimizer = SOAP(param_groups(Model()))
    rest = [name for g in optimizer.param_groups if g["direction"] == "adam" for name in g["param_names"]]
    assert all(dict(Model().named_parameters())[name].ndim == 1 for name in rest)


def test_the_leading_one_of_a_table_is_not_a_side_of_its_matrix() -> None:
    """Else SOAP would have a basis as large as the square of the table."""
    model = Model()
    model.register_parameter("position_embedding", nn.Parameter(torch.randn(1, 6, 4)))
    optimizer = SOAP(param_groups(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[model.position_embedding]["column_basis"].shape == (1, 4, 4)


def test_other_kinds_have_a_share_of_the_rate_by_default() -> None:
    def scales(optimizer_class: type[MuonMERIT]) -> set[tuple[str, float]]:
        groups = optimizer_class(param_groups(Model()), lr=0.1).param_groups
        assert {group["lr"] for group in groups} == {0.1}
        return {(group["direction"], group["rate_scale"]) for group in groups}

    assert scales(MuonMERIT) == {("muon", 1.0), ("adam", 0.4)}
    assert scales(SOAPMERIT) == {("soap", 1.0), ("adam", 0.4)}
    assert scales(Muon) == {("muon", 1.0), ("adam", 1.0)}


def test_a_kind_may_take_another_direction() -> None:
    optimizer = Muon(
        param_groups(Model()),
        momentum=0.8,
        kinds={"head": {"direction": "muon"}, "experts": {"direction": "adam", "betas": (0.5, 0.6)}},
    )
    by_kind = {group["kind"]: group for group in optimizer.param_groups}
    assert (by_kind["head"]["direction"], by_kind["head"]["momentum"]) == ("muon", 0.8)
    assert [by_kind["experts"][key] for key in ("direction", "betas", "ratio")] == [
        "adam",
        (0.5, 0.6),
        "none",
    ]


def test_a_group_added_later_is_sorted_too() -> None:
    optimizer = MuonMERIT(param_groups(Model()))
    (group,) = param_groups(nn.Linear(4, 4, bias=False))
    optimizer.add_param_group(group)
    assert optimizer.param_groups[-1]["direction"] == "muon"
    optimizer.add_param_group({"params": [("added", nn.Parameter(torch.ones(4)))], "direction": "adam"})
    assert optimizer.param_groups[-1]["ratio"] == "none"


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_sorts_groups_as_the_original_does(copied) -> None:
    optimizer = copied(MuonMERIT(param_groups(Model()), kinds={"head": {"rate_scale": 5.0}}))
    for kind, scale in (("head", 5.0), ("vector", 0.4)):
        optimizer.add_param_group({"params": [(kind, nn.Parameter(torch.ones(4)))], "kind": kind})
        assert [optimizer.param_groups[-1][key] for key in ("rate_scale", "ratio")] == [scale, "none"]


def test_the_table_of_an_optimizer_shows_how_each_weight_is_updated() -> None:
    table = describe_groups(MuonMERIT(param_groups(Model())))
    rows = {line.split()[0]: line for line in table.splitlines() if line}
    assert "muon x merit" in rows["blocks.{0..1}.in_proj_weight"]
    assert "adamw" in rows["embedding.weight"]
    assert "adam x merit" in describe_groups(MERIT(param_groups(Model())))


def test_kinds_by_pattern_change_the_sorting() -> None:
    groups = param_groups(Model(), kind_of={"blocks.0.*weight": "vector"})
    optimizer = MuonMERIT(groups)
    muon = [name for g in optimizer.param_groups if g["direction"] == "muon" for name in g["param_names"]]
    assert not any(name.startswith("blocks.0.") for name in muon)
    assert "blocks.1.out_proj.weight" in muon
