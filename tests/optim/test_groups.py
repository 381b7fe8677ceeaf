"""Parameter groups of a model, and their table."""

import re

import pytest
import torch
from torch import nn

from merit_optim import MERIT, param_groups
from merit_optim.optim.groups import describe_groups, fold_names


class Model(nn.Module):
    """An embedding tied to the head, a norm, a convolution, a frozen layer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))


def decays(groups: list[dict[str, object]]) -> dict[str, object]:
    """The weight decay of each parameter, by name."""
    return {name: group["weight_decay"] for group in groups for name in group["param_names"]}


def test_matrices_decay_and_vectors_do_not() -> None:
    assert decays(param_groups(Model(), weight_decay=0.3)) == {
        "embedding.weight": 0.3,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "conv.weight": 0.3,
        "conv.bias": 0.0,
        "scale": 0.0,
    }


def test_a_group_has_parameters_of_one_kind_with_equal_options() -> None:
    """Groups with equal options stand together, and the parameters of each keep the model's order."""
    groups = param_groups(Model(), overrides={"norm.bias": {"rate_scale": 2.0}})
    assert [(group["kind"], group["param_names"]) for group in groups] == [
        ("vector", ["scale", "norm.weight", "conv.bias"]),
        ("embedding", ["embedding.weight"]),
        ("hidden", ["conv.weight"]),
        ("vector", ["norm.bias"]),
    ]


def test_a_table_behind_a_leading_one_is_a_matrix() -> None:
    model = nn.Module()
    model.register_parameter("position_embedding", nn.Parameter(torch.randn(1, 6, 4)))
    assert [(group["kind"], group["matrix_dims"]) for group in param_groups(model)] == [("embedding", 2)]


def test_a_tied_weight_appears_once_and_matches_both_names() -> None:
    model = Model()
    params = [p for group in param_groups(model) for p in group["params"]]
    assert len({id(p) for p in params}) == len(params)
    for pattern in ("head.weight", "embedding.weight"):
        groups = param_groups(model, overrides={pattern: {"lr": 0.5}})
        (group,) = [g for g in groups if g.get("lr") == 0.5]
        assert group["params"] == [model.embedding.weight]
        assert decays(param_groups(model, no_decay=[pattern]))["embedding.weight"] == 0.0


def test_names_are_those_of_the_model_before_it_was_compiled() -> None:
    """Compiled as a whole or block by block. Patterns with the names that torch.compile gives match too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2)))
    names = [name for name, _ in model.named_parameters()]
    model[1] = torch.compile(model[1], backend="eager")
    compiled = torch.compile(model, backend="eager")
    for pattern in ("1.0.*", "_orig_mod.1._orig_mod.0.*"):
        groups = param_groups(compiled, overrides={pattern: {"lr": 0.5}})
        rates = {name: group.get("lr") for group in groups for name in group["param_names"]}
        assert rates == dict(zip(names, [None, None, 0.5, 0.5], strict=True))
    optimizer = MERIT(compiled.named_parameters())
    compiled(torch.ones(1, 2)).sum().backward()
    with optimizer.recording() as statistics:
        optimizer.step()
    assert list(statistics) == names


def test_patterns_take_parameters_out_of_decay() -> None:
    assert decays(param_groups(Model(), no_decay=["embedding.*"]))["embedding.weight"] == 0.0
    assert decays(param_groups(Model(), no_decay=["embedding.*"]))["conv.weight"] == 0.1
    assert decays(param_groups(Model(), no_decay="*.weight"))["conv.weight"] == 0.0  # one pattern alone


def test_overrides_set_options_and_the_later_one_wins() -> None:
    overrides = {
        "conv.*": {"lr": 0.5, "element_wise": False},
        "*.bias": {"lr": 0.25, "weight_decay": 0.2},
    }
    groups = param_groups(Model(), overrides=overrides)
    by_name = {name: group for group in groups for name in group["param_names"]}
    assert (by_name["conv.weight"]["lr"], by_name["conv.weight"]["weight_decay"]) == (0.5, 0.1)
    assert by_name["conv.weight"]["element_wise"] is False
    assert (by_name["conv.bias"]["lr"], by_name["conv.bias"]["weight_decay"]) == (0.25, 0.2)
    assert by_name["conv.bias"]["element_wise"] is False
    assert "lr" not in by_name["embedding.weight"]


@pytest.mark.parametrize(
    "patterns",
    [
        {"no_decay": ["embeding.*"]},
        {"overrides": {"embeding.*": {"lr": 1.0}}},
        {"kind_of": {"embeding.*": "hidden"}},
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(patterns) -> None:
    with pytest.raises(ValueError, match=r"'embeding\.\*' matches no parameter; .*embedding\.weight"):
        param_groups(Model(), **patterns)


def test_patterns_are_case_sensitive() -> None:
    with pytest.raises(ValueError, match="matches no parameter"):
        param_groups(Model(), no_decay=["Embedding.*"])


@pytest.mark.parametrize("reserved", ["params", "param_names", "kind"])
def test_an_override_of_the_parameters_themselves_is_refused(reserved) -> None:
    with pytest.raises(ValueError, match=rf"the override for 'conv\.\*' sets \['{reserved}'\]"):
        param_groups(Model(), overrides={"conv.*": {reserved: []}})


@pytest.mark.parametrize("overrides", [{"weight": 3}, [("weight", {"lr": 1.0})]], ids=str)
def test_overrides_that_give_no_options_are_refused(overrides) -> None:
    with pytest.raises(TypeError, match="it must give options by pattern"):
        param_groups(nn.Linear(2, 2), overrides=overrides)


def test_a_model_without_parameters_has_no_groups() -> None:
    assert param_groups(nn.ReLU()) == []
    with pytest.raises(ValueError, match="the model has no parameters"):
        param_groups(nn.ReLU(), no_decay=["*"])


def test_the_groups_train_in_this_optimizer_and_in_torchs() -> None:
    for optimizer_class in (MERIT, torch.optim.AdamW):
        model = Model()
        optimizer = optimizer_class(param_groups(model, weight_decay=0.5, overrides={"conv.*": {"lr": 0.0}}))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.ones_like(param)
        optimizer.step()
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert changed == {"embedding.weight", "norm.weight", "norm.bias", "scale"}


def test_equal_learning_rates_in_different_tensors_are_not_merged() -> None:
    rates = [torch.tensor(0.1), torch.tensor(0.1)]
    overrides = {"conv.weight": {"lr": rates[0]}, "embedding.weight": {"lr": rates[1]}}
    groups = param_groups(Model(), overrides=overrides)
    in_groups = {id(group["lr"]) for group in groups if "lr" in group}
    assert in_groups == {id(rate) for rate in rates}


# --- kinds ---------------------------------------------------------------------------------------------


def kinds(groups: list[dict[str, object]]) -> dict[str, str]:
    """The kind of each parameter, by name."""
    return {name: group["kind"] for group in groups for name in group["param_names"]}


def test_kinds_are_said_and_change_nothing_else() -> None:
    decays_before = decays(param_groups(Model()))
    assert decays(param_groups(Model(), kind_of={"conv.weight": "vector"})) == decays_before
    assert kinds(param_groups(Model())) == {
        "scale": "vector",
        "embedding.weight": "embedding",
        "norm.weight": "vector",
        "norm.bias": "vector",
        "conv.weight": "hidden",
        "conv.bias": "vector",
    }


def test_kinds_are_corrected_by_pattern_and_the_later_one_wins() -> None:
    by_name = kinds(
        param_groups(Model(), kind_of={"*.weight": "head", "norm.*": "embedding", "head.*": "hidden"})
    )
    assert by_name["conv.weight"] == "head"
    assert by_name["norm.weight"] == by_name["norm.bias"] == "embedding"
    assert by_name["embedding.weight"] == "hidden"  # by its other name


def test_an_unknown_kind_is_an_error_that_lists_the_known_ones() -> None:
    allowed = "one of 'hidden', 'experts', 'embedding', 'head', 'vector'; did you mean 'hidden'?"
    with pytest.raises(
        ValueError, match=r"the kind for 'conv\.\*' is 'hiden'; it must be " + re.escape(allowed)
    ):
        param_groups(Model(), kind_of={"conv.*": "hiden"})
    with pytest.raises(TypeError, match=r"kind_of is 'hidden'; it must give the kind of a weight by pattern"):
        param_groups(Model(), kind_of="hidden")


@pytest.mark.parametrize(("kind", "fewest"), [("hidden", 2), ("experts", 3)])
def test_a_vector_is_not_made_a_matrix(kind, fewest) -> None:
    message = (
        rf"'norm\.\*' is '{kind}', but norm\.weight has shape \(4,\); .* with {fewest} or more dimensions"
    )
    with pytest.raises(ValueError, match=message):
        param_groups(Model(), kind_of={"norm.*": kind})
    with pytest.raises(ValueError, match=r"embedding\.weight has shape \(10, 4\)"):
        param_groups(Model(), kind_of={"embedding.weight": "experts"})
    # No error if a later pattern corrects it, or if the parameter is frozen.
    param_groups(Model(), kind_of={"norm.*": kind, "n*": "vector"})
    param_groups(Model(), kind_of={"frozen.*": kind})


# --- the table -----------------------------------------------------------------------------------------


def test_the_table_of_an_optimizer() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), *(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 10))
    for place, param in enumerate(model.parameters()):
        nn.init.constant_(param, place)
    groups = param_groups(
        model, weight_decay=0.5, overrides={"[123].weight": {"direction": "muon", "ratio": "merit"}}
    )
    for group in groups:
        group.setdefault("direction", "adam")
        group.setdefault("ratio", "none")
        group["hold"] = "decay"
        group["rate_scale"] = 4.0 if group["kind"] == "head" else 1.0
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.25), foreach=False)
    assert describe_groups(optimizer).splitlines() == [
        "name           shape       kind       update        rate  weight decay  norm",
        "0.weight       (10, 4)     embedding  adamw         0.25  0.5           0",
        "4.weight       (10, 4)     head       adamw         1     0.5           44.3",
        "{1..3}.weight  3 x (4, 4)  hidden     muon x merit  0.25  0.5           4..20",
        "{1..3}.bias    3 x (4,)    vector     adamw         0.25  0             4..12",
        "4.bias         (10,)       vector     adamw         0.25  0             25.3",
        "",
        "kind       tensors  parameters",
        "hidden     3        48",
        "embedding  1        40",
        "head       1        40",
        "vector     4        22",
    ]


def test_the_table_of_groups_with_few_options() -> None:
    weight, bias = nn.Parameter(torch.zeros(2000, 3, device="meta")), nn.Parameter(torch.zeros(3))
    assert describe_groups(
        [
            {"params": [weight, bias]},
            {"params": [weight], "kind": "head", "rate_scale": 2.0, "split": (500, 1500), "matrix_dims": 2},
        ]
    ).splitlines() == [
        "name                    shape      kind  rate  split        matrix_dims  norm",
        "parameter 0 of group 0  (2000, 3)  -     -     -            -            -",
        "parameter 1 of group 0  (3,)       -     -     -            -            0",
        "parameter 0 of group 1  (2000, 3)  head  2 lr  (500, 1500)  2            -",
        "",
        "kind  tensors  parameters",
        "head  1        6,000",
        "-     2        6,003",
    ]
    assert "0.01" in describe_groups(torch.optim.AdamW([weight]))
    assert "0.01" in describe_groups(torch.optim.AdamW(nn.Linear(2, 2).named_parameters()))
    assert describe_groups([]).splitlines()[0] == "name  shape"


@pytest.mark.parametrize(
    "groups",
    [nn.Linear(2, 2), nn.Linear(2, 2).parameters(), [{"params": iter([])}], [nn.Linear(2, 2).weight]],
)
def test_what_has_no_parameter_groups_has_no_table(groups) -> None:
    with pytest.raises(
        TypeError, match=r"it must be an optimizer, or parameter groups .* param_groups\(model\)"
    ):
        describe_groups(groups)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], []),
        (["norm.weight"], ["norm.weight"]),
        (["conv1d.weight"], ["conv1d.weight"]),
        ([f"h.{i}.w" for i in range(12)], ["h.{0..11}.w"]),
        (["h.2.w", "h.0.w", "h.10.w", "h.1.w"], ["h.{0..2,10}.w"]),
        (["h.0.w", "h.0.b", "h.1.w", "h.1.b"], ["h.{0..1}.w", "h.{0..1}.b"]),
        ([f"h.{i}.e.{j}.w" for i in (1, 2) for j in range(4)], ["h.{1..2}.e.{0..3}.w"]),
        # Not all combinations: the second expert of the last layers is missing.
        (
            [f"h.{i}.e.0.w" for i in range(4)] + [f"h.{i}.e.1.w" for i in range(2)],
            ["h.{0..3}.e.0.w", "h.{0..1}.e.1.w"],
        ),
        (["h.0.e.0", "h.1.e.1"], ["h.0.e.0", "h.1.e.1"]),
    ],
)
def test_names_that_differ_in_numbers_are_folded(names, folded) -> None:
    result = fold_names(names)
    assert list(result) == folded
    assert sorted(name for members in result.values() for name in members) == sorted(names)
