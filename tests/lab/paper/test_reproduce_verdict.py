"""Verdicts on margins with known answers."""

import math

import pytest

from merit_lab.paper.verdict import ClaimComparison, Outcome, Verdict, paired


def make_comparison(*margins: float) -> ClaimComparison:
    return ClaimComparison(label="", paper="", margins=margins)


@pytest.mark.parametrize(
    ("margins", "outcome"),
    [
        ((0.10, 0.11, 0.12), "held"),
        ((-0.10, -0.11, -0.12), "contradicted"),
        ((0.10, -0.11, 0.12), "undecided"),
        ((0.1,), "no test"),
        ((), "not run"),
        ((0.0, 0.0), "undecided"),
        ((1.0, 1.0, 1.0), "undecided"),  # no spread, so the sign test, for which three seeds are too few
        ((1.0, 1.0, 1.0, 1.0, 1.0), "held"),
        ((-1.0, -1.0, -1.0, -1.0, -1.0), "contradicted"),
        ((math.inf, 0.1, 0.1), "undecided"),  # three seeds are too few for the sign test
        ((math.inf, 0.1, 0.1, 0.1, 0.1), "held"),
        ((-math.inf, 0.1, 0.1, 0.1, 0.1), "undecided"),
        ((-math.inf, -0.1, -0.1, -0.1, -0.1), "contradicted"),
    ],
)
def test_outcomes(margins: tuple[float, ...], outcome: Outcome) -> None:
    assert make_comparison(*margins).outcome() == outcome


def test_the_paired_t_test_matches_the_textbook() -> None:
    comparison = make_comparison(1.0, 2.0, 3.0)  # mean 2, standard error 1 / sqrt(3)
    assert comparison.test == "paired t-test"
    t = 2 * math.sqrt(3)
    assert comparison.p_value == pytest.approx(
        0.5 - t / (2 * math.sqrt(2 + t**2))
    )  # with two degrees of freedom
    assert comparison.opposite_p_value == pytest.approx(1 - comparison.p_value)


def test_the_sign_test_counts_wins() -> None:
    comparison = make_comparison(math.inf, 1.0, 1.0, -1.0)
    assert comparison.test == "sign test"
    assert comparison.p_value == pytest.approx((4 + 1) / 16)


@pytest.mark.parametrize("margins", [(1.0, 1.0, 1.0), (0.3 - 0.2, 0.2 - 0.1, 0.1)])
def test_margins_equal_up_to_rounding_use_the_sign_test(margins: tuple[float, ...]) -> None:
    comparison = make_comparison(*margins)
    assert comparison.test == "sign test"
    assert comparison.p_value == 2**-3
    assert comparison.opposite_p_value == 1.0


def test_pairs_share_a_seed_and_a_diverged_run_is_worst() -> None:
    lower = {0: 1.0, 1: 1.0, 2: math.inf, 3: math.inf, 5: 1.0}
    higher = {0: 1.5, 1: math.inf, 2: 2.0, 3: math.inf, 4: 2.0}
    comparison = paired("", lower, higher)
    assert comparison.margins == (0.5, math.inf, -math.inf)  # seed 3 diverged in both
    assert "1 against a run that diverged" in comparison.ours
    assert "1 diverged" in comparison.ours
    assert paired("", {0: 1.0}, {0: 4.0}, relative=True).margins == (0.75,)


def test_both_runs_diverging_with_every_seed_is_reported() -> None:
    diverged = {0: math.inf, 1: math.inf}
    comparison = paired("", diverged, diverged)
    assert comparison.margins == ()
    assert comparison.judgement == "both diverged, with every seed"
    assert comparison.outcome() == "undecided"
    assert paired("", diverged, {}).judgement == "not run"
    assert paired("", diverged, {}).outcome() == "not run"


def test_one_seed_allows_no_test() -> None:
    assert make_comparison(0.1).judgement == "one seed, so no test is possible; it points the claimed way"
    assert "does not point" in make_comparison(-0.1).judgement


@pytest.mark.parametrize(
    ("kinds", "outcome"),
    [
        ([(0.10, 0.11, 0.12), (0.10, 0.11, 0.12)], "held"),
        ([(0.10, 0.11, 0.12), (0.10, -0.11, 0.12)], "undecided"),
        ([(0.10, -0.11, 0.12), (-0.10, -0.11, -0.12)], "contradicted"),
        ([(0.10, 0.11, 0.12), ()], "not run"),
        ([], "not run"),
    ],
)
def test_a_claim_is_as_good_as_its_worst_comparison(kinds: list[tuple[float, ...]], outcome: Outcome) -> None:
    verdict = Verdict(claim="", source="", comparisons=tuple(make_comparison(*kind) for kind in kinds))
    assert verdict.outcome == outcome


def test_contradicting_one_of_many_comparisons_needs_a_smaller_p_value() -> None:
    weak = (-0.10, -0.16, -0.22, -0.04)  # p is about 0.02
    assert make_comparison(*weak).outcome() == "contradicted"
    assert make_comparison(*weak).outcome(num_comparisons=10) == "undecided"


@pytest.mark.parametrize("spread", [1e-3, 1e-5, 1e-8])
def test_a_p_value_too_small_to_compute_is_given_as_a_bound(spread: float) -> None:
    """The tail is computed as 1 minus the rest, which leaves few digits and can even be negative."""
    margins = tuple(1 + spread * math.sin(place) for place in range(31))
    comparison = ClaimComparison(label="", paper="", margins=margins)
    assert comparison.p_value is not None
    assert comparison.p_value >= 0
    assert comparison.judgement == "31 seeds, paired t-test, p < 1e-12"
    opposite = ClaimComparison(label="", paper="", margins=tuple(-margin for margin in margins))
    assert opposite.judgement == "31 seeds, paired t-test, p < 1e-12 of the opposite"
