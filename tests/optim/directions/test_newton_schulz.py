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


def test_the_names_are_those_of_the_reference() -> None:
    assert COEFFICIENTS.keys() == reference.PASSES.keys()


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


def test_five_passes_leave_small_singular_values_small(device) -> None:
    """5 passes of the quintic multiply by at most 3.4445**5 = 485: 1e-5 of the norm ends at 5e-3."""
    n = with_singular_values([1.0, 1e-5], 8, 8, device)
    after = torch.linalg.svdvals(factor(n, dtype=torch.float64))
    assert after[1].item() == pytest.approx(1e-5 * 3.4445**5, rel=1e-3)


@pytest.mark.parametrize(("name", "limit"), [("polar-express", 1.0354), ("dion", 0.9891)])
def test_more_passes_make_the_rows_orthogonal(device, name, limit) -> None:
    """All singular values end at the fixed point of the last polynomial, a few percent from 1."""
    n = random_tensor((16, 40), 3, dtype=torch.float64, device=device)
    spreads = []
    for num_passes in (5, 10, 20, 40):
        values = torch.linalg.svdvals(factor(n, name, num_passes, torch.float64))
        spreads.append((values.max() - values.min()).item())
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < 1e-5
    x = factor(n, name, 40, torch.float64)
    identity = torch.eye(16, dtype=torch.float64, device=device)
    torch.testing.assert_close(x @ x.T / limit**2, identity, rtol=0, atol=1e-3)


def test_passes_that_converge_give_the_polar_factor(device) -> None:
    """With (15, -10, 3) / 8, whose fixed point is 1, U V' of the singular value decomposition."""
    for shape in ((9, 9), (9, 14), (14, 9)):
        n = random_tensor(shape, 4, dtype=torch.float64, device=device)
        u, _, v = torch.linalg.svd(n, full_matrices=False)
        x = factor(n, (1.875, -1.25, 0.375), 30, torch.float64)
        torch.testing.assert_close(x, u @ v, rtol=0, atol=1e-10)


@pytest.mark.parametrize("number", [float, np.float64, np.float32])
def test_coefficients_of_every_kind_of_number(number) -> None:
    """Any real numbers that the check of options allows."""
    n = random_tensor((5, 7), 1)
    triple = tuple(map(number, (2.0, -1.5, 0.5)))
    expected = factor(n, (2.0, -1.5, 0.5), 3)
    torch.testing.assert_close(factor(n, triple, 3), expected)
    torch.testing.assert_close(factor(n, [triple], 3), expected)
    torch.testing.assert_close(factor(n, [triple] * 3, 3), expected)


# --- symmetries -------------------------------------------------------------------------------------------


@every_shape
@every_set
@every_dtype
def test_transposing_the_input_transposes_the_output(device, shape, name, dtype) -> None:
    n = random_tensor(shape, 5, device=device)
    assert_close(factor(n.T.contiguous(), name, dtype=dtype), factor(n, name, dtype=dtype).T, dtype)


@every_shape
@every_set
@every_dtype
def test_permuting_rows_and_columns_permutes_the_output(device, shape, name, dtype) -> None:
    n = random_tensor(shape, 6, device=device)
    x = factor(n, name, dtype=dtype)
    rows, columns = (torch.from_numpy(np.random.default_rng(0).permutation(side)) for side in shape)
    assert_close(factor(n[rows], name, dtype=dtype), x[rows], dtype)
    assert_close(factor(n[:, columns], name, dtype=dtype), x[:, columns], dtype)


@every_shape
@every_dtype
def test_changing_the_sign_of_a_row_changes_it_in_the_output(device, shape, dtype) -> None:
    """Exactly: the rounding does not depend on signs."""
    n = random_tensor(shape, 7, device=device)
    signs = torch.ones(shape[0], 1, device=device)
    signs[::2] = -1
    assert torch.equal(factor(n * signs, dtype=dtype), factor(n, dtype=dtype) * signs)


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
    """A part of a larger matrix, or of a stack, gives the same bits."""
    for shape in ((16, 24), (24, 16), (20, 20)):
        n = random_tensor(shape, 9, device=device)
        x = factor(n, dtype=dtype)
        below, beside = torch.cat([-n, n, n]), torch.cat([-n, n, n], 1)
        assert_same_bits(factor(below[shape[0] : 2 * shape[0]], dtype=dtype), x, "rows")
        assert_same_bits(factor(beside[:, shape[1] : 2 * shape[1]], dtype=dtype), x, "columns")
        stacked = polar(torch.stack([-n, n, 5 * n]), COEFFICIENTS["quintic"], 5, dtype, 1e-7)
        assert_same_bits(stacked[1].to(x.dtype), x, "stacked")


@every_dtype
def test_the_order_in_memory_does_not_matter(device, dtype) -> None:
    """A matrix stored by columns gives the same bits, though products may round differently by strides."""
    for shape in ((16, 24), (24, 16), (20, 20), (64, 128)):
        n = random_tensor(shape, 9, device=device)
        assert_same_bits(factor(n.T.contiguous().T, dtype=dtype), factor(n, dtype=dtype), str(shape))


# --- the edges --------------------------------------------------------------------------------------------


@every_shape
@every_set
@every_dtype
def test_zero_stays_exactly_zero(device, shape, name, dtype) -> None:
    assert_same_bits(factor(torch.zeros(shape, device=device), name, dtype=dtype).abs(), torch.zeros(shape))


@every_set
@every_dtype
def test_zero_rows_and_columns_stay_zero(device, name, dtype) -> None:
    for shape in ((10, 14), (14, 10)):
        n = random_tensor(shape, 1, device=device)
        n[3] = 0
        n[:, 5] = 0
        x = factor(n, name, dtype=dtype)
        assert x.isfinite().all()
        assert not x[3].any()
        assert not x[:, 5].any()
        assert x.abs().sum() > 1


@every_set
@every_dtype
def test_a_matrix_of_low_rank_stays_finite_and_bounded(device, name, dtype) -> None:
    n = random_tensor((20, 1), 1, device=device) @ random_tensor((1, 30), 2, device=device)
    values = torch.linalg.svdvals(factor(n, name, dtype=dtype).double())
    low, high = RANGES[name]
    rounding = 0.06 if dtype == torch.bfloat16 else 0.03
    assert low - rounding < values[0] < high + rounding
    # Rounding makes the other singular values of n up to 2**-9 of the first one, or 1e-7 in float32.
    assert values[1] < (1e-3 if dtype == torch.float32 else 1.2)


def test_one_element_becomes_its_sign(device) -> None:
    for value in (3.0, -0.2):
        x = factor(torch.tensor([[value]], device=device), "dion")
        assert x.item() == pytest.approx(np.sign(value), abs=0.03)
        exact = reference.polar(np.array([[value]]), "dion").item()
        assert x.item() == pytest.approx(exact, rel=1e-6)


@every_dtype
def test_huge_matrices_are_orthogonalised(device, dtype) -> None:
    for shape in ((16, 24), (24, 16), (1, 1), (1, 9)):
        n = random_tensor(shape, 1, device=device)
        assert_close(factor(n * 1e30, dtype=dtype), factor(n, dtype=dtype), dtype)


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


def test_a_norm_below_a_larger_eps_is_replaced_by_it(device) -> None:
    n = random_tensor((5, 6), 1, dtype=torch.float64, device=device)
    expected = reference.polar(n.cpu().numpy(), eps=50.0)
    torch.testing.assert_close(
        factor(n, dtype=torch.float64, eps=50.0).cpu(), torch.from_numpy(expected), rtol=1e-12, atol=1e-14
    )


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


def test_a_nonfinite_matrix_does_not_affect_others_in_the_stack(device) -> None:
    n = random_tensor((3, 6, 5), 1, device=device)
    good = polar(n, COEFFICIENTS["quintic"], 5, torch.bfloat16, 1e-7)
    n[1, 2, 3] = float("nan")
    x = polar(n, COEFFICIENTS["quintic"], 5, torch.bfloat16, 1e-7)
    assert x[1].isnan().all()
    assert_same_bits(x[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_layout_of_a_matrix_changes_no_bit(device, dtype) -> None:
    """Of a whole matrix, and of one row of it, which torch calls contiguous whatever its strides."""
    for seed in range(5):
        x = random_tensor((64, 48), seed, dtype=dtype, device=device)
        turned = x.T.contiguous().T
        assert_same_bits(factor(turned, dtype=dtype), factor(x, dtype=dtype))
        assert_same_bits(factor(turned[:1, :8], dtype=dtype), factor(x[:1, :8], dtype=dtype))
