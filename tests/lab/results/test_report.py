"""`merit report`: the page says what the runs hold."""

import json
import math
from pathlib import Path

import polars as pl
import pytest
from written_runs import write_run

from merit_lab.results import charts
from merit_lab.results.command import main
from merit_lab.results.report import outcome, report
from merit_lab.results.series import with_series
from merit_lab.runs import table
from merit_lab.runs.measurements import Measurements


def test_the_report_of_three_optimizers(
    three_seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(three_seeds), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "MERIT ended lowest" in said
    assert "AdamW diverged at step 60" in said
    assert "lamb-lr0.01-seed1 (unfinished)" in said
    pictures = {path.stem for path in (out / "figures").iterdir()}
    assert {"validation-loss", "validation-loss-tokens", "validation-loss-seconds", "max-logit"} <= pictures
    assert {"training-loss", "entropy", "clipped", "grad-norm", "lr", "layers-1"} <= pictures
    rows = pl.read_csv(out / "table.csv")
    assert rows["run"].n_unique() == len(rows) == 9
    page = (out / "index.html").read_text(encoding="utf-8")
    assert all(text in page for text in ("256 x 64 tokens", "optimizer.lr", "1 diverged", "torch"))
    assert "a-private-name" not in page


def test_the_tables_numbers_are_those_of_the_frame(three_seeds: Path) -> None:
    runs = with_series(table.read(three_seeds).runs)
    losses = runs.filter(series="MERIT")["validation_loss"]
    content = outcome(runs)
    row = next(row for row in content.rows if row[0] == "MERIT")
    by_name = dict(zip(content.head, row, strict=True))
    assert by_name["Validation loss"] == f"{losses.mean():.3f} ± {losses.std():.3f}"
    assert by_name["± of its text"] == "0.020"
    assert by_name["Runs"] == "3 finished"


def test_runs_that_may_not_be_compared_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "merit")
    write_run(tmp_path / "b", "lamb", batch=512)
    page = report(table.read(tmp_path))
    assert "below" not in page.summary
    titles = {section.title for section in page.sections}
    assert {f"Outcome of tiny, 100 steps of {batch} x 64 tokens" for batch in (256, 512)} <= titles
    assert not any(title.startswith("Differences") for title in titles)


def test_the_mean_ends_with_the_first_run_that_ends_and_a_cross_marks_where_it_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        write_run(tmp_path, "adamw", seed=seed, diverges_at=60 if seed else None)
    drawn = []
    data = charts.data
    monkeypatch.setattr(charts, "data", lambda rows: drawn.append(rows) or data(rows))
    of = table.read(tmp_path)
    charts.curves(of.runs, of.steps, name="loss", title="Loss")
    thin, mean, ends = drawn
    assert thin["x"].max() == 100
    assert mean["x"].max() == 50
    assert ends["x"].to_list() == [50]


def test_measurements_at_checkpoints_have_a_column_for_each_series(tmp_path: Path) -> None:
    for seed, perplexity in enumerate((40.0, math.inf)):
        folder = write_run(tmp_path, "merit", seed=seed)
        measured = Measurements(folder / "evaluate" / "step-00000100.json")
        measured.put("lambada", {}, {"acc": 0.5 + seed / 10, "acc_stderr": 0.05, "perplexity": perplexity})
    write_run(tmp_path, "lamb")
    page = report(table.read(tmp_path))
    content = next(section for section in page.sections if section.title == "Measured at checkpoints").content
    assert content.head == ("Measured", "MERIT")  # type: ignore[union-attr]
    assert dict(content.rows) == {  # type: ignore[union-attr]
        "evaluate.step": "100 ± 0",
        "evaluate.lambada.acc": "0.550 ± 0.071",
        "evaluate.lambada.perplexity": "inf",
    }


def test_attention_that_collapsed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs", "merit")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "attention" and line["step"] > 50:
            line["entropy"] = [[0.01 for _ in layer] for layer in line["entropy"]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "to 0.01 nats with MERIT" in capsys.readouterr().err


HOSTILE = ("bell\x07", "noncharacter\uffff", "line\nbreak", 'a\\"b', "<b>bold</b>", "x" * 10_000)


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:20])
def test_an_optimizer_and_a_run_may_have_any_name(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit")
    folder = folder.rename(folder.with_name(name[:200].replace("/", " ")))
    write_run(tmp_path / "runs", "lamb")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["optimizer"]["name"] = f"mine:{name}"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    assert "LAMB" in (out / "figures" / "validation-loss.svg").read_text(encoding="utf-8")
    page, tables = ((out / one).read_text(encoding="utf-8") for one in ("index.html", "table.md"))
    assert page.count("<svg") == len(list((out / "figures").iterdir())) > 10
    assert not [part for part in ("<b>", "\x07", "\uffff", "x" * 301) if part in page + tables]
    rows = [line for line in tables.splitlines() if line.strip()]
    assert all(row.startswith("|") == row.endswith("|") for row in rows), "no row is broken"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing"], "missing"),
        (["empty"], "empty"),
        (["started"], "merit-lr0.01-seed0"),
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
    write_run(tmp_path / "ok", "merit")
    (write_run(tmp_path / "started", "merit") / "metrics.jsonl").write_text("")
    assert main(arguments) == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
