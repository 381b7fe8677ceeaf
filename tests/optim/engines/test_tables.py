"""The tables that the kernels read: every element is in one tile, and every size has one place."""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton", reason="the fused engine's tables are laid out by its kernels")

from merit_optim.optim.engines.fused import layout
from merit_optim.optim.engines.fused.tables import KernelWeight, Tile, TileGrid, grid_of, weights_of
from merit_optim.optim.engines.plan import Slot, pieces, plan
from merit_optim.optim.matrices import Matrices, matrices_of

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


@every_tile
def test_a_chunk_has_tiles_of_only_one_weight(tile) -> None:
    grid = grid_of(all_weights(None), tile, CPU)
    chunk = layout.CHUNK.value
    assert grid.num_programs == chunk * len(grid.schedule)
    chunks_of = [[first for i, first in grid.schedule.tolist() if i == w] for w in range(len(grid.num_tiles))]
    for firsts, num in zip(chunks_of, grid.num_tiles, strict=True):
        assert firsts == list(range(0, num, chunk))
        assert 0 <= len(firsts) * chunk - num < chunk  # only the last chunk is padded


@every_tile
def test_each_tile_of_a_launch_has_a_unique_number(tile) -> None:
    """It is the index of the tile's sums and statistics."""
    grid = grid_of(all_weights(2), tile, CPU)
    numbers = [fields(grid, i)["TILES_AT"] + t for i, num in enumerate(grid.num_tiles) for t in range(num)]
    assert numbers == list(range(sum(grid.num_tiles)))
    assert [fields(grid, i)["NUM_TILES"] for i in range(len(grid.num_tiles))] == grid.num_tiles


def test_the_table_has_the_fields_of_the_weights() -> None:
    weights = all_weights(2)
    grid = grid_of(weights, TILES[0], CPU)
    assert grid.weights.shape == (len(weights), layout.NUM_FIELDS.value)
    for i, w in enumerate(weights):
        entry = fields(grid, i)
        places = [w.rows, w.columns, w.rows_at, w.columns_at, w.whole_at, int(w.has_rows), w.group]
        assert [entry[name] for name in PLACES] == places


@pytest.mark.parametrize("size", [1, 2, 3, 97, 128, 129, 131, 144, 592, 768, 1600, 2**24, 16 * 1009])
def test_a_vector_is_folded_into_rows_that_hold_it_exactly(size) -> None:
    (slot,) = plan(((matrices_of((size,)), True),)).slots
    (weight,) = weights_of(0, [slot], 0)
    assert weight.rows * weight.columns == size
    assert weight.columns <= 128
    assert not weight.has_rows
    if size % 16 == 0:
        assert weight.columns % 16 == 0


def test_a_vector_of_ordinary_width_fills_a_tile() -> None:
    for size in (768, 1024, 1280, 4096):
        (slot,) = plan(((matrices_of((size,)), True),)).slots
        assert weights_of(0, [slot], 0)[0].columns == 128


def test_stacked_matrices_follow_one_another() -> None:
    slot = Slot(Matrices(3, 4, 5, is_vector=False), has_rows=True, start=7)
    weights = weights_of(2, [slot], group=1)
    assert [w.offset for w in weights] == [0, 20, 40]
    assert [w.rows_at for w in weights] == [7, 11, 15]
    assert [w.columns_at for w in weights] == [19, 24, 29]
    assert [w.whole_at for w in weights] == [34, 35, 36]
    assert all((w.item, w.group, w.rows, w.columns) == (2, 1, 4, 5) for w in weights)


@pytest.mark.parametrize("lengths", [(2, 1, 3), (0, 4, 2), (5, 0, 1)], ids=str)
def test_the_matrices_that_rows_are_split_into_follow_one_another(lengths) -> None:
    """All of a stacked matrix, then all of the next. The first one with rows represents the parameter."""
    parts = tuple((Matrices(2, rows, 5, is_vector=False), True) for rows in lengths)
    weights = weights_of(3, plan(parts).slots, group=0)
    assert [(w.part, w.rows) for w in weights] == list(enumerate(lengths)) * 2
    elements = [w.offset + i for w in weights for i in range(w.rows * w.columns)]
    assert elements == list(range(2 * sum(lengths) * 5))
    assert [w.part for w in weights if w.is_first] == [0 if lengths[0] else 1]


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
def test_the_kernels_and_the_eager_engine_agree_on_the_places(matrix_dims) -> None:
    """A slot's views of the buffer are the places of its weights' sizes."""
    slots = slots_of(matrix_dims)
    buffer = torch.arange(slots[-1].end)
    for slot in slots:
        sizes = slot.view(buffer)
        for n, w in enumerate(weights_of(0, [slot], 0)):
            assert sizes.whole_N[n] == w.whole_at
            if sizes.rows_NR is not None and sizes.columns_NC is not None:
                assert sizes.rows_NR[n].tolist() == list(range(w.rows_at, w.rows_at + w.rows))
                assert sizes.columns_NC[n].tolist() == list(range(w.columns_at, w.columns_at + w.columns))


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


def test_a_launch_gets_every_option_of_a_tile() -> None:
    options = Tile(8, 64, 4, 2, max_registers=96).launch_options
    launched = {k: options[k] for k in ("BLOCK_R", "BLOCK_C", "STEPS", "num_warps", "maxnreg")}
    assert launched == {"BLOCK_R": 8, "BLOCK_C": 64, "STEPS": 4, "num_warps": 2, "maxnreg": 96}


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
