"""The tables that the kernels read: every element is in one tile, and every size has one place."""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton", reason="the fused engine's tables are laid out by its kernels")

from merit_optim.optim.engines.fused import layout
from merit_optim.optim.engines.fused.tables import KernelWeight, Tile, TileGrid, grid_of, weights_of
from merit_optim.optim.engines.plan import Slot, pieces, plan
from merit_optim.optim.matrices import matrices_of

CPU = torch.device("cpu")
SHAPES: list[tuple[int, ...]] = [
    (1, 1),
    (1, 70),
    (70, 1),
    (7, 13),
    (67, 5),
    (5, 131),
    (33, 67),
    (32, 64),
    (),
    (1,),
    (97,),
    (131,),
    (592,),
    (3, 4, 5),
    (3, 2, 5, 3),
    (2, 131),
]
TILES = [Tile(8, 64, 4, 2), Tile(8, 16, 1, 1), Tile(1, 1, 2, 1), Tile(2, 4, 1, 1)]
MATRIX_DIMS = [None, 1, 2]
PLACES = ["ROWS", "COLUMNS", "ROWS_AT", "COLUMNS_AT", "WHOLE_AT", "HAS_ROWS", "GROUP"]
FIELDS = [*PLACES, "TILES_AT", "NUM_TILES"]

every_tile = pytest.mark.parametrize(
    "tile", TILES, ids=lambda tile: f"{tile.rows * tile.steps}x{tile.columns}"
)
every_matrix_dims = pytest.mark.parametrize("matrix_dims", MATRIX_DIMS, ids=lambda n: f"matrix_dims={n}")


def slots_of(matrix_dims: int | None, element_wise: bool = True) -> list[Slot]:
    return list(plan(tuple((matrices_of(shape, matrix_dims), element_wise) for shape in SHAPES)).slots)


def all_weights(matrix_dims: int | None, element_wise: bool = True) -> list[KernelWeight]:
    slots = slots_of(matrix_dims, element_wise)
    return [w for i, slot in enumerate(slots) for w in weights_of(i, [slot], group=i % 2)]


def fields(grid: TileGrid, weight: int) -> dict[str, int]:
    row = grid.weights[weight].tolist()
    return {name: row[getattr(layout, name).value] for name in FIELDS}


def elements_of_program(grid: TileGrid, program: int) -> tuple[int, int, list[int]] | None:
    """A program's weight, tile and elements according to the tables; None if it is idle."""
    chunk = layout.CHUNK.value
    weight, first = grid.schedule[program // chunk].tolist()
    tile = first + program % chunk
    entry = fields(grid, weight)
    if tile >= entry["NUM_TILES"]:
        return None
    panels = math.ceil(entry["COLUMNS"] / grid.tile.columns)
    height = grid.tile.rows * grid.tile.steps
    first_row, first_column = tile // panels * height, tile % panels * grid.tile.columns
    rows = range(first_row, min(first_row + height, entry["ROWS"]))
    columns = range(first_column, min(first_column + grid.tile.columns, entry["COLUMNS"]))
    return weight, tile, [r * entry["COLUMNS"] + c for r in rows for c in columns]


@every_tile
@every_matrix_dims
def test_every_element_is_in_exactly_one_tile(tile, matrix_dims) -> None:
    weights = all_weights(matrix_dims)
    grid = grid_of(weights, tile, CPU)
    seen = [torch.zeros(math.prod(shape), dtype=torch.int64) for shape in SHAPES]
    tiles: list[tuple[int, int]] = []
    for program in range(grid.num_programs):
        if (work := elements_of_program(grid, program)) is not None:
            weight, number, elements = work
            assert elements  # no other program is idle
            tiles.append((weight, number))
            seen[weights[weight].item][weights[weight].offset + torch.tensor(elements)] += 1
    assert all((times == 1).all() for times in seen)
    assert len(set(tiles)) == len(tiles) == sum(grid.num_tiles)


@pytest.mark.parametrize("size", [1, 2, 3, 97, 128, 129, 131, 144, 592, 768, 1600, 2**24, 16 * 1009])
def test_a_vector_is_folded_into_rows_that_hold_it_exactly(size) -> None:
    (slot,) = plan(((matrices_of((size,)), True),)).slots
    (weight,) = weights_of(0, [slot], 0)
    assert weight.rows * weight.columns == size
    assert weight.columns <= 128
    assert not weight.has_rows
    if size % 16 == 0:
        assert weight.columns % 16 == 0


@every_matrix_dims
@pytest.mark.parametrize("element_wise", [True, False])
def test_no_two_sizes_share_a_place_in_the_buffer(matrix_dims, element_wise) -> None:
    """And all places are used."""
    layout = plan(tuple((matrices_of(shape, matrix_dims), element_wise) for shape in SHAPES))
    places: list[int] = []
    for i, slot in enumerate(layout.slots):
        for w in weights_of(i, [slot], 0):
            assert w.has_rows == (element_wise and not slot.matrices.is_vector)
            if w.has_rows:
                places += range(w.rows_at, w.rows_at + w.rows)
                places += range(w.columns_at, w.columns_at + w.columns)
            places.append(w.whole_at)
    assert sorted(places) == list(range(layout.length))


@every_matrix_dims
@pytest.mark.parametrize("max_elements", [1, 7, 20, 64, 10**6])
def test_the_pieces_of_a_weight_cover_it_once(matrix_dims, max_elements) -> None:
    for shape in SHAPES:
        matrices = matrices_of(shape, matrix_dims)
        seen = torch.zeros(matrices.shape, dtype=torch.int64)
        for piece in pieces(matrices, max_elements):
            block = seen[piece.matrices, piece.rows]
            block += 1
            assert block.numel() <= max(max_elements, matrices.columns)
        assert (seen == 1).all()


def test_a_large_weight_has_tiles_beyond_32_bits_of_elements() -> None:
    """50304 x 65536: offsets are exact although there are more than 2**31 elements."""
    (slot,) = plan(((matrices_of((50304, 65536)), True),)).slots
    (weight,) = weights_of(0, [slot], 0)
    grid = grid_of([weight], Tile(8, 64, 4, 2), CPU)
    assert grid.num_tiles == [1572 * 1024]
    assert grid.weights.dtype == torch.int64
    assert weight.rows * weight.columns > 2**31
    assert list(itertools.pairwise((weight.rows_at, weight.columns_at, weight.whole_at, slot.end))) == [
        (0, 50304),
        (50304, 115840),
        (115840, 115841),
    ]
