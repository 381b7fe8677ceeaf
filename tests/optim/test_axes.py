# ruff: noqa: ARG001, ARG002  # choices get what their axis offers
"""Every direction with every ratio and hold: the definition's bits, on any engine; and users' own choices."""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from optimizer_cases import random_tensor
from torch import Tensor, nn

from merit_optim import (
    Direction,
    Hold,
    MuonSphere,
    Ratio,
    compose,
    init_hidden,
    param_groups,
    register,
)
from merit_optim.optim import algorithm
from merit_optim.optim.axes.registered import AXES
from merit_optim.optim.spec import Spec

NUM_STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "soap": {"refresh_phase": 0, "precondition_frequency": 2},
    "soap-muon": {"refresh_phase": 0, "precondition_frequency": 2},
    "weight": {"clip": 0.5, "ratio_bounds": (0.0, 2.0)},
    "sphere": {"sphere_of": "row"},
    "corrected": {"peak_lr": 0.1},
}


class Model(nn.Module):
    """Weights of all kinds, one split, one stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([nn.Module()])
        self.blocks[0].qkv = nn.Linear(6, 12)
        self.blocks[0].experts = nn.Parameter(torch.empty(2, 5, 6))
        for number, param in enumerate(self.parameters()):
            param.data = random_tensor(tuple(param.shape), number)


def groups_of(model: Model, *, split: bool = True, trains: bool = True) -> list[dict[str, Any]]:
    model.requires_grad_(True)
    groups = param_groups(
        model,
        kind_of={"*experts": "experts"},
        overrides={"*experts": {"matrix_dims": 2}, "*qkv.weight": {"split": 2} if split else {}},
    )
    model.requires_grad_(trains)  # a step on leaves could not be recorded
    return groups


def set_gradients(model: nn.Module, step: int) -> None:
    for number, param in enumerate(model.parameters()):
        param.grad = random_tensor(tuple(param.shape), 100 * step + number).to(param.dtype)


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, num_steps: int = NUM_STEPS) -> list[Tensor]:
    for step in range(num_steps):
        set_gradients(model, step)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def by_definition(optimizer: torch.optim.Optimizer, model: Model) -> list[Tensor]:
    """The weights of another copy of the model after as many steps of ``algorithm.py``."""
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    states: dict[Tensor, list[Tensor]] = {}
    weights = [param.detach().clone() for param in model.parameters()]
    for step in range(NUM_STEPS):
        set_gradients(model, step)
        for i, param in enumerate(model.parameters()):
            spec, group = Spec.of(group_of[param]), group_of[param]
            if param not in states:
                shapes = spec.shapes(spec.view.matrices(param.shape)).values()
                states[param] = [torch.zeros(param.shape if shape is None else shape) for shape in shapes]
            lr, decay = group["lr"] * group["rate_scale"], group["weight_decay"]
            result = algorithm.step(
                weights[i], param.grad, states[param], spec=spec, lr=lr, weight_decay=decay, step=step + 1
            )
            weights[i], states[param] = result.weight, list(result.state)
    return weights


COMBINATIONS = list(itertools.product(*AXES.values()))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
def test_any_combination_takes_the_definitions_step(combination: tuple[str, str, str]) -> None:
    choices = dict(zip(AXES, combination, strict=True))
    options = {name: value for choice in combination for name, value in OPTIONS.get(choice, {}).items()}
    model, twin = Model(), Model()
    optimizer = compose(groups_of(model, split="soap" not in combination[0]), lr=0.05, **choices, **options)
    definition = compose(groups_of(twin, split="soap" not in combination[0]), lr=0.05, **choices, **options)
    expected = by_definition(definition, twin)
    assert all(map(torch.equal, trained(optimizer, model), expected))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "hold",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("cautious", "sphere", "rows")), "displacement"],
)
def test_holds_on_other_engines(hold: str) -> None:
    """Recorded by autograd, and compiled: the bits of the eager engine, or nearly."""
    options: dict[str, Any] = {"direction": "muon", "ratio": "none", "hold": hold, "ns_dtype": "float32"}
    model, traced, compiled = Model(), Model().requires_grad_(False), Model()
    expected = trained(compose(groups_of(model), lr=0.05, **options), model)
    by_autograd = trained(
        compose(groups_of(traced, trains=False), lr=0.05, differentiable=True, **options), traced
    )
    assert all(map(torch.equal, by_autograd, expected))
    torch._dynamo.reset()
    optimizer = compose(groups_of(compiled), lr=0.05, **options)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
    for weight, other in zip(trained(optimizer, compiled), expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


# --- users' own ------------------------------------------------------------------------------------------


@register("test-halved")
@dataclass(frozen=True, kw_only=True)
class Halved(Direction):
    """Half of the gradient, and a count."""

    part: float = 0.5

    @property
    def keys(self) -> tuple[str, ...]:
        return ("seen",)

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return grad_NRC * self.part, (state[0] + 1,)


@register("test-constant")
@dataclass(frozen=True, kw_only=True)
class Constant(Ratio):
    """s = 3 wherever it is defined."""

    @property
    def lines(self) -> tuple[str, ...]:
        return ("rows",)

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        return torch.full_like(whole if row is None else row, 3.0)


@register("test-sum")
@dataclass(frozen=True, kw_only=True)
class Sum(Hold):
    """w - lr*c, and the sum of all changes."""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("changes",)

    def apply(
        self, weight_NRC: Tensor, change_NRC: Tensor, state: tuple[Tensor, ...], move: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return weight_NRC - change_NRC * move.lr, (state[0] + change_NRC,)


OWN = {"direction": "test-halved", "ratio": "test-constant", "hold": "test-sum"}


def test_choices_of_a_user_work_and_are_saved() -> None:
    model = Model()
    optimizer = compose(groups_of(model), lr=0.1, part=0.25, **OWN)
    before = [param.detach().clone() for param in model.parameters()]
    after = trained(optimizer, model, num_steps=1)
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        torch.testing.assert_close(new, old - 0.1 * 3 * 0.25 * random_tensor(tuple(old.shape), number))
    state = optimizer.state[model.embedding.weight]
    assert state.keys() == {"step", "seen", "changes"}
    twin = copy.deepcopy(model)
    loaded = compose(groups_of(twin), lr=0.2, **OWN)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["part"] for group in loaded.param_groups] == [0.25] * len(loaded.param_groups)
    assert all(map(torch.equal, trained(loaded, twin, 2), trained(optimizer, model, 2)))


def test_choices_are_given_by_name_as_objects_and_by_group() -> None:
    params = [nn.Parameter(random_tensor((4, 3), 1)), nn.Parameter(random_tensor((4, 3), 2))]
    optimizer = compose(
        [{"params": params[:1]}, {"params": params[1:], "ratio": "test-constant", "hold": "cautious"}],
        direction=Halved(part=0.1),
        ratio="row",
        lr=0.1,
    )
    first, second = optimizer.param_groups
    assert (first["direction"], first["part"], first["ratio"], first["hold"]) == (
        "test-halved",
        0.1,
        "row",
        "decay",
    )
    assert (second["part"], second["ratio"], second["hold"]) == (0.1, "test-constant", "cautious")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "mun"}, "direction is 'mun'; did you mean 'muon'"),
        ({"ratio": "sphere"}, "ratio is 'sphere'.*Known: .*'merit'"),
        ({"hold": Halved()}, "which is a direction"),
        ({"hold": "ball", "radius": -1.0}, "radius is -1.0"),
        ({"hold": "sphere", "gain": 0.0}, "gain is 0.0"),
        (
            {"direction": "muon", "hold": "rows", "transposed": True},
            "hold='rows' needs outputs as whole rows",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(random_tensor((4, 3), 1))
    with pytest.raises(ValueError, match=message):
        compose([{"params": [weight], "kind": "hidden"}], lr=0.1, **options)


def test_an_option_of_another_choice_is_an_unknown_argument() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'momentm'. Did you mean 'momentum'"):
        compose([nn.Parameter(torch.ones(2))], direction="sgd", lr=0.1, momentm=0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'radius'"):
        compose([nn.Parameter(torch.ones(2))], lr=0.1, radius=1.0)


def test_a_name_or_an_option_that_means_something_else_cannot_be_registered() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(Hold):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Clashing(Hold):
        lr: float = 1.0

    with pytest.raises(ValueError, match=r"the hold 'decay' is .*Decay already"):
        register("decay")(Other)
    with pytest.raises(ValueError, match=r"options \['lr'\], which mean something else"):
        register("clashing")(Clashing)
    with pytest.raises(TypeError, match="takes a dataclass that is a subclass of"):
        register("nothing")(int)  # type: ignore[type-var]


# --- spheres ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sphere_of", ["matrix", "row"])
@pytest.mark.parametrize("split_dim", [0, 1])
@pytest.mark.parametrize("ratio", ["none", "merit"])
def test_a_sphere_keeps_the_norm_of_each_matrix_or_row(sphere_of: str, split_dim: int, ratio: str) -> None:
    transposed = bool(split_dim)
    weight = nn.Parameter(random_tensor((8, 8), 1))
    group = {
        "params": [weight],
        "kind": "hidden",
        "split": 2,
        "split_dim": split_dim,
        "transposed": transposed,
    }
    optimizer = compose([group], direction="muon", ratio=ratio, hold="sphere", sphere_of=sphere_of, lr=0.3)
    before = weight.detach().clone()
    for step in range(20):
        weight.grad = random_tensor((8, 8), step)
        optimizer.step()

    def norms(x: Tensor) -> list[Tensor]:
        dims = (0, 1) if sphere_of == "matrix" else (0 if transposed else 1)
        return [torch.linalg.vector_norm(part, dim=dims) for part in x.detach().split(4, split_dim)]

    for now, start in zip(norms(weight), norms(before), strict=True):
        torch.testing.assert_close(now, start, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weight, before, atol=0.1)


def test_a_step_on_a_sphere_is_an_angle() -> None:
    weight = nn.Parameter(random_tensor((6, 5), 1))
    before = weight.detach().clone()
    weight.grad = random_tensor((6, 5), 2)
    optimizer = MuonSphere([{"params": [weight], "kind": "hidden"}], lr=0.1, ns_dtype="float32")
    optimizer.step()
    radius = before.norm()
    x = (weight.grad / weight.grad.norm()).double()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    moved = before.double() - 0.1 * radius * x / x.norm()
    torch.testing.assert_close(
        weight.detach().double(), moved * (radius / moved.norm()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("hold", [name for name in AXES["hold"] if not name.startswith("test-")])
@pytest.mark.parametrize(("lr", "scale"), [(0.0, 1.0), (0.1, 0.0)])
def test_every_hold_leaves_a_weight_at_rest_bit_for_bit(hold: str, lr: float, scale: float) -> None:
    if hold == "ball" and lr:
        return  # it shrinks the weight
    weight = nn.Parameter(random_tensor((6, 5), 1).double())
    before = weight.detach().clone()
    group = {"params": [weight], "kind": "hidden"}
    optimizer = compose([group], direction="muon", hold=hold, lr=lr, weight_decay=0.1 if lr == 0 else 0.0)
    for step in range(2):
        weight.grad = random_tensor((6, 5), step).double() * scale
        optimizer.step()
    assert torch.equal(weight.detach(), before)


def test_a_radius_is_that_of_the_start_and_never_of_a_loaded_weight() -> None:
    weight = nn.Parameter(random_tensor((6, 5), 1))
    start = weight.detach().norm()
    optimizer = MuonSphere([{"params": [weight], "kind": "hidden"}], lr=0.1)
    weight.grad = random_tensor((6, 5), 2)
    optimizer.step()
    other = nn.Parameter(random_tensor((6, 5), 3) * 10)
    loaded = MuonSphere([{"params": [other], "kind": "hidden"}], lr=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    other.grad = random_tensor((6, 5), 4)
    loaded.step()
    torch.testing.assert_close(other.detach().norm(), start)


def test_a_sphere_needs_a_start_and_takes_no_decay() -> None:
    zero = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="it is all zero, and a sphere keeps the norm at the start"):
        MuonSphere([{"params": [zero], "kind": "hidden"}], lr=0.1)
    named = MuonSphere([{"params": [zero], "kind": "hidden", "weight_decay": 0.1}], lr=0.1, gain=1.4)
    assert named.param_groups[0]["weight_decay"] == 0.0
    zero.grad = random_tensor((4, 3), 1)
    named.step()
    torch.testing.assert_close(zero.detach().norm(), torch.tensor(1.4 * 2.0))  # 12 elements of 1.4 / sqrt(3)


def test_hidden_matrices_are_initialised_by_their_inputs() -> None:
    model = Model()
    embedding = model.embedding.weight.detach().clone()
    nn.init.zeros_(model.blocks[0].qkv.weight)  # type: ignore[union-attr]
    names = init_hidden(model, gain=1.4, kind_of={"*experts": "experts"})
    assert names == ["blocks.0.experts", "blocks.0.qkv.weight"]
    for weight in (model.blocks[0].qkv.weight, model.blocks[0].experts):  # type: ignore[union-attr]
        torch.testing.assert_close(weight.detach().square().mean().sqrt(), torch.tensor(1.4 / 6**0.5))
    assert torch.equal(model.embedding.weight, embedding)


# --- against others ----------------------------------------------------------------------------------------


def assert_agrees(ours: Any, theirs: Any, *, num_steps: int = 6, tolerance: float = 2e-6) -> None:
    """Two optimizers, each made from a list of weights, take the same steps."""
    weights = [
        [nn.Parameter(random_tensor((7, 5), 1)), nn.Parameter(random_tensor((6,), 2))] for _ in range(2)
    ]
    made = [build(some) for build, some in zip((ours, theirs), weights, strict=True)]
    for step in range(num_steps):
        for some, optimizer in zip(weights, made, strict=True):
            for number, param in enumerate(some):
                param.grad = random_tensor(tuple(param.shape), 10 * step + number)
            optimizer.step()
    for mine, other in zip(*weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_decoupled_decay_is_adamws() -> None:
    options: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8}
    assert_agrees(
        lambda p: compose(p, hold="decoupled", lr=0.02, weight_decay=0.3, bias_correction=True, **options),
        lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3, **options),
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs(nesterov: bool) -> None:
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.8, "nesterov": nesterov, "weight_decay": 0.0}
    assert_agrees(lambda p: compose(p, direction="sgd", **options), lambda p: torch.optim.SGD(p, **options))


def test_sign_is_lions() -> None:
    options: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    theirs = pytorch_optimizer.Lion
    assert_agrees(
        lambda p: compose(p, direction="sign", **options),
        lambda p: theirs(p, weight_decouple=True, **options),
    )


def test_two_averages_are_ademamixs() -> None:
    assert_agrees(
        lambda p: compose(
            p,
            direction="two-averages",
            hold="decoupled",
            lr=0.02,
            slow_beta=0.999,
            slow_weight=4.0,
            weight_decay=0.1,
        ),
        lambda p: pytorch_optimizer.AdEMAMix(
            p, lr=0.02, betas=(0.9, 0.999, 0.999), alpha=4.0, weight_decay=0.1, weight_decouple=True
        ),
        tolerance=1e-5,
    )


def _cautious(w: Any, c: Any, lr: float, decay: float, memory: Any) -> Any:
    return w - lr * (c + decay * w * (w * c > 0))


def _corrected(w: Any, c: Any, lr: float, decay: float, memory: Any) -> Any:
    return w * (1 - lr * (lr / 0.1) * decay) - lr * c


def _ball(w: Any, c: Any, lr: float, decay: float, memory: Any) -> Any:
    return (1 - lr) * w - lr * 2.0 * c


def _displacement(w: Any, c: Any, lr: float, decay: float, memory: Any) -> Any:
    average = memory.setdefault("D", np.zeros_like(w))
    share = 0.6 * lr / 0.1
    w1 = w - lr * (c + decay * w)
    memory["D"] = 0.99 * average + 0.01 * (w1 - w + share * average)
    return w1 + share * average


@pytest.mark.parametrize(
    ("hold", "by_numpy", "options"),
    [
        ("cautious", _cautious, {}),
        ("corrected", _corrected, {"peak_lr": 0.1}),
        ("ball", _ball, {"radius": 2.0}),
        ("displacement", _displacement, {"peak_lr": 0.1}),
    ],
)
def test_a_hold_is_its_equation(hold: str, by_numpy: Any, options: dict[str, Any]) -> None:
    weight = nn.Parameter(random_tensor((5, 4), 1).double())
    optimizer = compose(
        [weight], direction="sgd", momentum=0.0, hold=hold, lr=0.1, weight_decay=0.3, **options
    )
    expected, memory = weight.detach().numpy().copy(), {}
    for step in range(5):
        lr = optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        grad = random_tensor((5, 4), step).double()
        weight.grad = grad
        optimizer.step()
        expected = by_numpy(expected, grad.numpy(), lr, 0.3, memory)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("angular", [False, True])
def test_rows_are_magnitudes_times_directions(angular: bool) -> None:
    """Muown's equations, in NumPy, on the gradient itself as the direction."""
    weight = nn.Parameter(random_tensor((5, 4), 1).double())
    optimizer = compose(
        [{"params": [weight], "kind": "hidden"}],
        direction="sgd",
        momentum=0.0,
        hold="rows",
        angular=angular,
        lr=0.05,
        weight_decay=0.3,
        magnitude_eps=1e-8,
    )
    w, (beta1, beta2) = weight.detach().numpy().copy(), (0.9, 0.95)
    magnitude = np.linalg.norm(w, axis=1, keepdims=True)
    length = np.ones_like(magnitude) if angular else magnitude.copy()
    m, v = np.zeros_like(magnitude), np.zeros_like(magnitude)
    for step in range(1, 6):
        grad = random_tensor((5, 4), step).double()
        weight.grad, g = grad, grad.numpy()
        optimizer.step()
        unit = w / magnitude
        along = (g * unit).sum(1, keepdims=True)
        rows = unit * length - 0.05 * (g - along * unit) * magnitude / length
        m, v = beta1 * m + (1 - beta1) * along, beta2 * v + (1 - beta2) * along**2
        adam = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + 1e-8)
        magnitude = (magnitude - 0.05 * adam) * (1 - 0.05 * 0.3)
        w = magnitude * rows / np.linalg.norm(rows, axis=1, keepdims=True)
        length = length if angular else np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ("row", lambda w, u: w.norm(dim=1, keepdim=True) / u.norm(dim=1, keepdim=True)),
        ("column", lambda w, u: w.norm(dim=0, keepdim=True) / u.norm(dim=0, keepdim=True)),
        ("weight", lambda w, u: w.norm() / u.norm()),
        (
            "floor",
            lambda w, u: (0.35 * w.norm(dim=1, keepdim=True) / u.norm(dim=1, keepdim=True)).clamp(min=1),
        ),
    ],
)
def test_a_ratio_is_its_equation(ratio: str, expected: Any) -> None:
    weight = nn.Parameter(random_tensor((5, 4), 1) * torch.tensor([[0.1], [1.0], [3.0], [10.0], [30.0]]))
    before, grad = weight.detach().clone(), random_tensor((5, 4), 2)
    weight.grad = grad
    compose(
        [weight], direction="sgd", momentum=0.0, ratio=ratio, hold="decoupled", lr=0.1, weight_decay=0.0
    ).step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * expected(before, grad) * grad)
