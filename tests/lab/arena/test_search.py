"""How a contestant is tuned: the points that are tried, their order, and the result."""

import math

import pytest

from merit_lab.arena.search import Point, Search, SearchAxis, search

LR, WARMUP = SearchAxis("lr", 2.0), SearchAxis("warmup", 2.0, most=0.5)


def bowl(*centre: float):
    """A loss with its minimum at the centre, measured in doublings."""
    return lambda point: sum(math.log2(x / c) ** 2 for x, c in zip(point.values, centre, strict=True))


def complete(
    start: Point, axes: list[SearchAxis], loss, budget: int
) -> tuple[Search, list[tuple[Point, ...]]]:
    """A complete search, and the points that it needed at each call."""
    known: dict[Point, float] = {}
    requests = []
    while (found := search(start, axes, known.get, budget)).missing:
        requests.append(found.missing)
        known |= {point: loss(point) for point in found.missing}
    return found, requests


def test_the_search_descends_until_the_best_value_lies_inside() -> None:
    found, requests = complete(Point((1.0,)), [LR], bowl(8.0), budget=10)
    values = [[point.values[0] for point in points] for points in requests]
    assert values == [[1.0, 2.0, 0.5], [4.0], [8.0], [16.0]]
    assert found.best == Point((8.0,))
    assert found.at_edge == ()


def test_a_repeated_search_takes_the_same_path() -> None:
    found, _ = complete(Point((1.0, 0.1)), [LR, WARMUP], bowl(2.0, 0.4), budget=12)
    assert found.best == Point((2.0, 0.4))
    losses = {point: bowl(2.0, 0.4)(point) for point in found.tried}
    assert search(Point((1.0, 0.1)), [LR, WARMUP], losses.get, 12) == found


@pytest.mark.parametrize("budget", range(1, 9))
def test_the_budget_is_not_exceeded(budget) -> None:
    found, _ = complete(Point((1.0, 0.1)), [LR, WARMUP], bowl(16.0, 0.4), budget)
    assert len(found.tried) == budget == len(set(found.tried))
    losses = {point: bowl(16.0, 0.4)(point) for point in found.tried}
    assert losses[found.best] == min(losses.values())
    assert "lr" in found.at_edge or budget > 6


def test_the_search_moves_to_lower_values_if_all_runs_diverge() -> None:
    found, _ = complete(
        Point((1.0,)), [LR], lambda point: 1.0 if point.values[0] < 0.2 else math.inf, budget=8
    )
    assert found.best.values[0] < 0.2


def test_a_setting_without_effect_is_not_changed() -> None:
    found, _ = complete(
        Point((1.0, 0.1)), [LR, WARMUP], lambda point: math.log2(point.values[0]) ** 2, budget=9
    )
    assert found.best == Point((1.0, 0.1))
    assert len(found.tried) == 5


def test_the_search_respects_the_largest_value_of_an_axis() -> None:
    found, _ = complete(Point((0.3,)), [WARMUP], lambda point: -point.values[0], budget=6)
    assert found.best == Point((0.3,))
    assert found.at_edge == ()


@pytest.mark.parametrize(("start", "smallest"), [(0.4, 0.1), (0.1, 0.1), (0.3, 0.15)])
def test_the_search_respects_the_smallest_value_of_an_axis(start: float, smallest: float) -> None:
    axis = SearchAxis("momentum", 2.0, least=0.1, most=1.0)
    found, _ = complete(Point((start,)), [axis], lambda point: point.values[0], budget=9)
    assert found.best == Point((smallest,))
    assert found.at_edge == ()


def test_a_budget_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="the budget is 0; a contestant needs at least one trial"):
        search(Point((1.0,)), [LR], lambda _: None, 0)
