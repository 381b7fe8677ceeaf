"""The kernels' polar factors against the definition: every shape, tile and edge case, alone and in batches.

The kernels compute in the dtype of their tensors. Here these are float32, because the interpreter truncates
to bfloat16; on a GPU, where products of float32 are coarser, they are bfloat16 and larger.
"""

import pytest
import torch
from optimizer_cases import assert_same_bits, random_tensor
from torch import Tensor

pytest.importorskip("triton", reason="the fused engine needs triton, which is not installed")

import triton
import triton.language as tl

from merit_optim.optim.axes.directions import Muon
from merit_optim.optim.axes.directions.newton_schulz import COEFFICIENTS, Coefficients, polar
from merit_optim.optim.engines.fused import newton_schulz, product_kernels
from merit_optim.optim.engines.fused.newton_schulz import Iteration, Polar, ProductTile, num_together

# NumPy's warnings about NaN and infinities; Triton's interpreter uses NumPy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning"),
    pytest.mark.usefixtures("memory_begins_as_nan"),
]

INTERPRETED = not torch.cuda.is_available()
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16

# Relative differences in norm. The largest seen in float32 is 1.3e-5, with passes in pairs.
TOLERANCE = 3e-5 if INTERPRETED else 0.1

QUINTIC = COEFFICIENTS["quintic"]
EPS = 1e-7

# Small, so that small matrices have several tiles and blocks.
TILES = {
    "SYMMETRIC_TILE": ProductTile(16, 16, 8, warps=1, stages=1),
    "PRODUCT_TILE": ProductTile(16, 32, 16, warps=1, stages=1),
    "NEIGHBOURS": 2,
    "BLOCK": 256,
    "BLOCK_SUMS": 2,
}
FACTOR = 1 if INTERPRETED else 16
"""On a GPU tiles have their usual size, and matrices are larger by this factor."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        for name, value in TILES.items():
            monkeypatch.setattr(newton_schulz, name, value)


def sides(*sides: int) -> list[int]:
    """Scale the sides; 1 stays 1."""
    return [side * FACTOR if side > 1 else 1 for side in sides]


def matrices(num: int, rows: int, columns: int, device: torch.device) -> Tensor:
    return random_tensor((num, *sides(rows, columns)), 1, dtype=DTYPE, device=device)


def factors(
    n_NRC: Tensor, coefficients: Coefficients = QUINTIC, num_passes: int = 2, eps: float = EPS
) -> Tensor:
    """The kernels' polar factors of a copy with NaN before and after it, which must not change."""
    num, rows, columns = n_NRC.shape
    guard = 1024  # elements; keeps the usual alignment of the copy
    memory = torch.full((n_NRC.numel() + 2 * guard,), torch.nan, dtype=n_NRC.dtype, device=n_NRC.device)
    copy = memory[guard:-guard].view(n_NRC.shape).copy_(n_NRC)
    result = Polar(num, Iteration(rows, columns, coefficients, num_passes, eps))(copy).clone()
    assert memory[:guard].isnan().all()
    assert memory[-guard:].isnan().all()
    return result


def defined(
    n_NRC: Tensor, coefficients: Coefficients = QUINTIC, num_passes: int = 2, eps: float = EPS
) -> Tensor:
    """The definition, in float64."""
    return polar(n_NRC.double(), coefficients, num_passes, torch.float64, eps)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare each matrix separately."""
    assert actual.dtype == DTYPE
    difference, size = (torch.linalg.vector_norm(x, dim=(1, 2)) for x in (actual - expected, expected))
    assert (difference <= TOLERANCE * size).all(), (difference / size).tolist()


# Tiles are 16 x 16 and 16 x 32, with inner blocks of 8 and 16.
SHAPES = {
    "wide": (17, 37),
    "tall": (37, 17),
    "square": (17, 17),
    "one column less than square": (18, 17),
    "tiles that divide it": (16, 32),
    "tiles that divide it, tall": (64, 32),
    "tiles that divide it, square": (32, 32),
    "tiles that divide its smaller side": (16, 29),
    "tiles that divide its larger side": (13, 32),
    "smaller than a tile": (5, 7),
    "one row": (1, 20),
    "one column": (20, 1),
    "one element": (1, 1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(device, shape) -> None:
    n = matrices(2, *shape, device)
    assert_close(factors(n), defined(n))


def test_some_shapes_are_divided_by_the_tiles_and_some_are_not() -> None:
    seen = {name: set() for name in ("_gram", "_polynomial", "_product")}
    for shape in SHAPES.values():
        polar_factors = Polar(1, Iteration(*sides(*shape), QUINTIC, 1, EPS))
        for name, evens in seen.items():
            evens.add(getattr(polar_factors, name)._constants["EVEN"])
    assert seen == {name: {True, False} for name in seen}


@pytest.mark.parametrize("num_passes", range(1, 7))
@pytest.mark.parametrize(
    "coefficients",
    [*COEFFICIENTS.values(), Coefficients(((2.0, -1.5, 0.5), (1.5, -0.5, 0.0)), margin=1.5)],
    ids=[*COEFFICIENTS, "any"],
)
def test_every_coefficient_and_number_of_passes(device, coefficients, num_passes) -> None:
    for shape in ((6, 9), (9, 4)):  # single passes, and passes in pairs
        n = matrices(1, *shape, device)
        assert_close(factors(n, coefficients, num_passes), defined(n, coefficients, num_passes))


@pytest.mark.parametrize(
    ("shape", "num_passes"), [((35, 70), 4), ((70, 35), 1), ((48, 96), 1), ((33, 50), 3)]
)
def test_many_tiles(device, shape, num_passes) -> None:
    """No program reads what another writes in the same launch."""
    n = matrices(1, *shape, device)
    assert_close(factors(n, num_passes=num_passes), defined(n, num_passes=num_passes))


def test_in_bfloat16_it_is_as_close_as_bfloat16_can_be(device) -> None:
    """The interpreter truncates; test_fused_muon_gpu.py has a stricter test for GPUs."""
    n = matrices(2, 9, 20, device).bfloat16()
    x, expected = factors(n), defined(n)
    assert x.dtype == torch.bfloat16
    assert torch.linalg.vector_norm(x - expected) <= 0.05 * torch.linalg.vector_norm(expected)


# --- alone and in batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(17, 20), (20, 17), (16, 32)], ids=str)
def test_a_matrix_has_the_same_bits_whatever_shares_its_launch(device, shape) -> None:
    n = matrices(3, *shape, device)
    together = factors(n, num_passes=1)
    for i, x in enumerate(together):
        assert_same_bits(factors(n[i : i + 1], num_passes=1)[0], x, f"{i} alone")
    n[1] *= 1e6
    others = factors(n[[2, 1, 0]], num_passes=1)[[0, 2]]
    assert_same_bits(others, together[[2, 0]], "in another order, beside a larger one")


def test_it_repeats_bit_for_bit(device) -> None:
    """Also with the same object, which keeps its kernels."""
    n = matrices(2, 9, 20, device)
    polar_factors = Polar(2, Iteration(*n.shape[1:], QUINTIC, 2, EPS))
    first, second = (polar_factors(n.clone()).clone() for _ in range(2))
    assert_same_bits(second, first)
    assert_same_bits(factors(n), first)


# --- the edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(17, 20), (20, 9), (16, 32)], ids=str)
def test_a_nonfinite_element_makes_exactly_its_matrix_nan(device, shape, bad) -> None:
    """Also with passes in pairs."""
    n = matrices(3, *shape, device)
    good = factors(n)
    n[1, -1, 0] = bad
    x = factors(n)
    assert x[1].isnan().all()
    assert_same_bits(x[[0, 2]], good[[0, 2]])


def test_an_infinity_among_zeros_is_not_hidden(device) -> None:
    for bad in (torch.inf, -torch.inf):
        for num_passes in (1, 2):
            n = torch.zeros_like(matrices(1, 9, 20, device))
            n[0, 0, -1] = bad
            assert factors(n, num_passes=num_passes).isnan().all()


@pytest.mark.parametrize("shape", [(9, 20), (20, 9), (1, 20), (20, 1)], ids=str)
def test_zero_stays_zero_next_to_other_matrices(device, shape) -> None:
    n = matrices(3, *shape, device)
    n[1] = 0
    x = factors(n)
    assert_same_bits(x[1].abs(), torch.zeros_like(x[1]))
    assert_close(x[[0, 2]], defined(n[[0, 2]]))


def test_zero_rows_and_columns_stay_zero(device) -> None:
    for shape in ((9, 20), (20, 9)):
        n = matrices(1, *shape, device)
        n[0, 8] = 0
        n[0, :, 3] = 0
        x = factors(n)
        assert not x[0, 8].any()
        assert not x[0, :, 3].any()
        assert_close(x, defined(n))


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_no_norm_is_too_large_or_too_small(device, size) -> None:
    """Squares of these are beyond float32."""
    n = matrices(2, 9, 20, device)
    n[1] *= size
    x = factors(n, eps=1e-37)
    assert_close(x, defined(n, eps=1e-37))
    assert 0.1 < torch.linalg.vector_norm(x[1].double()) / torch.linalg.vector_norm(x[0].double()) < 10


def test_the_largest_finite_numbers(device) -> None:
    n = matrices(1, 9, 20, device)
    n = n / n.abs().max() * 3e38
    assert_close(factors(n), defined(n))


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_below_eps_a_matrix_is_divided_by_eps(device, name) -> None:
    """On both sides of the limit: the norm that is compared includes the margin."""
    n = matrices(1, 9, 20, device)
    n = n / torch.linalg.vector_norm(n.double())
    for norm in (1e-2, 0.99e-3, 0.5e-3, 1e-6):
        of_norm = (n * norm).to(DTYPE)
        expected = defined(of_norm, COEFFICIENTS[name], eps=1e-3)
        assert_close(factors(of_norm, COEFFICIENTS[name], eps=1e-3), expected)


# --- the rest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2**26])
def test_tiles_of_the_upper_triangle_are_counted_column_by_column(device, first) -> None:
    """Each once, even if the square root that gives the column is rounded."""

    @triton.jit
    def find(tiles, first, num, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row, column = product_kernels.upper(first + at)
        tl.store(tiles + at, row)
        tl.store(tiles + num + at, column)

    num, block = 2**16, 2**13
    tiles = torch.empty(2, num, dtype=torch.int32, device=device)
    find[(num // block,)](tiles, first, num, BLOCK=block)
    columns = torch.arange(12000)
    counted = columns * (columns + 1) // 2
    index = first + torch.arange(num)
    column = torch.searchsorted(counted, index, right=True) - 1
    assert_same_bits(tiles.cpu(), torch.stack([index - counted[column], column]).int())


@pytest.mark.parametrize(
    ("shape", "num_passes", "num_pairs"),
    [((4, 8), 5, 2), ((8, 4), 6, 3), ((4, 7), 6, 0), ((7, 4), 6, 0), ((4, 40), 1, 0), ((1, 1), 5, 0)],
)
def test_passes_are_taken_in_pairs_if_one_side_is_twice_the_other(shape, num_passes, num_pairs) -> None:
    assert Polar(1, Iteration(*shape, QUINTIC, num_passes, EPS)).num_pairs == num_pairs


@pytest.mark.parametrize(
    ("num", "most", "together"),
    [(1, 100, 1), (7, 100, 7), (10, 100, 10), (11, 100, 6), (11, 99, 6), (19, 109, 10), (5, 9, 1), (3, 0, 1)],
)
def test_batches_of_matrices_are_as_large_as_allowed_and_of_equal_size(num, most, together) -> None:
    """Matrices of ten elements."""
    assert num_together(num, 10, most) == together
    assert together * 10 <= max(most, 10)


def test_an_iteration_has_the_options_of_the_direction() -> None:
    direction = Muon(ns_steps=3, ns_coefficients="polar-express", ns_eps=1e-5)
    iteration = Iteration.of(direction, 30, 20)
    assert iteration == Iteration(30, 20, COEFFICIENTS["polar-express"], 3, 1e-5)
