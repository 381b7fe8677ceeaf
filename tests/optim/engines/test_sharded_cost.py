"""The cost model of a sharded step: its formulas checked by hand, and the table in the docs."""

import math
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import sharded_cost

    return sharded_cost


# sharded_behaviour.collectives checks on four ranks that a step sends these bytes.
@pytest.mark.parametrize(
    ("dims", "mesh", "expected"),
    [
        ([0], [4], [8 * (12 + 1)]),
        ([1], [4], [8 * (16 + 1)]),
        ([None, 0], [2, 4], [0, 8 * (12 + 1)]),
        ([0, 1], [2, 4], [8 * (3 + 1), 8 * (8 + 1)]),
        ([0, 0], [2, 4], [8 * (12 + 1), 8 * (12 + 1)]),
        ([0], [1], [0]),
    ],
)
def test_the_bytes_of_one_matrix(cost, dims, mesh, expected) -> None:
    assert cost.exchange_bytes([((16, 12), dims)], mesh) == expected


def test_the_bytes_of_vectors_and_of_ratios_for_whole_weights(cost) -> None:
    assert cost.exchange_bytes([((16,), [0])], [4]) == [8]
    assert cost.exchange_bytes([((16, 12), [0])], [4], element_wise=False) == [8]
    assert cost.exchange_bytes([((16, 12), [0])], [4], element_wise=False, is_sum=True) == [16]


def test_an_all_reduce_takes_the_faster_of_ring_and_tree(cost) -> None:
    network = cost.Network(efficiency=1.0)
    # A large message within a node: the bandwidth of a ring, 2 (n - 1) / n messages.
    large = network.all_reduce_seconds(9 * 10**9, 8, 8)
    assert large == pytest.approx(2 * 7 / 8 * 9e9 / 450e9, rel=0.01)
    # A small one on many nodes: the latency of a tree.
    small = network.all_reduce_seconds(8, 1024, 8)
    assert small == pytest.approx(14e-6 + 2 * (7 * 1.25e-6 + math.log2(128) * 8.5e-6), rel=0.01)
    assert network.all_reduce_seconds(8, 1, 8) == network.all_reduce_seconds(0, 8, 8) == 0.0


def test_the_docs_show_the_numbers_of_the_cost_model(cost, capsys) -> None:
    cost.main()
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    times: dict[tuple[str, str], list[str]] = {}
    last: dict[tuple[str, str], tuple[str, str]] = {}
    for model, _, layout, megabytes, milliseconds, share in lines:
        times.setdefault((model, layout), []).append(milliseconds)
        last[model, layout] = megabytes, share
    docs = (ROOT / "docs" / "sharding-cost.md").read_text()
    shown = 0
    for (model, layout), cells in times.items():
        if "HSDP" in layout:
            assert set(cells) == {times[model, "FSDP2"][0]}, "the docs say: the time of 64 GPUs"
            continue
        megabytes, share = last[model, layout]
        assert f"| {model} | {layout} | {megabytes} | {' | '.join(cells)} | {share} |" in docs
        shown += 1
    assert shown == 6
