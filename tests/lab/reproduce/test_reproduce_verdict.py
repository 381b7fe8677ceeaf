"""Verdicts on margins whose answer is known."""

import math

import pytest

from merit_lab.reproduce.verdict import Comparison, Outcome, Verdict, paired


def comparison(*margins: float) -> Comparison:
    return Comparison(what="", paper="", margins=margins)


@pytest.mark.parametrize(
    ("margins", "outcome"),
    [
        ((0.10, 0.11, 0.12), "held"),
        ((-0.10, -0.11, -0.12), "contradicted"),
        ((0.10, -0.11, 0.12), "undecided"),
        ((0.1,), "no test"),
        ((), "not run"),
        ((0.0, 0.0), "undecided"),
        ((1.0, 1.0, 1.0), "undecided"),  # without a spread the sign test judges, and three seeds are too few
        ((1.0, 1.0, 1.0, 1.0, 1.0), "held"),
        ((-1.0, -1.0, -1.0, -1.0, -1.0), "contradicted"),
        ((math.inf, 0.1, 0.1), "undecided"),  # three seeds are too few for the sign test
        ((math.inf, 0.1, 0.1, 0.1, 0.1), "held"),
        ((-math.inf, 0.1, 0.1, 0.1, 0.1), "undecided"),
        ((-math.inf, -0.1, -0.1, -0.1, -0.1), "contradicted"),
    ],
)
def test_outcomes(margins: tuple[float, ...], outcome: Outcome) -> None:
    assert comparison(*margins).outcome() == outcome


def test_the_paired_t_test_is_the_textbook_s() -> None:
    own = comparison(1.0, 2.0, 3.0)  # mean 2, standard error 1 / sqrt(3)
    assert own.test == "paired t-test"
    t = 2 * math.sqrt(3)
    assert own.chance == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t**2)))  # with two degrees of freedom
    assert own.chance_of_opposite == pytest.approx(1 - own.chance)


def test_the_sign_test_counts_wins() -> None:
    own = comparison(math.inf, 1.0, 1.0, -1.0)
    assert own.test == "sign test"
    assert own.chance == pytest.approx((4 + 1) / 16)


@pytest.mark.parametrize("margins", [(1.0, 1.0, 1.0), (0.3 - 0.2, 0.2 - 0.1, 0.1)])
def test_margins_that_are_the_same_but_for_rounding_are_signs_alone(margins: tuple[float, ...]) -> None:
    own = comparison(*margins)
    assert own.test == "sign test"
    assert own.chance == 2**-3
    assert own.chance_of_opposite == 1.0


def test_pairs_are_of_the_same_seed_and_a_run_that_diverged_is_the_worst() -> None:
    lower = {0: 1.0, 1: 1.0, 2: math.inf, 3: math.inf, 5: 1.0}
    higher = {0: 1.5, 1: math.inf, 2: 2.0, 3: math.inf, 4: 2.0}
    own = paired("", lower, higher)
    assert own.margins == (0.5, math.inf, -math.inf)  # seed 3 says nothing
    assert "1 against a run that diverged" in own.ours
    assert "1 diverged" in own.ours
    assert paired("", {0: 1.0}, {0: 4.0}, relative=True).margins == (0.75,)


def test_that_both_diverged_with_every_seed_is_said() -> None:
    diverged = {0: math.inf, 1: math.inf}
    own = paired("", diverged, diverged)
    assert own.margins == ()
    assert own.judgement == "both diverged, with every seed"
    assert own.outcome() == "undecided"
    assert paired("", diverged, {}).judgement == "not run"
    assert paired("", diverged, {}).outcome() == "not run"


def test_one_seed_says_that_no_test_is_possible() -> None:
    assert comparison(0.1).judgement == "one seed, so no test is possible; it points the claimed way"
    assert "does not point" in comparison(-0.1).judgement


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
    verdict = Verdict(claim="", source="", comparisons=tuple(comparison(*kind) for kind in kinds))
    assert verdict.outcome == outcome


def test_that_one_of_many_goes_the_other_way_needs_more() -> None:
    weak = (-0.10, -0.16, -0.22, -0.04)  # p is about 0.02
    assert comparison(*weak).outcome() == "contradicted"
    assert comparison(*weak).outcome(num_comparisons=10) == "undecided"


@pytest.mark.parametrize("spread", [1e-3, 1e-5, 1e-8])
def test_a_chance_below_what_can_be_computed_is_said_to_be_below(spread: float) -> None:
    """The tail is 1 less what is inside, of which few digits are left, and at times less than none."""
    margins = tuple(1 + spread * math.sin(place) for place in range(31))
    own = Comparison(what="", paper="", margins=margins)
    assert own.chance is not None
    assert own.chance >= 0
    assert own.judgement == "31 seeds, paired t-test, p < 1e-12"
    opposite = Comparison(what="", paper="", margins=tuple(-margin for margin in margins))
    assert opposite.judgement == "31 seeds, paired t-test, p < 1e-12 of the opposite"
