"""Every direction with every ratio against float64 NumPy, written from the equations (reference.py).

float64 weights with ``ns_dtype="float32"`` are computed in float64 throughout, so they equal the reference up
to the order of sums. float32 weights and half-precision products are held to tolerances that are stated.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_cases import random_tensor
from reference import UNSCALED, Rule, Weight
from torch import Tensor

from merit_optim import MERIT, SOAP, SOAPMERIT, Muon, MuonMERIT, NorMuon

Options = dict[str, Any]

# A shape, and how it is seen.
SHAPES: dict[str, tuple[tuple[int, ...], Options]] = {
    "square": ((6, 6), {}),
    "tall": ((11, 4), {}),
    "wide": ((4, 11), {}),
    "one row": ((1, 7), {}),
    "one column": ((7, 1), {}),
    "one element": ((1, 1), {}),
    "convolution": ((5, 3, 2, 2), {}),
    "stacked": ((3, 4, 5), {"matrix_dims": 2}),
    "stacked twice": ((2, 2, 5, 3), {"matrix_dims": 2}),
    "stacked convolutions": ((2, 4, 3, 2), {"matrix_dims": 3}),
    "split in 3": ((12, 5), {"split": 3}),
    "split in sizes": ((10, 5), {"split": (4, 3, 3)}),
    "columns split in 3": ((5, 12), {"split": 3, "split_dim": 1}),
    "columns split in sizes": ((5, 10), {"split": (6, 3, 1), "split_dim": 1}),
    "stacked and split": ((2, 6, 5), {"matrix_dims": 2, "split": 3}),
    "stacked, columns split": ((2, 5, 6), {"matrix_dims": 2, "split": 2, "split_dim": 1}),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)

# The scaling, for every direction.
RULES: dict[str, Options] = {
    "merit": {},
    "no clip": {"clip": None},
    "small clip": {"clip": 0.05},
    "one ratio a matrix": {"element_wise": False},
    "no bound": {"weight_bound": False},
    "l2": {"norm": "l2"},
    "l2, one ratio a matrix, no clip": {"norm": "l2", "element_wise": False, "clip": None},
    "no ratio": {"norm": "none", "clip": None},
    "no ratio, clipped": {"norm": "none", "clip": 0.5},
    "bounded ratios": {"ratio_bounds": (0.05, 1.5)},
    "bounded ratio a matrix": {"ratio_bounds": (0.2, 1.1), "element_wise": False},
    "no decay": {"weight_decay": 0.0},
    "much decay": {"weight_decay": 2.0},
    "clipped gradients": {"max_grad_norm": 0.5},
    "maximize": {"maximize": True},
}
OF_MUON: dict[str, Options] = {
    "no nesterov": {"nesterov": False},
    "no momentum": {"momentum": 0.0},
    "no momentum, no nesterov": {"momentum": 0.0, "nesterov": False},
    "little momentum": {"momentum": 0.3},
    **{f"{n} passes": {"ns_steps": n} for n in (1, 2, 3, 4, 6)},
    **{f"polar-express, {n}": {"ns_coefficients": "polar-express", "ns_steps": n} for n in (1, 3, 5, 6)},
    **{f"dion, {n}": {"ns_coefficients": "dion", "ns_steps": n} for n in (1, 3, 5, 6)},
    "a triple": {"ns_coefficients": (2.0, -1.5, 0.5)},
    "two triples": {"ns_coefficients": [(3.0, -3.2, 1.2), (1.875, -1.25, 0.375)]},
    "large eps": {"eps": 2.0},
    **{f"scale {name}": {"scale": name} for name in ("match_rms_adamw", "original", "spectral")},
    "neurons": {"neuron_beta": 0.9},
    "neurons, everything else": {
        "neuron_beta": 0.5,
        "scale": "original",
        "norm": "l2",
        "ns_coefficients": "dion",
    },
}
OF_ADAM: dict[str, Options] = {
    "bias correction": {"bias_correction": True},
    "other numbers": {"betas": (0.5, 0.7), "eps": 1e-2},
}
OF_SOAP: dict[str, Options] = {
    "no bias correction": {"bias_correction": False},
    "other betas": {"betas": (0.8, 0.9), "eps": 1e-3},
    "its own beta": {"shampoo_beta": 0.5},
}
OF_DIRECTION: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "adam": (reference.Adam, ("betas", "eps", "bias_correction")),
    "muon": (
        reference.Muon,
        ("momentum", "nesterov", "ns_steps", "ns_coefficients", "eps", "scale", "neuron_beta"),
    ),
    "soap": (
        reference.Soap,
        ("betas", "eps", "bias_correction", "shampoo_beta", "precondition_frequency", "max_precond_dim"),
    ),
}
CLASSES = {"adam": MERIT, "muon": MuonMERIT, "soap": SOAPMERIT}
LR, DECAY = 0.05, 0.1


def twin(weight: Tensor, direction: str, options: Options, **more: Any) -> Weight:
    """The reference of a weight with the options of its group, which ``MERIT`` and the others name alike."""
    build, names = OF_DIRECTION[direction]
    own = {name: options[name] for name in names if name in options}
    rule = {name: options[name] for name in Rule.__dataclass_fields__ if name in options}
    view = {name: options[name] for name in ("matrix_dims", "split", "split_dim") if name in options}
    return Weight(
        weight.double().cpu().numpy(),
        lambda: build(**own, **more),
        Rule(**rule),
        lr=options.get("lr", LR),
        weight_decay=options.get("weight_decay", DECAY),
        maximize=options.get("maximize", False),
        **view,
    )


def built(weight: Tensor, direction: str, options: Options) -> tuple[Tensor, torch.optim.Optimizer]:
    """A copy of the weight, and the optimizer of it that has MERIT's ratios by default."""
    param = weight.clone()
    of_step = {k: v for k, v in options.items() if k in ("max_grad_norm", "differentiable", "foreach")}
    group = {k: v for k, v in options.items() if k not in of_step}
    if direction == "muon":
        group = {"ns_dtype": "float32", **group}
    group = {"params": [param], "direction": direction, **group}
    return param, CLASSES[direction]([group], lr=LR, weight_decay=DECAY, **of_step)


def start(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """A random weight; a matrix of some size with a row and a column of zeros, which have no ratios."""
    weight = random_tensor(shape, 1, scale=0.5, dtype=dtype)
    if len(shape) == 2 and min(shape) > 3:
        weight[1] = 0
        weight[:, 2] = 0
    return weight


def gradients(shape: tuple[int, ...], num: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    """Random, of a size that varies, and with a row that has none at first."""
    for step in range(num):
        grad = random_tensor(shape, 100 + step, scale=10.0 ** (step % 5 - 3), dtype=dtype)
        if step < 2 and len(shape) == 2 and shape[0] > 4:
            grad[3] = 0
        yield grad


def assert_near(actual: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual.detach().cpu().double().numpy(), expected, rtol=rtol, atol=atol)


def check_float64(device: torch.device, direction: str, shape: str, options: Options, num_steps: int) -> None:
    """Steps of an optimizer equal the reference's, each by itself, and so does the state."""
    dimensions, view = SHAPES[shape]
    options = view | options
    weight = start(dimensions)
    param, optimizer = built(weight.to(device), direction, options)
    expected = twin(weight, direction, options)
    for grad in gradients(dimensions, num_steps):
        param.grad = grad.to(device)
        optimizer.step()
        g = grad.numpy()
        expected.step(g, reference.gradient_scale([g], options.get("max_grad_norm")))
        assert_near(param, expected.w)
    state = optimizer.state[param]
    assert state["step"].item() == num_steps
    if direction == "adam":
        assert_near(state["exp_avg"], expected.state("exp_avg"))
        assert_near(state["exp_avg_sq"], expected.state("exp_avg_sq"))
    elif direction == "muon":
        assert_near(state["momentum_buffer"], expected.state("momentum_buffer"))
        if "second_momentum_buffer" in state:
            check_neurons(state["second_momentum_buffer"], expected)


def check_neurons(actual: Tensor, expected: Weight) -> None:
    """One average for each row of each matrix: (stacked, rows, 1)."""
    num = actual.shape[0]
    of_parts = [direction.state["second_momentum_buffer"] for direction in expected.directions]
    splits = len(of_parts) // num
    stacked = [np.concatenate(of_parts[i * splits : (i + 1) * splits]) for i in range(num)]
    assert_near(actual, np.stack(stacked))


@every_shape
@pytest.mark.parametrize("rule", RULES)
def test_muon_with_every_scaling(device, shape, rule) -> None:
    check_float64(device, "muon", shape, RULES[rule], 7)


@pytest.mark.parametrize(
    "shape",
    ["square", "tall", "wide", "one row", "one column", "convolution", "stacked", "split in sizes"],
)
@pytest.mark.parametrize("variant", OF_MUON)
def test_muon_with_every_option(device, shape, variant) -> None:
    check_float64(device, "muon", shape, OF_MUON[variant], 5)


@every_shape
@pytest.mark.parametrize("rule", ["merit", "l2", "bounded ratios"])
@pytest.mark.parametrize("variant", OF_ADAM)
def test_adam_with_every_view(device, shape, rule, variant) -> None:
    """test_against_numpy.py has the rest of Adam's direction."""
    check_float64(device, "adam", shape, {**RULES[rule], **OF_ADAM[variant]}, 5)


@pytest.mark.parametrize("direction", ["adam", "muon"])
@pytest.mark.parametrize("engine", ["foreach", "differentiable"])
@every_shape
def test_the_other_engines(device, direction, engine, shape) -> None:
    for rule in ("merit", "bounded ratio a matrix", "clipped gradients"):
        check_float64(device, direction, shape, {**RULES[rule], engine: True, "maximize": True}, 3)


def test_hundreds_of_steps(device) -> None:
    """Float64 weights drift from the reference by no more than rounding."""
    for coefficients in reference.PASSES:
        check_float64(device, "muon", "tall", {"ns_coefficients": coefficients}, 200)
    check_float64(device, "muon", "square", {"neuron_beta": 0.95}, 200)


@given(st.data())
def test_options_together(data) -> None:
    """Any shape with any options that are drawn at once."""
    seen = {name: view for name, (_, view) in SHAPES.items()}
    shape = data.draw(st.sampled_from(list(SHAPES)))
    options: Options = {
        "momentum": data.draw(st.sampled_from([0.0, 0.5, 0.95])),
        "nesterov": data.draw(st.booleans()),
        "ns_steps": data.draw(st.integers(1, 6)),
        "ns_coefficients": data.draw(st.sampled_from([*reference.PASSES, (2.0, -1.5, 0.5)])),
        "scale": data.draw(st.sampled_from(["rms", "match_rms_adamw", "original", "spectral"])),
        "clip": data.draw(st.sampled_from([None, 0.3, 1.0])),
        "element_wise": data.draw(st.booleans()),
        "weight_bound": data.draw(st.booleans()),
        "norm": data.draw(st.sampled_from(["max", "l2", "none"])),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "maximize": data.draw(st.booleans()),
        "max_grad_norm": data.draw(st.sampled_from([None, 0.1, 10.0])),
    }
    if options["norm"] != "none":
        options["ratio_bounds"] = data.draw(st.sampled_from([None, (0.1, 1.0), (0.5, 2.0)]))
    if seen[shape].get("split_dim") != 1:
        options["neuron_beta"] = data.draw(st.sampled_from([None, 0.0, 0.9]))
    check_float64(torch.device("cpu"), "muon", shape, options, 4)


# --- SOAP -------------------------------------------------------------------------------------------------

# Refreshed as often as the averages surely have full rank: the eigenvectors of a null space are arbitrary.
SOAP_SHAPES: dict[str, tuple[tuple[int, ...], Options]] = {
    "square": ((5, 5), {"precondition_frequency": 1}),
    "square, seldom": ((6, 6), {"precondition_frequency": 4}),
    "tall": ((9, 4), {"precondition_frequency": 3}),
    "wide": ((4, 9), {"precondition_frequency": 5}),
    "one row": ((1, 4), {"precondition_frequency": 5}),
    "one column": ((4, 1), {"precondition_frequency": 5}),
    "one element": ((1, 1), {"precondition_frequency": 2}),
    "convolution": ((5, 3, 2, 1), {"precondition_frequency": 3}),
    "stacked": ((3, 4, 5), {"precondition_frequency": 2, "matrix_dims": 2}),
    "long rows": ((4, 9), {"precondition_frequency": 2, "max_precond_dim": 8}),
    "long columns": ((9, 4), {"precondition_frequency": 2, "max_precond_dim": 4}),
    "both long": ((5, 6), {"precondition_frequency": 2, "max_precond_dim": 3}),
}


def soap_gradients(shape: tuple[int, ...], num: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    """Random, of a size that varies little: eigenvalues stay apart from each other and from zero."""
    for step in range(num):
        yield random_tensor(shape, 100 + step, scale=1 + step % 3, dtype=dtype)


def adopt_first_bases(expected: Weight, state: dict[str, Tensor]) -> None:
    """Let the reference begin with the optimizer's eigenvectors; it checks that they are such."""
    for i, direction in enumerate(expected.directions):
        bases = [state[key][i].cpu().double().numpy().copy() for key in ("row_basis", "column_basis")]
        direction.first_bases = [basis if basis.size else None for basis in bases]


def check_soap(device: torch.device, shape: str, options: Options, num_steps: int = 14) -> None:
    dimensions, own = SOAP_SHAPES[shape]
    options = own | options
    weight = random_tensor(dimensions, 1, scale=0.5, dtype=torch.float64)
    param, optimizer = built(weight.to(device), "soap", options)
    expected = twin(weight, "soap", options)
    for step, grad in enumerate(soap_gradients(dimensions, num_steps)):
        param.grad = grad.to(device)
        optimizer.step()
        if step == 0:
            adopt_first_bases(expected, optimizer.state[param])
        g = grad.numpy()
        expected.step(g, reference.gradient_scale([g], options.get("max_grad_norm")))
        assert_near(param, expected.w)
    state = optimizer.state[param]
    assert_near(state["exp_avg"].abs(), expected.state("exp_avg"), rtol=1e-7)
    assert_near(state["exp_avg_sq"], expected.state("exp_avg_sq"), rtol=1e-7)
    for i, direction in enumerate(expected.directions):
        for average, key in zip(direction.averages, ("row_average", "column_average"), strict=True):
            if state[key].numel():
                assert_near(state[key][i], average)


@pytest.mark.parametrize("shape", SOAP_SHAPES)
@pytest.mark.parametrize("rule", ["merit", "l2", "no ratio", "clipped gradients", "maximize"])
def test_soap_with_every_view(device, shape, rule) -> None:
    check_soap(device, shape, RULES[rule])


@pytest.mark.parametrize("shape", SOAP_SHAPES)
@pytest.mark.parametrize("variant", OF_SOAP)
def test_soap_with_every_option(device, shape, variant) -> None:
    check_soap(device, shape, OF_SOAP[variant])


@pytest.mark.parametrize("shape", ["square", "square, seldom", "one element"])
def test_soap_finds_the_same_bases_as_the_reference(device, shape) -> None:
    """Where every eigenvalue is another, the reference's own eigenvectors do: signs do not matter."""
    dimensions, options = SOAP_SHAPES[shape]
    weight = random_tensor(dimensions, 1, dtype=torch.float64)
    param, optimizer = built(weight.to(device), "soap", options)
    expected = twin(weight, "soap", options)
    for grad in soap_gradients(dimensions, 20):
        param.grad = grad.to(device)
        optimizer.step()
        expected.step(grad.numpy())
        assert_near(param, expected.w)


def test_soap_without_decay_is_soap_as_its_authors_write_it(device) -> None:
    """w - lr*d. With weight decay theirs is w - lr*d - lr*wd*(w - lr*d): it differs by lr**2 * wd * d."""
    for wd, tolerance in ((0.0, 1e-12), (0.1, 20 * LR**2 * 0.1)):
        weight = random_tensor((5, 5), 1, dtype=torch.float64)
        param = weight.clone().to(device)
        group = {"params": [param], "direction": "soap", "precondition_frequency": 3}
        optimizer = SOAP([group], lr=LR, weight_decay=wd)
        direction = reference.Soap(precondition_frequency=3)
        w = weight.numpy().copy()
        for grad in soap_gradients((5, 5), 10):
            param.grad = grad.to(device)
            optimizer.step()
            d = direction(grad.numpy())
            if d is not None:
                w = w - LR * d
                w = w - LR * wd * w
        assert_near(param, w, rtol=tolerance, atol=tolerance)
        assert wd == 0 or not np.allclose(param.cpu().numpy(), w, rtol=1e-9)  # the difference is there


# --- the public classes, with their own defaults ----------------------------------------------------------


def test_muon_merit_on_a_group_of_each_kind(device) -> None:
    """Hidden matrices, and AdamW at 0.4 of the learning rate for the rest."""
    hidden, vector, table, scalar = (start(s) for s in ((6, 4), (5,), (7, 3), ()))
    params = [x.clone().to(device) for x in (hidden, vector, table, scalar)]
    optimizer = MuonMERIT(
        [
            {"params": params[:1], "direction": "muon"},
            {"params": params[1:], "direction": "adam", "weight_decay": 0.3},
        ],
        ns_dtype="float32",
        max_grad_norm=1.0,
    )
    expected = [Weight(hidden.numpy(), reference.Muon, Rule(), lr=4e-2, weight_decay=0.1)] + [
        Weight(x.numpy(), reference.adamw, UNSCALED, lr=0.4 * 4e-2, weight_decay=0.3)
        for x in (vector, table, scalar)
    ]
    check_together(params, optimizer, expected, max_norm=1.0)


def test_muon_merit_with_merit_for_the_rest(device) -> None:
    hidden, vector, table = (start(s) for s in ((6, 4), (5,), (7, 5)))
    params = [x.clone().to(device) for x in (hidden, vector, table)]
    rule = {"norm": "max", "element_wise": True, "weight_bound": True, "clip": 0.8}
    optimizer = MuonMERIT(
        [{"params": params[:1], "direction": "muon"}, {"params": params[1:], "direction": "adam"}],
        ns_dtype="float32",
        rest_lr=0.03,
        rest={**rule, "betas": (0.8, 0.99)},
    )
    expected = [Weight(hidden.numpy(), reference.Muon, Rule(), lr=4e-2, weight_decay=0.1)] + [
        Weight(
            x.numpy(),
            lambda: reference.Adam((0.8, 0.99), 1e-8, True),
            Rule(**rule),
            lr=0.03,
            weight_decay=0.1,
        )
        for x in (vector, table)
    ]
    check_together(params, optimizer, expected)


@pytest.mark.parametrize(
    ("optimizer_class", "direction", "rest_betas"),
    [
        (Muon, lambda: reference.Muon(scale="match_rms_adamw"), (0.9, 0.95)),
        (NorMuon, lambda: reference.Muon(scale="match_rms_adamw", neuron_beta=0.95), (0.9, 0.95)),
        (SOAP, reference.Soap, (0.95, 0.95)),
    ],
)
def test_the_unscaled_classes_with_their_defaults(device, optimizer_class, direction, rest_betas) -> None:
    hidden, vector = start((6, 6)), start((5,))
    hidden = random_tensor((6, 6), 1, dtype=torch.float64)
    params = [x.clone().to(device) for x in (hidden, vector)]
    of_muon = {} if optimizer_class is SOAP else {"ns_dtype": "float32"}
    name = "soap" if optimizer_class is SOAP else "muon"
    optimizer = optimizer_class(
        [{"params": params[:1], "direction": name}, {"params": params[1:], "direction": "adam"}],
        lr=0.02,
        weight_decay=0.2,
        **of_muon,
    )
    expected = [
        Weight(hidden.numpy(), direction, UNSCALED, lr=0.02, weight_decay=0.2),
        Weight(
            vector.numpy(),
            lambda: reference.Adam(rest_betas, 1e-8, True),
            UNSCALED,
            lr=0.02,
            weight_decay=0.2,
        ),
    ]
    check_together(params, optimizer, expected)


def check_together(
    params: list[Tensor],
    optimizer: torch.optim.Optimizer,
    expected: list[Weight],
    max_norm: float | None = None,
) -> None:
    for step in range(15):
        grads = [random_tensor(p.shape, 100 * step + i, dtype=torch.float64) for i, p in enumerate(params)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(param.device)
        optimizer.step()
        scale = reference.gradient_scale([g.numpy() for g in grads], max_norm)
        for param, grad, weight in zip(params, grads, expected, strict=True):
            weight.step(grad.numpy(), scale)
            assert_near(param, weight.w)


# --- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["adam", "muon", "soap"])
def test_a_weight_that_is_not_contiguous(device, direction) -> None:
    """A transposed matrix, and a convolution with its channels last: elements are where their indices say."""
    transposed = random_tensor((5, 6), 1, dtype=torch.float64).T
    convolution = random_tensor((5, 3, 2, 2), 1, dtype=torch.float64).to(memory_format=torch.channels_last)
    for weight in (transposed, convolution):
        assert not weight.is_contiguous()
        options = {"precondition_frequency": 4} if direction == "soap" else {}
        param, optimizer = built(weight.to(device), direction, options)
        assert param.stride() == weight.stride()
        expected = twin(weight, direction, options)
        for step, grad in enumerate(soap_gradients(tuple(weight.shape), 7)):
            param.grad = torch.empty_like(param).copy_(grad)
            optimizer.step()
            if direction == "soap" and step == 0:
                adopt_first_bases(expected, optimizer.state[param])
            expected.step(grad.numpy())
            assert_near(param, expected.w)


# --- lower precision --------------------------------------------------------------------------------------


@every_shape
@pytest.mark.parametrize("rule", ["merit", "l2", "no ratio"])
def test_every_float32_step_is_within_rounding(device, shape, rule) -> None:
    """The reference begins each step from the optimizer's own weight and momentum: only rounding is left.

    A change is lr * (s*u). Newton-Schulz multiplies what rounding does to the smallest singular values by up
    to 3.4**5 = 480, and 480 * 6e-8 = 3e-5 of d's elements, which are about 1 in size.
    """
    dimensions, view = SHAPES[shape]
    options = view | RULES[rule]
    param, optimizer = built(start(dimensions, torch.float32).to(device), "muon", options)
    expected = twin(param, "muon", options)
    for grad in gradients(dimensions, 7, torch.float32):
        param.grad = grad.to(device)
        optimizer.step()
        g = grad.double().numpy()
        expected.step(g, reference.gradient_scale([g], options.get("max_grad_norm")))
        assert_near(param, expected.w, rtol=1e-6, atol=FLOAT32_ATOL)
        assert_near(optimizer.state[param]["momentum_buffer"], expected.state("momentum_buffer"), 1e-6, 1e-8)
        take_over(expected, param, optimizer.state[param])


FLOAT32_ATOL = LR * 1e-4


def take_over(expected: Weight, param: Tensor, state: dict[str, Tensor]) -> None:
    """Put the optimizer's weight and momentum in the reference."""
    expected.w = param.detach().cpu().double().numpy().copy()
    momentum = state["momentum_buffer"].cpu().double().numpy().copy()
    for direction, average in zip(expected.directions, expected.cut(momentum), strict=True):
        direction.average = average


@pytest.mark.parametrize("direction", ["adam", "muon"])
def test_state_in_bfloat16_is_what_the_update_is_formed_from(device, direction) -> None:
    """m, v and M are rounded first and used then, so that a loaded checkpoint goes on as it would have."""

    def rounded(x: Any) -> Any:
        return torch.from_numpy(x).bfloat16().double().numpy()

    weight = start((6, 5), torch.float32)
    options = {"state_dtype": torch.bfloat16}
    param, optimizer = built(weight.to(device), direction, options)
    expected = twin(weight, direction, {}, stored=rounded)
    for grad in gradients((6, 5), 12, torch.float32):
        param.grad = grad.to(device)
        optimizer.step()
        expected.step(grad.double().numpy())
        assert_near(param, expected.w, rtol=1e-5, atol=1e-5)
    for key, value in expected.directions[0].state.items():
        stored = optimizer.state[param][key]
        assert stored.dtype == torch.bfloat16
        assert_near(stored, value, rtol=1e-2)  # one bf16 step where float32 rounds to the other neighbour


# |d - exact d| / |d| in the Frobenius norm: twice the largest that was measured. The second number is that of
# polar-express for a single row or column, whose only singular value is 1: there its first pass has a slope
# of 17, which multiplies what rounding does to that value.
HALF_PRECISION = {"bfloat16": (0.06, 0.1), "float16": (0.006, 0.06)}


@pytest.mark.parametrize("ns_dtype", HALF_PRECISION)
@pytest.mark.parametrize("coefficients", reference.PASSES)
@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (32, 96), (1, 40), (40, 1), (64, 65)], ids=str)
def test_half_precision_products_are_near_the_exact_ones(device, ns_dtype, coefficients, shape) -> None:
    """d by five passes of which every product is rounded, against float64's."""
    param = torch.zeros(shape, device=device)
    group = {"params": [param], "direction": "muon"}
    options = {"ns_coefficients": coefficients, "ns_dtype": ns_dtype, "norm": "none", "clip": None}
    optimizer = MuonMERIT([group], lr=1.0, weight_decay=0.0, **options)
    direction = reference.Muon(ns_coefficients=coefficients)
    for step in range(4):
        grad = random_tensor(shape, step)
        before = param.clone()
        param.grad = grad.to(device)
        optimizer.step()
        exact = direction(grad.double().numpy())
        d = (before - param).cpu().double().numpy()
        error = np.linalg.norm(d - exact) / np.linalg.norm(exact)
        assert 0 < error < HALF_PRECISION[ns_dtype][coefficients == "polar-express" and min(shape) == 1]
