"""Outcomes of runs, as numbers and as sentences."""

from pathlib import Path

import pytest
from fake_runs import BATCH, CONTEXT, write_run
from scipy import stats

from merit_lab.results import find_runs, group, read_outcomes, summarise
from merit_lab.results.old_series import Series
from merit_lab.results.outcome import (
    RunOutcome,
    SeriesOutcome,
    deciding_seeds,
    fewest_seeds,
    interval_of_difference,
    p_value_of_difference,
    smallest_p_value,
)
from merit_lab.results.tables import describe_runs, run_table, series_table
from merit_lab.runs import MetricsWriter


def outcome(
    label: str, *losses: float | None, logit: float = 10.0, status: str = "finished"
) -> SeriesOutcome:
    runs = tuple(
        RunOutcome(
            name=f"{label}-{seed}",
            seed=seed,
            status=status,
            step=100,
            tokens=6400,
            seconds=60.0,
            validation_loss=loss,
            training_loss=loss,
            final_logit=logit,
            largest_logit=logit,
            tokens_per_second=1000.0,
            message="",
        )
        for seed, loss in enumerate(losses)
    )
    return SeriesOutcome(Series(label, label.lower(), 0.01, ()), runs)


def test_one_seed_each_may_be_chance() -> None:
    sentence = summarise([outcome("LAMB", 2.281, logit=35), outcome("MERIT", 2.271, logit=12.44)])
    assert sentence == (
        "At the end MERIT had the lowest validation loss, 2.271 (0.010 below LAMB; one seed each, so the "
        "difference may be chance; a test needs at least 4 seeds each); the largest attention logit was then "
        "12.4 with MERIT and 35.0 with LAMB."
    )


def test_any_series_can_win() -> None:
    sentence = summarise([outcome("AdamW", 2.0), outcome("LAMB", 3.0), outcome("MERIT", 4.0)])
    assert sentence.startswith(
        "At the end AdamW had the lowest validation loss, 2.000 (1.000 below LAMB and 2.0"
    )
    assert "the difference between AdamW and LAMB may be chance" in sentence


def test_a_tie_is_not_a_win() -> None:
    sentence = summarise([outcome("AdamW", 2.0), outcome("LAMB", 2.0), outcome("MERIT", 4.0)])
    assert "2.000 (the same as LAMB and 2.000 below MERIT; one seed each" in sentence


def test_three_seeds_are_too_few_and_four_can_be_enough() -> None:
    three = summarise([outcome("LAMB", 3.0, 3.1, 3.2), outcome("MERIT", 2.0, 2.1, 2.2)])
    assert (
        "(1.000 below LAMB; 3 seeds each, p = 0.1 in a permutation test, the smallest possible with "
        "3 seeds each; 95% interval of that difference 0.773 to 1.227; 4 seeds each would decide if "
        "difference and spread stay the same);"
    ) in three
    assert "chance" not in three
    four = summarise([outcome("LAMB", 3.0, 3.1, 3.2, 3.3), outcome("MERIT", 2.0, 2.1, 2.2, 2.3)])
    assert (
        "(1.000 below LAMB; 4 seeds each, p = 0.029 in a permutation test; 95% interval of that difference "
        "0.777 to 1.223);"
    ) in four


def test_overlapping_losses_may_be_chance_and_deciding_seeds_are_given() -> None:
    lower, higher = (2.0, 2.2, 2.4), (2.1, 2.3, 2.5)
    sentence = summarise([outcome("LAMB", *higher), outcome("MERIT", *lower)])
    assert (
        "3 seeds each, p = 0.7 in a permutation test, so that difference may be chance; 95% interval of that "
        "difference -0.353 to 0.553; 63 seeds each would decide if difference and spread stay the "
        "same)"
    ) in sentence
    nearly = summarise([outcome("LAMB", *higher), outcome("MERIT", 2.29, 2.3, 2.3)])
    assert "; more than 100 seeds each would decide" in nearly
    alike = summarise([outcome("LAMB", *higher), outcome("MERIT", *higher)])
    assert "p = 1 in a permutation test, so that difference may be chance; 95% interval of that diff" in alike
    assert "would decide" not in alike, "there is nothing to decide"


def test_deciding_seeds_are_more_than_there_are() -> None:
    lower, higher = [2.0, 2.1], [5.0, 5.1]
    assert deciding_seeds(lower, higher, 0.05) == fewest_seeds(0.05) == 4
    assert deciding_seeds(lower * 4, higher * 3, 0.05) == 9


def test_seeds_without_any_spread_have_no_interval() -> None:
    sentence = summarise([outcome("LAMB", 3.0, 3.0, 3.0), outcome("MERIT", 2.0, 2.0, 2.0)])
    assert (
        "3 seeds each, p = 0.1 in a permutation test, the smallest possible with 3 seeds each; 4 se"
        in sentence
    )


def test_the_interval_is_that_of_welch() -> None:
    first, second = [2.0, 2.1, 2.3, 2.2], [2.6, 2.5, 3.1]
    theirs = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    assert interval_of_difference(first, second) == pytest.approx((theirs.low, theirs.high))
    assert interval_of_difference(first, [2.0]) is None


@pytest.mark.parametrize(("num_first", "num_second"), [(2, 2), (3, 3), (4, 4), (2, 5)])
def test_groups_that_do_not_overlap_give_the_smallest_p_value(num_first: int, num_second: int) -> None:
    first = [1.0 + place / 100 for place in range(num_first)]
    second = [2.0 + place / 100 for place in range(num_second)]
    assert p_value_of_difference(first, second) == pytest.approx(smallest_p_value(num_first, num_second))


def test_failed_runs_are_reported_and_not_averaged() -> None:
    lost = outcome("AdamW", 9.0, status="diverged")
    assert summarise([lost, outcome("MERIT", 2.0)]) == (
        "MERIT ended at a validation loss of 2.000 (one seed); the largest attention logit was then 10.0 "
        "with MERIT; AdamW diverged (at step 100)."
    )
    assert summarise([lost]) == "No run finished with a validation loss; AdamW diverged (at step 100)."


def test_runs_of_different_lengths_are_not_ranked(tmp_path: Path) -> None:
    write_run(tmp_path, "lamb", num_steps=50)
    write_run(tmp_path, "merit", num_steps=100)
    first, of_lamb, of_merit = summarise(read_outcomes(group(find_runs([tmp_path])))).splitlines()
    assert first == (
        "These runs form 2 groups, which cannot be ranked against each other: they differ in length (819k "
        "tokens and 1.64M tokens)."
    )
    assert of_lamb.startswith("tiny, 819k tokens: LAMB ended at a validation loss of ")
    assert of_merit.startswith("tiny, 1.64M tokens: MERIT ended at a validation loss of ")


def test_series_with_the_same_label_are_all_ranked() -> None:
    sentence = summarise([outcome("Mine", 2.0), outcome("Mine", 3.0)])
    assert sentence.startswith("At the end Mine had the lowest validation loss, 2.000 (1.000 below Mine;")


def test_the_exact_test_counts_relabellings() -> None:
    assert p_value_of_difference([1.0, 2.0], [3.0, 4.0]) == pytest.approx(2 / 6)
    assert p_value_of_difference([1.0, 4.0], [2.0, 3.0]) == 1.0
    assert p_value_of_difference([1.0], [3.0, 4.0]) is None


def test_too_many_relabellings_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    lower, higher = [2 + seed / 100 for seed in range(12)], [3 + seed / 100 for seed in range(12)]
    p_value = p_value_of_difference(lower, higher)
    assert p_value is not None
    assert 0 < p_value < 1e-3
    sentence = summarise([outcome("LAMB", *higher), outcome("MERIT", *lower)])
    assert "12 seeds each, p = 5e-05 in a permutation test; 95% interval" in sentence
    few = [1.0, 2.0, 3.5, 1.5, 2.5], [2.0, 3.0, 4.5, 2.2, 2.9]
    exact = p_value_of_difference(*few)
    monkeypatch.setattr("merit_lab.results.outcome._MAX_RELABELLINGS", 200)
    assert p_value_of_difference(*few) == pytest.approx(exact, abs=0.05)


def test_a_run_whose_last_validation_loss_is_nan_diverged(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "merit", end=None)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write({"kind": "validation", "step": 105, "tokens": 0, "loss": float("nan")})
        metrics.write({"kind": "event", "step": 105, "what": "finished", "message": "all steps are done"})
    (merit,) = read_outcomes(group(find_runs([tmp_path])))
    assert (merit.finished, merit.unfinished) == ((), ())
    assert merit.diverged[0].message == "the last validation loss is nan"
    assert summarise([merit]) == "No run finished with a validation loss; MERIT diverged (at step 105)."


def test_a_run_without_validation_has_still_finished() -> None:
    lost = outcome("MERIT", None)
    assert describe_runs(lost) == "1 finished without validation"
    assert summarise([lost]) == (
        "No run finished with a validation loss; MERIT finished without validation and is not counted."
    )


def test_outcomes_of_real_run_directories(three_seeds: Path) -> None:
    adamw, lamb, merit = read_outcomes(group(find_runs([three_seeds])))
    assert [describe_runs(series) for series in (adamw, lamb, merit)] == [
        "2 finished, 1 diverged",
        "2 finished, 1 unfinished",
        "3 finished",
    ]
    loss = merit.spread("validation_loss")
    assert loss is not None
    assert len(loss.values) == 3
    assert loss.mean == pytest.approx(2.33, abs=0.05)
    # The table of runs has the last finite values of the run that diverged, and the reason.
    assert adamw.diverged[0].validation_loss is not None
    assert adamw.diverged[0].message == "the loss was nan at step 60"


def test_the_last_and_largest_logit_and_the_median_speed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "merit", end=None)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write({"kind": "train", "step": 105, "tokens": 9, "loss": 2.0, "tokens_per_second": 1.0})
        metrics.write({"kind": "attention", "step": 105, "max_logits": [[0.25, 0.5]], "entropy": None})
        metrics.write({"kind": "event", "step": 105, "what": "finished", "message": ""})
    (merit,) = read_outcomes(group(find_runs([tmp_path])))
    (run,) = merit.finished
    assert run.final_logit == 0.5
    assert run.largest_logit is not None
    assert run.largest_logit > 5
    # The median ignores one slow step.
    assert run.tokens_per_second == pytest.approx(BATCH * CONTEXT / 0.3, abs=1000)


def test_a_summary_of_many_series_stays_short() -> None:
    six = [outcome(f"S{number}", 2.0 + number / 10, logit=10.0 + number) for number in range(6)]
    assert "0.500 below S5; " in summarise(six)
    assert "10.0 with S0, 11.0 with S1" in summarise(six)
    sentence = summarise([*six, outcome("S6", 2.6, logit=16)])
    assert "0.100 below S1, 0.200 below S2, 0.300 below S3 and below 3 more; " in sentence
    assert "the largest attention logit was then between 10.0 with S0 and 16.0 with S6." in sentence


def test_a_summary_of_series_with_long_names_stays_short() -> None:
    names = [f"MuonMERIT, lr 0.0{number}, warmup 0.1, options rest_lr=0.006" for number in range(4)]
    four = [outcome(name, 2.0 + place / 10, logit=10.0 + place) for place, name in enumerate(names)]
    sentence = summarise(four)
    assert f"At the end {names[0]} had" in sentence
    assert (
        f"(0.100 below {names[1]} and below 2 more; one seed each, so the difference between the first two"
        in sentence
    )
    assert f"then between 10.0 with {names[0]} and 13.0 with {names[3]}." in sentence
    two = summarise(four[:2])
    assert f"(0.100 below {names[1]}; one seed each, so the difference may be chance" in two
    assert f"then 10.0 with {names[0]} and 11.0 with {names[1]}." in two


def test_the_spread_is_the_sample_standard_deviation() -> None:
    loss = outcome("MERIT", 2.0, 2.5, 3.0).spread("validation_loss")
    assert loss is not None
    assert (loss.mean, loss.deviation) == (2.5, 0.5)


def test_tables_show_the_spread_and_every_run(three_seeds: Path) -> None:
    outcomes = read_outcomes(group(find_runs([three_seeds])))
    table = series_table(outcomes)
    assert {len(row) for row in table.rows} == {len(table.head)}
    loss = table.rows[2][table.head.index("Validation loss")]
    mean, deviation = map(float, loss.split(" ± "))
    assert mean == pytest.approx(2.33, abs=0.05)
    assert 0 < deviation < 0.1
    runs = run_table(outcomes)
    assert {len(row) for row in runs.rows} == {len(runs.head)}
    assert [row[2] for row in runs.rows].count("finished") == 7
    assert "diverged: the loss was nan at step 60" in [row[2] for row in runs.rows]
