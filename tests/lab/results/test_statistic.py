"""The one statistic."""

import itertools
import math

import numpy as np
import polars as pl
import pytest
from scipy import stats

from merit_lab.results.statistic import by_seed, differences, paired, simultaneous

NAN, INF = math.nan, math.inf


def values(*losses: float) -> dict[int, float]:
    return dict(enumerate(losses))


def test_the_interval_is_that_of_students_paired_test() -> None:
    first, second = np.random.default_rng(1).normal(3, 0.1, (2, 6))
    ours = paired(values(*first), values(*second))
    theirs = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs))
    assert ours.mean == pytest.approx(float(np.mean(first - second)))


def test_only_common_seeds_count_and_the_others_are_named() -> None:
    difference = paired({0: 3.0, 1: 3.1, 5: 9.0}, {0: 3.2, 1: 3.3, 7: 1.0})
    assert difference.seeds == (0, 1)
    assert difference.without_partner == (5, 7)
    assert difference.mean == pytest.approx(-0.2)
    assert "no pair at seeds 5 and 7" in difference.words()


@pytest.mark.parametrize(
    ("first", "second", "mean", "side"),
    [
        (values(3.0, 3.0), values(3.0, 3.0), 0.0, 0),
        (values(3.0, 3.1, 3.2), values(4.0, 4.1, 4.3), -1.0333333, -1),
        (values(4.0, 4.1, 4.3), values(3.0, 3.1, 3.2), 1.0333333, 1),
        (values(3.0, 3.5, 3.1), values(3.1, 3.4, 3.1), 0.0, 0),
        (values(3.0), values(4.0), -1.0, 0),  # one seed shows nothing
        ({}, values(4.0), NAN, 0),
        (values(3.0, 3.0), values(4.0, INF), -INF, 0),
        (values(3.0, NAN), values(4.0, 4.0), INF, 0),  # a loss that is no number has diverged too
        (values(3.0, INF), values(4.0, INF), NAN, 0),
    ],
)
def test_what_a_difference_allows_to_say(
    first: dict[int, float], second: dict[int, float], mean: float, side: int
) -> None:
    difference = paired(first, second)
    assert difference.mean == pytest.approx(mean, nan_ok=True)
    assert difference.side == side
    assert ("diverged" in difference.words()) == any(
        not math.isfinite(one) for one in (*first.values(), *second.values())
    )


@pytest.mark.parametrize(("num_series", "num_seeds"), [(2, 3), (4, 3), (6, 5)])
@pytest.mark.parametrize("scales", ["equal", "one is noisy"])
def test_all_intervals_hold_at_once_in_95_percent_of_studies(
    num_series: int, num_seeds: int, scales: str
) -> None:
    random, num_studies = np.random.default_rng(3), 600
    hold = 0
    for _ in range(num_studies):
        losses = random.normal(0, 0.1, (num_series, num_seeds)) + random.normal(0, 1, num_seeds)
        if scales != "equal":
            losses[0] += random.normal(0, 1, num_seeds)
        pairs = simultaneous({str(place): values(*row) for place, row in enumerate(losses)})
        hold += all(one.low <= 0 <= one.high for one in pairs.values())
    assert hold / num_studies > 0.93
    if scales == "equal":
        assert hold / num_studies < 0.97


def test_intervals_that_hold_at_once_are_wider_than_those_of_a_pair_alone() -> None:
    random = np.random.default_rng(4)
    all_values = {name: values(*random.normal(3, 0.1, 5)) for name in "abcd"}
    for (first, second), together in simultaneous(all_values).items():
        alone = paired(all_values[first], all_values[second])
        assert together.low < alone.low < alone.high < together.high
        assert together.mean == alone.mean <= 0  # the lower one is the first


def runs(**losses: list[float | None]) -> pl.DataFrame:
    rows = [
        {
            "run": f"{name}-{seed}",
            "status": "diverged" if loss == INF else "finished",
            "seed": seed,
            "last_step": 9,
            "optimizer.name": name,
            "validation_loss": None if loss == INF else loss,
        }
        for name, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def test_differences_of_a_frame_of_runs_are_those_of_all_pairs() -> None:
    of = runs(adamw=[3.5, 3.6, 3.7], merit=[3.0, 3.12, 3.2], maxlamb=[3.2, INF, 3.4], muon=[2.0, None, 2.1])
    assert by_seed(of)["settings that were not recorded", "MaxLAMB"] == {0: 3.2, 1: INF, 2: 3.4}
    assert by_seed(of)["settings that were not recorded", "Muon"] == {0: 2.0, 2: 2.1}
    table = differences(of)
    pairs = list(zip(table["first"], table["second"], strict=True))
    assert pairs == list(itertools.combinations(("Muon", "MERIT", "AdamW", "MaxLAMB"), 2))
    assert table.filter(second="MaxLAMB")["mean"].to_list()[1:] == [-INF, -INF]  # named, never dropped
    assert all("MaxLAMB diverged at seed 1" in words for words in table.filter(second="MaxLAMB")["words"][1:])
    assert table.filter(first="Muon")["seeds"].to_list() == [2, 2, 2]
