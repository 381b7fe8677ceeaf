"""Results of `merit evaluate` in a report."""

import csv
import math
from pathlib import Path

import pytest
from fake_runs import write_run

from merit_lab.results import find_runs, group, keep_command
from merit_lab.results.command import main
from merit_lab.results.tables import evaluation_table
from merit_lab.runs import EvaluationResult, Metric, Run, last_results, result_path
from merit_lab.tables import NOTHING


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the pictures here."""
    monkeypatch.setattr("merit_lab.results.write.write_svg", lambda path, *_: path.write_text("<svg/>"))


def evaluated(
    folder: Path,
    name: str = "lambada",
    step: int = 100,
    limit: int | None = None,
    stderr: float | None = 0.01,
    **values: float,
) -> Path:
    """Write the result of a set; a perplexity has no error and should be low."""
    metrics = {
        key: Metric(
            value=value, stderr=None if key == "perplexity" else stderr, higher_is_better=key == "acc"
        )
        for key, value in values.items()
    }
    path = result_path(Run.open(folder), step, name, limit)
    EvaluationResult(
        name=name,
        step=step,
        metrics=metrics,
        num_items=limit or 5000,
        num_truncated=0,
        version=1.0,
        inputs={"limit": limit},
        environment={},
        seconds=1.0,
    ).write(path)
    return path


def rows_of(*paths: Path) -> list[tuple[str, ...]]:
    table = evaluation_table(group(find_runs(paths)))
    assert table is not None
    return [table.head, *table.rows]


def test_a_column_for_each_series_that_was_evaluated(tmp_path: Path) -> None:
    """One run has the error over items, two have the deviation over seeds."""
    evaluated(write_run(tmp_path, "lamb"), acc=0.25, perplexity=40.25)
    for seed, accuracy in enumerate((0.3, 0.4)):
        evaluated(write_run(tmp_path, "merit", seed=seed), acc=accuracy)
    write_run(tmp_path, "adamw")
    assert rows_of(tmp_path) == [
        ("Set", "Measure", "Better", "Items", "LAMB", "MERIT"),
        ("Step", "", "", "", "100", "100"),
        ("lambada", "acc", "higher", "5,000", "0.250 ± 0.010", "0.350 ± 0.071"),
        ("lambada", "perplexity", "lower", "5,000", "40.25", NOTHING),
    ]


def test_the_last_checkpoint_that_was_evaluated_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "merit")
    assert last_results(Run.open(folder)) == ()
    for step in (9, 50, 40):
        evaluated(folder, step=step, acc=step / 100)
    evaluated(folder, "wic", step=50, acc=0.5)
    assert [(result.name, result.step) for result in last_results(Run.open(folder))] == [
        ("lambada", 50),
        ("wic", 50),
    ]
    assert [row[-1] for row in rows_of(folder)[1:]] == ["50", "0.500 ± 0.010", "0.500 ± 0.010"]


def test_the_first_items_of_a_set_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "merit")
    evaluated(folder, acc=0.25)
    evaluated(folder, limit=8, acc=0.5)
    assert sorted((row[3], row[-1]) for row in rows_of(folder)[2:]) == [
        ("5,000", "0.250 ± 0.010"),
        ("8", "0.500 ± 0.010"),
    ]


def test_a_limit_beyond_the_size_of_a_set_does_not_count_twice(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "merit")
    whole = evaluated(folder, acc=0.25)
    limited = evaluated(folder, limit=5000, acc=0.25)
    assert whole != limited
    assert [row[-1] for row in rows_of(folder)[2:]] == ["0.250 ± 0.010"]


def test_seeds_that_were_evaluated_at_different_steps_show_both(tmp_path: Path) -> None:
    for seed, step in enumerate((100, 50)):
        evaluated(write_run(tmp_path, "merit", seed=seed), step=step, acc=0.5)
    assert rows_of(tmp_path)[1][-1] == "100, 50"


@pytest.mark.parametrize(("values", "shown"), [((math.inf,), "inf"), ((40.0, math.inf), "inf")])
def test_an_infinite_perplexity_is_shown(tmp_path: Path, values: tuple[float, ...], shown: str) -> None:
    for seed, value in enumerate(values):
        evaluated(write_run(tmp_path, "merit", seed=seed), perplexity=value)
    assert rows_of(tmp_path)[-1][-1] == shown


def test_page_and_files(tmp_path: Path) -> None:
    """Those of an earlier report are removed if there is nothing to show."""
    folder, report = write_run(tmp_path, "merit"), tmp_path / "report"
    path = evaluated(folder, acc=0.25)
    assert main([str(folder), "--out", str(report)]) == 0
    page = (report / "index.html").read_text()
    assert "<h2>Evaluation</h2>" in page
    assert "0.250 ± 0.010" in page
    assert "<code>merit evaluate</code>" in page
    assert "| lambada | acc | higher | 5,000 | 0.250 ± 0.010 |" in (report / "evaluations.md").read_text()
    with (report / "evaluations.csv").open() as file:
        (row,) = csv.DictReader(file)
    expected = {"run": folder.name, "series": "MERIT", "step": "100", "set": "lambada", "measure": "acc"}
    assert expected.items() <= row.items()
    assert (row["value"], row["stderr"], row["higher_is_better"]) == ("0.25", "0.01", "True")

    path.unlink()
    assert main([str(folder), "--out", str(report)]) == 0
    assert "<h2>Evaluation</h2>" not in (report / "index.html").read_text()
    assert not list(report.glob("evaluations.*"))


def test_kept_runs_show_theirs_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="enwik8")
    evaluated(folder, acc=0.25)
    assert keep_command.main([str(folder), "--out", str(tmp_path / "kept")]) == 0
    assert rows_of(tmp_path / "kept") == rows_of(folder)


def test_a_file_that_is_no_evaluation_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, "merit")
    path = evaluated(folder, acc=0.25)
    path.write_text("{}")
    assert main([str(folder), "--out", str(tmp_path / "report")]) == 1
    assert f"{path} is not a result of `merit evaluate`" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
