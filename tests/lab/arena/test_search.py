"""How a contestant is tuned: which points are tried, in which order, and what a search says at its end."""

import math

import pytest

from merit_lab.arena.search import Axis, Point, Search, search

LR, WARMUP = Axis("lr", 2.0), Axis("warmup", 2.0, most=0.5)


def bowl(*centre: float):
    """A loss with its minimum at the centre, measured in doublings."""
    return lambda point: sum(math.log2(x / c) ** 2 for x, c in zip(point.values, centre, strict=True))


def whole(start: Point, axes: list[Axis], loss, budget: int) -> tuple[Search, list[tuple[Point, ...]]]:
    """A search with everything that it asks for, and its questions."""
    known: dict[Point, float] = {}
    questions = []
    while (found := search(start, axes, known.get, budget)).asked:
        questions.append(found.asked)
        known |= {point: loss(point) for point in found.asked}
    return found, questions


def test_it_goes_downhill_until_the_best_lies_inside() -> None:
    found, questions = whole(Point((1.0,)), [LR], bowl(8.0), budget=10)
    asked = [[point.values[0] for point in points] for points in questions]
    assert asked == [[1.0, 2.0, 0.5], [4.0], [8.0], [16.0]]
    assert found.best == Point((8.0,))
    assert found.at_edge == ()


def test_a_search_that_is_asked_again_goes_the_same_way() -> None:
    found, _ = whole(Point((1.0, 0.1)), [LR, WARMUP], bowl(2.0, 0.4), budget=12)
    assert found.best == Point((2.0, 0.4))
    losses = {point: bowl(2.0, 0.4)(point) for point in found.tried}
    assert search(Point((1.0, 0.1)), [LR, WARMUP], losses.get, 12) == found


@pytest.mark.parametrize("budget", range(1, 9))
def test_no_more_than_the_budget_is_tried(budget) -> None:
    found, _ = whole(Point((1.0, 0.1)), [LR, WARMUP], bowl(16.0, 0.4), budget)
    assert len(found.tried) == budget == len(set(found.tried))
    losses = {point: bowl(16.0, 0.4)(point) for point in found.tried}
    assert losses[found.best] == min(losses.values())
    assert "lr" in found.at_edge or budget > 6


def test_where_everything_diverges_it_goes_to_lower_values() -> None:
    found, _ = whole(Point((1.0,)), [LR], lambda point: 1.0 if point.values[0] < 0.2 else math.inf, budget=8)
    assert found.best.values[0] < 0.2


def test_a_setting_that_makes_no_difference_is_left_alone() -> None:
    found, _ = whole(Point((1.0, 0.1)), [LR, WARMUP], lambda point: math.log2(point.values[0]) ** 2, budget=9)
    assert found.best == Point((1.0, 0.1))
    assert len(found.tried) == 5


def test_an_axis_ends_where_its_values_do() -> None:
    found, _ = whole(Point((0.3,)), [WARMUP], lambda point: -point.values[0], budget=6)
    assert found.best == Point((0.3,))
    assert found.at_edge == ()


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the budget is 0; a contestant needs at least one trial"):
        search(Point((1.0,)), [LR], lambda _: None, 0)
