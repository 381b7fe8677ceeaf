"""The polar factor: its singular values, its symmetries, and edge cases."""

from typing import Any

import numpy as np
import pytest
import reference
import torch
from optimizer_cases import assert_same_bits, random_tensor
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from merit_optim.optim.axes.directions.newton_schulz import COEFFICIENTS, coefficients_of, polar

SHAPES = [(24, 24), (40, 16), (16, 40), (1, 12), (12, 1), (1, 1)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_set = pytest.mark.parametrize("name", reference.PASSES)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).split(".")[-1]
)

# Relative differences in norm that rounding allows, with products of 53, 24, 8 and 11 bits. The largest are
# polar-express's for a single row, 3e-5 in float32.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}


def factor(
    x: Tensor,
    coefficients: Any = "quintic",
    num_passes: int = 5,
    dtype: torch.dtype = torch.float32,
    eps: float = 1e-7,
) -> Tensor:
    """The polar factor of one matrix."""
    return polar(x[None], coefficients_of(coefficients), num_passes, dtype, eps)[0].to(x.dtype)


def with_singular_values(values: Any, rows: int, columns: int, device: torch.device) -> Tensor:
    """A float64 matrix with random singular vectors."""
    u, _ = torch.linalg.qr(random_tensor((rows, len(values)), 1, dtype=torch.float64))
    v, _ = torch.linalg.qr(random_tensor((columns, len(values)), 2, dtype=torch.float64))
    return (u * torch.as_tensor(values) @ v.T).to(device)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    difference = torch.linalg.vector_norm((actual - expected).double())
    assert difference <= ROUNDING[dtype] * torch.linalg.vector_norm(expected.double())


# --- singular values --------------------------------------------------------------------------------------


@every_set
@pytest.mark.parametrize("num_passes", [1, 2, 5, 7])
@pytest.mark.parametrize("shape", [(20, 20), (20, 30), (30, 20)], ids=str)
def test_every_singular_value_goes_through_the_polynomials(device, name, num_passes, shape) -> None:
    """x -> a*x + b*x**3 + c*x**5 in each pass, and the singular vectors do not change."""
    values = np.geomspace(1, 1e-3, 20)
    n = with_singular_values(values, *shape, device)
    u, s, v = torch.linalg.svd(n, full_matrices=False)
    x = factor(n, name, num_passes, torch.float64)
    through = torch.from_numpy(
        reference.on_singular_value(values / np.linalg.norm(values), name, num_passes)
    ).to(device)
    assert_close(x, u * through @ v, torch.float64)
    torch.testing.assert_close(s.cpu(), torch.from_numpy(values))


# The range of singular values above 0.01 of the norm after five passes.
RANGES = {"quintic": (0.68, 1.14), "polar-express": (0.85, 1.15), "dion": (0.97, 1.04)}


@every_set
@every_dtype
@pytest.mark.parametrize("shape", [(64, 64), (48, 128), (128, 48)], ids=str)
def test_five_passes_bring_singular_values_near_one(device, name, dtype, shape) -> None:
    low, high = RANGES[name]
    rounding = 0.02 if dtype == torch.bfloat16 else 0.005
    values = np.linspace(1, 0.1, min(shape))
    assert values.min() / np.linalg.norm(values) > 0.01
    n = with_singular_values(values, *shape, device).float()
    after = torch.linalg.svdvals(factor(n, name, dtype=dtype).double())
    assert low - rounding < after.min()
    assert after.max() < high + rounding
    # The root mean square of d is that of the singular values.
    assert 0.8 < after.square().mean().sqrt() < 1.1


@pytest.mark.parametrize("number", [float, np.float64, np.float32])
def test_coefficients_of_every_kind_of_number(number) -> None:
    """Any real numbers that the check of options allows."""
    n = random_tensor((5, 7), 1)
    triple = tuple(map(number, (2.0, -1.5, 0.5)))
    expected = factor(n, (2.0, -1.5, 0.5), 3)
    torch.testing.assert_close(factor(n, triple, 3), expected)
    torch.testing.assert_close(factor(n, [triple], 3), expected)
    torch.testing.assert_close(factor(n, [triple] * 3, 3), expected)


# --- sizes and places --------------------------------------------------------------------------------------


@every_shape
@every_set
@every_dtype
def test_the_size_of_the_input_does_not_matter(device, shape, name, dtype) -> None:
    """Powers of two change no bit; other factors only change the rounding."""
    n = random_tensor(shape, 8, device=device)
    x = factor(n, name, dtype=dtype)
    for exponent in (-12, 20, 100):
        assert_same_bits(factor(n * 2.0**exponent, name, dtype=dtype), x)
    assert_close(factor(n * 3e-5, name, dtype=dtype), x, dtype)


@every_dtype
def test_the_place_in_memory_does_not_matter(device, dtype) -> None:
    """A part of a larger matrix, of a stack with a NaN, or stored by columns gives the same bits."""
    for shape in ((16, 24), (24, 16), (20, 20), (64, 128)):
        n = random_tensor(shape, 9, device=device)
        x = factor(n, dtype=dtype)
        below, beside = torch.cat([-n, n, n]), torch.cat([-n, n, n], 1)
        assert_same_bits(factor(below[shape[0] : 2 * shape[0]], dtype=dtype), x, "rows")
        assert_same_bits(factor(beside[:, shape[1] : 2 * shape[1]], dtype=dtype), x, "columns")
        assert_same_bits(factor(n.T.contiguous().T, dtype=dtype), x, "by columns")
        stacked = polar(torch.stack([-n, n, n * torch.nan]), COEFFICIENTS["quintic"], 5, dtype, 1e-7)
        assert_same_bits(stacked[1].to(x.dtype), x, "stacked")
        assert stacked[2].isnan().all()


# --- the edges --------------------------------------------------------------------------------------------


def test_the_largest_matrices_are_orthogonalised(device) -> None:
    """Elements up to float32's largest: their norm exceeds it, and must not turn them into zeros."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        n = random_tensor((16, 24), 1, device=device)
        n = n / n.abs().max()
        assert_close(factor(n * 3e38, dtype=dtype), factor(n, dtype=dtype), dtype)


@every_dtype
def test_tiny_matrices_shrink_towards_zero(device, dtype) -> None:
    """A norm below eps is not normalized to 1: the passes start from X = N / eps, and each multiplies such a
    small matrix by 3.4445. A gradient that is nearly zero makes no step of full size.
    """
    n = random_tensor((16, 24), 1, device=device)
    n = n / torch.linalg.vector_norm(n)
    assert_close(factor(n * 1e-6, dtype=dtype), factor(n, dtype=dtype), dtype)  # above eps
    sizes = []
    for norm in (1e-7, 1e-8, 1e-9, 1e-10, 1e-11):
        x = factor(n * norm, dtype=dtype)
        assert x.isfinite().all()
        sizes.append(torch.linalg.vector_norm(x.double()).item())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == pytest.approx(1e-11 / 1e-7 * 3.4445**5, rel=0.05)
    tiny = factor(n * 1e-30, dtype=dtype)  # float16 has no such numbers: zero
    expected = 0.0 if dtype == torch.float16 else 1e-30 / 1e-7 * 3.4445**5
    assert torch.linalg.vector_norm(tiny.double()).item() == pytest.approx(expected, rel=0.05, abs=0)
    assert not factor(n * 0, dtype=dtype).any()


@every_shape
@every_set
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_element_makes_the_matrix_nan(device, shape, name, dtype, bad) -> None:
    """Even if all other elements are zero."""
    for num_passes in (1, 5):
        for n in (random_tensor(shape, 1, device=device), torch.zeros(shape, device=device)):
            n[-1, 0] = bad
            assert factor(n, name, num_passes, dtype).isnan().all()


class Products(TorchDispatchMode):
    """Remembers the dtypes in which matrices were multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_a_cpu_multiplies_no_narrow_numbers_and_rounds_each_product() -> None:
    """A CPU without instructions for them would loop, and torch would turn oneDNN off for good."""
    n = random_tensor((32, 48), 1)
    for dtype in (torch.bfloat16, torch.float16):
        with Products() as products:
            factor(n, dtype=dtype)
        assert products.dtypes == [torch.float32] * 15
    a, b, c = 3.4445, -4.7750, 2.0315
    expected = (n.double() / torch.linalg.vector_norm(n.double())).bfloat16()
    for _ in range(5):
        wide = expected.double()
        gram = (wide @ wide.T).bfloat16().double()
        polynomial = (b * gram + c * gram @ gram).bfloat16().double()
        expected = (a * wide + polynomial @ wide).bfloat16()
    # A sum may round to the other neighbour than in float64: up to 8e-4 over seven seeds.
    difference = torch.linalg.vector_norm((factor(n, dtype=torch.bfloat16) - expected).double())
    assert difference < 3e-3 * torch.linalg.vector_norm(expected.double())
