"""`merit report`: the page says what the runs hold."""

import json
import math
from pathlib import Path

import polars as pl
import pytest
from written_runs import HOSTILE, write_run, write_three_seeds

from merit_lab.results import charts, drawing
from merit_lab.results.command import main
from merit_lab.results.report import outcome, report, summary
from merit_lab.results.series import with_series
from merit_lab.runs import table
from merit_lab.runs.measurements import Measurements
from merit_lab.tables import Table


def test_the_report_of_three_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = write_three_seeds(tmp_path / "runs"), tmp_path / "out"
    write_run(runs / "below" / "another")
    assert main([str(runs), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert (
        "MERIT ended lowest, at 3.212 ± 0.143 (3 seeds), below all others; AdamW diverged at step 6"
        in said.out
    )
    assert "lamb-1 (unfinished)" in said.out
    assert f"those in {runs / 'below'} are left out" in said.err
    pictures = {path.stem for path in (out / "figures").iterdir()}
    assert {"validation-loss", "validation-loss-tokens", "validation-loss-seconds", "max-logit"} <= pictures
    assert {"training-loss", "entropy", "clipped", "grad-norm", "lr", "layers-1"} <= pictures
    rows = pl.read_csv(out / "table.csv")
    assert rows["run"].n_unique() == len(rows) == 9
    page = (out / "index.html").read_text(encoding="utf-8")
    assert all(text in page for text in ("1 x 64 tokens", "optimizer.lr", "1 diverged", "torch"))
    assert "a-private-name" not in page


def test_the_tables_numbers_are_those_of_the_frame(tmp_path: Path) -> None:
    runs = with_series(table.read(write_three_seeds(tmp_path)).runs)
    losses = runs.filter(series="MERIT")["validation_loss"]
    content = outcome(runs)
    row = next(row for row in content.rows if row[0] == "MERIT")
    by_name = dict(zip(content.head, row, strict=True))
    assert by_name["Validation loss"] == f"{losses.mean():.3f} ± {losses.std():.3f}"
    assert by_name["± of its text"] == "0.020"
    assert by_name["Runs"] == "3 finished"


def test_the_summary_says_no_more_than_the_seeds_allow() -> None:
    """The mean of all seeds may be lower, and the difference over those that both have the other way."""
    rows = [
        {"run": f"{name}-{seed}", "status": "finished", "seed": seed, "last_step": 9, "optimizer.name": name}
        | {"validation_loss": loss}
        for name, losses in {"merit": {0: 3.2, 1: 3.0, 2: 3.0}, "lamb-uncorrected": {0: 3.1}}.items()
        for seed, loss in losses.items()
    ]
    said = summary(with_series(pl.DataFrame(rows)))
    assert (
        said == "MERIT ended lowest, at 3.067 ± 0.115 (3 seeds); LAMB cannot be told from it by these seeds."
    )


def test_runs_that_may_not_be_compared_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", "lamb-uncorrected", batch=512)
    page = report(table.read(tmp_path))
    assert "lowest" not in page.summary
    titles = {section.title for section in page.sections}
    assert {f"Outcome of tiny, enwik8, 8 steps of {batch} x 64 tokens" for batch in (1, 512)} <= titles
    assert not any(title.startswith("Differences") for title in titles)


def test_the_mean_ends_with_the_first_run_that_ends_and_a_cross_marks_where_it_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        write_run(tmp_path / f"{seed}", "adamw", seed=seed, diverges_at=6 if seed else None)
    drawn = []
    marks = drawing.Plot.marks
    monkeypatch.setattr(
        drawing.Plot,
        "marks",
        lambda plot, rows, *given, **how: drawn.append(rows) or marks(plot, rows, *given, **how),
    )
    of = table.read(tmp_path)
    charts.curves(of.runs, of.steps, name="loss", title="Loss")
    thin, mean, ends = drawn
    assert thin["x"].max() == 8
    assert mean["x"].max() == 4
    assert ends["x"].to_list() == [4]


def test_measurements_at_checkpoints_have_a_column_for_each_series(tmp_path: Path) -> None:
    for seed, perplexity in enumerate((40.0, math.inf)):
        folder = write_run(tmp_path / f"merit-{seed}", seed=seed).folder
        measured = Measurements(folder / "evaluate" / "step-00000100.json")
        measured.put("lambada", {}, {"acc": 0.5 + seed / 10, "acc_stderr": 0.05, "perplexity": perplexity})
    write_run(tmp_path / "lamb-uncorrected", "lamb-uncorrected")
    page = report(table.read(tmp_path))
    content = next(section for section in page.sections if section.title == "Measured at checkpoints").content
    assert isinstance(content, Table)
    assert content.head == ("Measured", "MERIT")
    assert dict(content.rows) == {
        "evaluate.step": "100 ± 0",
        "evaluate.lambada.acc": "0.550 ± 0.071",
        "evaluate.lambada.perplexity": "inf",
    }


def test_attention_that_collapsed_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "attention":
            line["entropy"] = [[5.0 if line["step"] < 5 else 0.01]]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (warning,) = report(table.read(tmp_path)).warnings
    assert "from 5 to 0.01 nats with MERIT" in warning


def test_optimizers_and_runs_may_have_any_name(tmp_path: Path) -> None:
    for name in HOSTILE:
        optimizer = {"name": f"mine:{name}", "lr": 0.01, "overrides": [name]}
        write_run(tmp_path / "runs" / name[:200].replace("/", " "), optimizer=optimizer)
    write_run(tmp_path / "runs" / "lamb-uncorrected", "lamb-uncorrected")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    shown = (out / "figures" / "validation-loss.svg").read_text(encoding="utf-8")
    assert all(name in shown for name in ("LAMB", "bell\ufffd", "a|b", "xxx…"))
    page, tables = ((out / one).read_text(encoding="utf-8") for one in ("index.html", "table.md"))
    assert page.count("<svg") == len(list((out / "figures").iterdir())) > 10
    unwanted = ("<script", "\x07", "\uffff", "\u2028", "x" * 301)
    assert not [part for part in unwanted if part in page + tables]
    rows = [line for line in tables.splitlines() if line.strip()]
    assert all(row.startswith("|") == row.endswith("|") for row in rows), "no row is broken"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing"], "missing"),
        (["empty"], "empty"),
        (["started"], "nothing to report: no measurements recorded yet by started"),
        (["ok", "--out", "ok"], "ok"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "ok")
    write_run(tmp_path / "started").metrics_path.write_text("")
    assert main(arguments) == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
