"""The cost model of Muon's direction on sharded weights: checked by hand, and the tables in the docs."""

from pathlib import Path
from types import ModuleType

import pytest

from merit_optim.optim.axes.directions import Muon

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import sharded_muon_cost

    return sharded_muon_cost


# sharded_matrices.collectives checks on four ranks that a step sends these bytes.
@pytest.mark.parametrize(
    ("dims", "mesh", "at", "expected"),
    [
        # Rows of 16 elements, 32 bytes each. The owner, the first, gets all 8 of them.
        ([0], [4], [0], {(0,): (64, 256, 256, 64)}),
        ([0], [4], [3], {(0,): (64, 0, 0, 64)}),
        ([None, 0], [2, 4], [1, 3], {(1,): (64, 0, 0, 64)}),
        ([0, 1], [2, 2], [0, 0], {(0, 1): (64, 256, 256, 64)}),
        ([0], [1], [0], {}),
        ([None], [4], [0], {}),
    ],
)
def test_the_bytes_of_one_matrix(cost, dims, mesh, at, expected) -> None:
    vector = (8,), [None if dim == 1 else dim for dim in dims]
    by_dims = cost.traffic([((8, 16), dims), vector], mesh, at)
    sizes = {over: (t.sent, t.received, t.sent_back, t.received_back) for over, t in by_dims.items()}
    assert sizes == expected


def test_normuon_sends_the_mean_squares_of_all_rows_to_every_rank(cost) -> None:
    (plain,), (with_rows,) = (
        cost.traffic([((8, 16), [0])], [4], [0], direction).values()
        for direction in (Muon(), Muon(neuron_beta=0.9))
    )
    assert with_rows.sent == plain.sent
    assert with_rows.sent_back - plain.sent_back == 4 * 8 * 4
    assert with_rows.received_back - plain.received_back == 8 * 4


def test_the_docs_show_the_numbers_of_the_cost_model(cost, capsys) -> None:
    cost.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    docs = (ROOT / "docs" / "sharding-cost.md").read_text()
    assert len(lines) == 2 + 4 + 2 + 8
    assert [line for line in lines if line not in docs] == []
