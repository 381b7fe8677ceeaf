"""Claims of entries on runs with known answers."""

import dataclasses
import math

import pytest
from fake import LAYERS, fake, line, logits, loss, noise, outcomes, table_of, updates, verdicts
from toy_scale import make_scale

from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.paper.artefact import Artefact
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.plan import Planned
from merit_lab.paper.scales import Scale

PAPERS_ORDER = {"MERIT": 3.2, "MaxLAMB": 3.3, "LAMB": 3.35, "AdamW": 3.5, "SophiaG": 3.6, "Lion": 3.7}
VARIANTS = ("One ratio for embeddings", "Ratios by head", "Smoothed ratios", "MERIT, Euclidean norms")
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"


@pytest.mark.parametrize("name", ["fig4", "fig6", "table3", "fig9", "reference", "variants", "norm"])
def test_losses_in_the_papers_order_hold_and_upside_down_they_do_not(name: str, toy: Scale) -> None:
    ablations = {f"MERIT without {part}": 3.3 for part in ("clip", "weight-wise bound", "element-wise ratio")}
    values = {**PAPERS_ORDER, **ablations, **dict.fromkeys(VARIANTS, 3.1)}
    assert set(outcomes(name, fake(name, toy, loss(values)))) == {HOLDS}
    mirrored = {series: 7 - value for series, value in values.items()}
    assert FAILS in outcomes(name, fake(name, toy, loss(mirrored, 3.6)))


@pytest.mark.parametrize(
    ("gaps", "outcome"),
    [
        ((-0.10, -0.11, -0.12), HOLDS),
        ((0.10, 0.11, 0.12), FAILS),
        ((-0.10, 0.11, -0.12), OPEN),
        ((-0.1,), OPEN),  # one seed has no interval
        ((-0.1, -0.1, -0.1), OPEN),  # equal differences have no spread
    ],
)
def test_the_interval_of_the_paired_difference_decides(
    gaps: tuple[float, ...], outcome: str, toy: Scale
) -> None:
    def measure(one: Planned) -> dict[str, float]:
        shift = gaps[one.config.seed] if one.series == "MERIT" else 0.0
        return {"validation_loss": 4 + shift + one.config.seed}

    data = fake("fig6", toy, measure, seeds=len(gaps))
    (verdict,) = verdicts("fig6", data)
    assert {one.outcome for one in verdict.comparisons} == {outcome}
    words = verdict.comparisons[0].words
    assert ("one seed: no interval" in words) == (len(gaps) == 1)
    assert ("no interval" in words or "spread is not known" in words) == (len(set(gaps)) == 1)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in ("theorem1", "table2")])
def test_an_entry_whose_runs_all_diverged_is_not_decided(name: str, toy: Scale) -> None:
    artefact = Artefact(ENTRIES[name], toy, fake(name, toy, status=lambda _: "diverged"))
    assert artefact.page.summary == "Not decided."
    assert all(one.words != "not run" for verdict in artefact.verdicts for one in verdict.comparisons)


def test_a_run_that_diverged_is_named_and_a_missing_one_is_not_run(toy: Scale) -> None:
    def status(one: Planned) -> str | None:
        if one.series == "LAMB":
            return None
        return "diverged" if one.series == "MERIT" and one.config.seed == 1 else "finished"

    data = fake("fig6", toy, loss({"MERIT": 3.0}), status=status)
    adamw, lamb = verdicts("fig6", data)[0].comparisons
    assert (adamw.outcome, lamb.outcome) == (OPEN, "not run")
    assert "MERIT at seed 1" in adamw.words
    rows = {row[1]: row for row in table_of("fig6", data).rows}
    assert "2 finished, 1 diverged" in rows["MERIT"]
    assert "3 missing" in rows["LAMB"]


def test_a_run_that_has_not_ended_does_not_count(toy: Scale) -> None:
    """It has only its first steps."""
    data = fake(
        "fig2",
        toy,
        steps=logits(lambda one: LAYERS * [{"AdamW": 1.0, "LAMB": 30.0, "MERIT": 20.0}[one.series]]),
        status=lambda one: "interrupted" if one.series == "AdamW" and one.config.seed else "finished",
    )
    (verdict,) = verdicts("fig2", data)
    assert [len(one.difference.seeds) for one in verdict.comparisons] == [1, 1, 3]


def test_every_model_is_judged_by_its_own_losses() -> None:
    scale = make_scale()
    names = ("GPT-2 small", "GPT-2 medium")
    first = dataclasses.replace(scale.gpt2[0], size="GPT-2 small")
    model = dataclasses.replace(first.model, layers=4)
    scale = dataclasses.replace(
        scale, gpt2=(first, dataclasses.replace(first, size="GPT-2 medium", model=model))
    )
    better = {"GPT-2 small": 3.2, "GPT-2 medium": 3.9}

    def measure(one: Planned) -> dict[str, float]:
        final = better[one.model] if one.series == "MERIT" else PAPERS_ORDER[one.series]
        return {"validation_loss": final + noise(one)}

    data = fake("fig4", scale, measure)
    (verdict,) = verdicts("fig4", data)
    by_model = {
        name: {one.outcome for one in verdict.comparisons if one.what.startswith(name)} for name in names
    }
    assert by_model["GPT-2 small"] == {HOLDS}
    assert FAILS in by_model["GPT-2 medium"]
    assert verdict.comparisons[0].paper == "3.280 against 3.470"
    assert table_of("fig4", data).rows[2][4] == "3.28"


@pytest.mark.parametrize(("middle", "outcome"), [(5.0, HOLDS), (30.0, FAILS)])
@pytest.mark.parametrize("name", ["fig2", "fig14"])
def test_logits(name: str, middle: float, outcome: str, toy: Scale) -> None:
    ends = {"AdamW": [50.0, 40.0, 3.0], "LAMB": [10.0, 20.0, 3.0], "MERIT": [9.0, middle, 4.0]}
    assert outcomes(name, fake(name, toy, steps=logits(lambda one: ends[one.series]))) == [outcome]


@pytest.mark.parametrize(
    ("gain", "at_best", "adamw", "expected"),
    [
        (0.3, 0.1, 3.5, [HOLDS, HOLDS, HOLDS]),
        (-0.3, 0.1, 3.5, [FAILS, HOLDS, HOLDS]),
        (0.3, -0.1, 3.5, [HOLDS, FAILS, HOLDS]),
        (0.3, 0.1, 2.5, [HOLDS, HOLDS, FAILS]),
    ],
)
def test_a_longer_warm_up(gain: float, at_best: float, adamw: float, expected: list[str], toy: Scale) -> None:
    """It gains ``gain`` at twice the rate, where all are half a nat worse, and ``at_best`` at the best."""

    def measure(one: Planned) -> dict[str, float]:
        is_long = "warm-up" in one.series
        final = {1.0: 3.0, 2.0: 3.5, 4.0: 6.0}[one.factor]
        final -= is_long * (gain if one.factor == 2 else at_best)
        if one.series.startswith("LAMB"):
            final = 3.8
        if one.series.startswith("AdamW"):
            final = adamw if is_long and one.factor == 2 else 4.0
        return {"validation_loss": final + noise(one)}

    assert outcomes("warmup", fake("warmup", toy, measure)) == expected


def test_twice_the_batch_is_judged_at_the_middle_rate_with_all_seeds(toy: Scale) -> None:
    def measure(one: Planned) -> dict[str, float]:
        cost = 0.4 + noise(one) if one.part == "twice the batch" else 0.0
        return {"validation_loss": PAPERS_ORDER[one.series] + cost + noise(one) - 2 * (one.factor != 1)}

    data = fake("doubled", toy, measure)
    assert outcomes("doubled", data) == [HOLDS, HOLDS]
    (order, price) = verdicts("doubled", data)
    assert {len(one.difference.seeds) for one in (*order.comparisons, *price.comparisons)} == {3}
    grid = [row for row in table_of("doubled", data).rows if row[1] == "LAMB"]
    assert [row[3] for row in grid] == ["3 finished", "1 finished", "3 finished", "1 finished"]
    assert any("edge of the grid" in row[4] for row in grid)


def test_known_scaling(toy: Scale) -> None:
    """MERIT scales ideally; the others need more steps with the largest batch; one run diverged."""
    final = {4: dict.fromkeys(PAPERS_ORDER, 3.0), 8: {"MERIT": 3.0, "LAMB": 3.4, "AdamW": 3.5}}

    def end(one: Planned) -> float:
        return final[one.config.batch][one.series]

    def measure(one: Planned) -> dict[str, float]:
        return {"validation_loss": end(one) + noise(one)}

    data = fake("fig1", toy, measure, line(end), seeds=5)
    assert outcomes("fig1", data) == [HOLDS, HOLDS]
    shares = [ENTRIES["fig1"].claims[1].pairs[0].upper.values(data)]
    assert shares[0] == pytest.approx(dict.fromkeys(range(5), 1.0), rel=1e-6)
    assert not any("not reached" in cell for row in table_of("fig1", data).rows for cell in row)
    lost = fake(
        "fig1", toy, measure, line(end), status=lambda one: "diverged" if noise(one) < 1e-3 else "finished"
    )
    assert lost.runs["target"][0] < 3.6, "the target is that of the runs that ended"


def test_best_rates_inside_their_grids_are_compared(toy: Scale) -> None:
    def best_at(factors: dict[str, float]):  # type: ignore[no-untyped-def]
        return lambda one: {"validation_loss": 3 + abs(math.log2(one.factor / factors.get(one.series, 1.0)))}

    (inside,) = verdicts("table4", fake("table4", toy, best_at({}), seeds=5))
    assert [one.difference.mean for one in inside.comparisons] == pytest.approx([-1.0] * 3)
    assert inside.outcome == OPEN, "equal differences have no spread"
    edge = fake("table4", toy, best_at({"LAMB": 2.0}), seeds=5)
    lamb, merit, _ = verdicts("table4", edge)[0].comparisons
    assert (lamb.difference.seeds, len(merit.difference.seeds)) == ((), 5)
    assert "no seed has its best rate inside its grid" in lamb.words


def test_a_rate_at_which_a_seed_diverged_is_not_the_best(toy: Scale) -> None:
    def status(one: Planned) -> str:
        lost = one.series == "MERIT" and one.factor == 2 and one.config.seed == 1
        return "diverged" if lost else "finished"

    data = fake("table4", toy, lambda one: {"validation_loss": 5 - one.factor}, status=status)
    remarks = [row[4] for row in table_of("table4", data).rows if row[1] == "MERIT"]
    assert remarks == ["", "best", ""]


@pytest.mark.parametrize(("factor", "outcome"), [(3.0, HOLDS), (0.5, FAILS)])
def test_how_far_a_step_goes_for_its_learning_rate(factor: float, outcome: str, toy: Scale) -> None:
    def steps(one: Planned) -> list[list[float]]:
        total, chosen = one.config.steps or 0, one.config.optimizer
        rates = [chosen.rate(step, total, chosen.lr or 0.0) for step in range(total)]
        firsts = (1.0 if one.series == "LAMB" else factor) + noise(one)
        return [LAYERS * [(firsts if step == 0 else 1.0) * rate] for step, rate in enumerate(rates)]

    assert outcomes("reach", fake("reach", toy, steps=updates("relative_change", steps))) == [outcome]


@pytest.mark.parametrize(("middle", "outcome"), [(0.4, HOLDS), (0.01, FAILS)])
def test_where_the_clip_acts(middle: float, outcome: str, toy: Scale) -> None:
    deep = dataclasses.replace(toy.gpt2[0], model=dataclasses.replace(toy.gpt2[0].model, layers=4))
    scale = dataclasses.replace(toy, gpt2=(deep,))

    def steps(one: Planned) -> list[list[float]]:
        ends = [0.1, middle * (1 + noise(one)), 0.9, 0.2]  # the third layer does not count
        return [[share * end for end in ends] for share in (0.5, 1.0, 0.1)]

    assert outcomes("fig13", fake("fig13", scale, steps=updates("clipped", steps))) == [outcome]


@pytest.mark.parametrize(("rises", "outcome"), [(True, HOLDS), (False, FAILS)])
def test_when_the_weight_wise_bound_decides(rises: bool, outcome: str, toy: Scale) -> None:
    def steps(one: Planned) -> list[list[float]]:
        levels = [(step if rises else 10 - step) / 10 for step in range(1, 10)]
        return [LAYERS * [level * (1 + noise(one))] for level in levels]

    data = fake("fig15", toy, steps=updates("bounded", steps))
    assert outcomes("fig15", data) == [outcome]
    first, last = (float(text.partition(" ")[0]) for text in table_of("fig15", data).rows[0][4:])
    assert [first, last] == pytest.approx([20.2, 80.8] if rises else [80.8, 20.2], abs=0.2), "matrices alone"


@pytest.mark.parametrize(("factor", "outcome"), [(1.005, HOLDS), (1.03, FAILS)])
def test_the_time_of_a_step(factor: float, outcome: str, toy: Scale) -> None:
    def measure(one: Planned) -> dict[str, float]:
        seconds = (factor if one.series == "MERIT" else 1.0) * (2 + 1e-3 * noise(one))
        return {"tokens_per_second": 8 * 16 / seconds}

    assert outcomes("table2", fake("table2", toy, measure)) == [outcome]


@pytest.mark.parametrize(
    ("name", "merit", "outcome"),
    [
        *(("fig5", 20.0, HOLDS), ("fig5", 40.0, FAILS), ("fig12", 0.6, HOLDS), ("fig12", 0.4, FAILS)),
        *(("table1", 0.6, HOLDS), ("table1", 0.4, FAILS)),
    ],
)
def test_evaluations(name: str, merit: float, outcome: str, toy: Scale) -> None:
    def measure(one: Planned) -> dict[str, float]:
        value = (merit if one.series == "MERIT" else 30.0 if name == "fig5" else 0.5) * (1 + noise(one))
        metrics = {"lambada": "perplexity", "wikitext": "word_perplexity"}
        values = {f"evaluate.{one_set}.{metrics.get(one_set, 'acc')}": value for one_set in PAPER_SETS[name]}
        if name == "fig12" and one.config.seed == 0:
            values["evaluate.cb.acc"] = 0.5  # a tie
        return values

    data = fake(name, toy, measure, seeds=5)
    decided = [one.outcome for verdict in verdicts(name, data) for one in verdict.comparisons]
    assert set(decided) == {outcome}


def test_diverged_runs_lose_evaluations(toy: Scale) -> None:
    data = fake(
        "table1",
        toy,
        lambda one: {f"evaluate.{one_set}.acc": 0.5 + noise(one) for one_set in PAPER_SETS["table1"]},
        status=lambda one: "diverged" if one.series == "MERIT" and one.config.seed == 2 else "finished",
    )
    ((comparison,),) = (one.comparisons for one in verdicts("table1", data))
    assert comparison.outcome == OPEN
    assert "MERIT at seed 2" in comparison.words
