"""The report's files, and the errors for bad input."""

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import altair
import pytest
from fake_runs import write_run, write_three_seeds

from merit_lab.results import find_runs, group, read_outcomes
from merit_lab.results.command import main
from merit_lab.results.figures import make_figures
from merit_lab.results.old_page import render_page
from merit_lab.results.style import colours, dashes
from merit_lab.runs import Run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with its pictures, to be read only: they take most of the time."""
    runs = write_three_seeds(tmp_path_factory.mktemp("of-three-seeds") / "runs")
    assert main([str(runs), "--out", str(runs.parent / "report")]) == 0
    return runs.parent / "report"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For reports whose pictures nobody looks at."""
    monkeypatch.setattr("merit_lab.results.write.write_svg", lambda path, *_: path.write_text("<svg/>"))


@pytest.mark.usefixtures("undrawn")
def test_says_what_came_out(three_seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "report"
    assert main([str(three_seeds), "--out", str(folder)]) == 0
    output = capsys.readouterr().out
    *table, sentence, place = output.splitlines()
    assert any("2 finished, 1 diverged" in row for row in table)
    assert any(re.search(r"3 finished .* \d\.\d{3} ± \d\.\d{3} .* ± \d\.\d$", row) for row in table)
    assert max(map(len, table)) <= 80
    assert sentence.startswith("At the end MERIT had the lowest validation loss")
    assert place == f"The page: {folder / 'index.html'}"


def test_the_same_report_has_the_same_pictures(report: Path, three_seeds: Path, tmp_path: Path) -> None:
    """Regardless of what the process drew before."""
    assert main([str(three_seeds), "--out", str(tmp_path / "again")]) == 0
    names = [path.name for path in (report / "figures").glob("*.svg")]
    assert names
    for name in names:
        once, again = (folder / "figures" / name for folder in (report, tmp_path / "again"))
        assert once.read_bytes() == again.read_bytes()
        used = set(re.findall(r"url\(#(\w+)\)", once.read_text()))
        assert used == set(re.findall(r'<(?:clipPath|linearGradient) id="(\w+)"', once.read_text()))


def test_writes_page_figures_and_tables(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert "AdamW diverged in 1 of 3 runs (at step 60)" in page
    assert "2 finished, 1 unfinished" in page
    assert "a-private-name" not in page, "the name of the machine is private"
    markup = page[: page.index('<script type="application/json"')]
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', markup)
    assert not loaded, "the page needs no other file"
    figures = {path.stem for path in (report / "figures").iterdir()}
    assert {"validation-loss", "validation-loss-by-tokens", "max-logit", "max-logit-layers-3"} <= figures
    for path in (report / "figures").iterdir():
        ElementTree.parse(path)

    head, rule, *by_series = (report / "table.md").read_text().splitlines()
    assert head.startswith("| Optimizer | Runs | Peak learning rate | Validation loss |")
    assert rule.startswith("| --- | --- | ---: | ---: |")
    assert len(by_series) == 3
    assert any("2 finished, 1 diverged" in row for row in by_series)
    with (report / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert [row["status"] for row in rows].count("diverged") == 1
    with (report / "metrics.csv").open() as file:
        points = list(csv.DictReader(file))
    merit = [
        row for row in points if row["run"] == "merit-lr0.009-seed0" and row["metric"] == "validation_loss"
    ]
    assert [int(row["step"]) for row in merit] == list(range(0, 101, 10))
    assert int(merit[-1]["tokens"]) == 100 * 256 * 64
    assert {row["of_steps"] for row in points} == {"1"}


@pytest.mark.usefixtures("undrawn")
def test_metrics_csv_has_the_number_of_steps_of_each_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merit_lab.results.curves.MOST_POINTS", 10)
    run = write_run(tmp_path, "merit", every=1, num_steps=40)
    assert main([str(run), "--out", str(tmp_path / "report")]) == 0
    with (tmp_path / "report" / "metrics.csv").open() as file:
        points = [row for row in csv.DictReader(file) if row["metric"] == "lr"]
    assert [int(row["step"]) for row in points] == [*range(4, 40, 4), 39, 40]
    assert {row["of_steps"] for row in points} == {"4"}


@pytest.mark.usefixtures("undrawn")
def test_figures_of_an_earlier_report_are_removed(three_seeds: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    assert main([str(three_seeds), "--out", str(report)]) == 0
    assert list((report / "figures").glob("max-logit-layer*"))
    (report / "figures" / "mine.svg").write_text("<svg/>")
    only = write_run(tmp_path / "later", "merit", num_layers=1)
    assert main([str(only), "--out", str(report)]) == 0
    figures = {path.stem for path in (report / "figures").iterdir()}
    assert {"validation-loss", "max-logit", "mine"} <= figures
    assert not {name for name in figures if name.startswith("max-logit-layer")}, (
        "one layer has no such figures"
    )


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_killed_before_it_counted_tokens(tmp_path: Path) -> None:
    run = Run.open(write_run(tmp_path, "merit", num_steps=1, end=None))
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    update = {"clipped": 0.1, "bounded": 0.0, "relative_change": 0.01}
    lines = [line for line in lines if json.loads(line)["step"] == 0]
    lines.append(json.dumps({"kind": "update", "step": 1, "parameters": {"w": update}}) + "\n")
    run.metrics_path.write_text("".join(lines))
    assert main([str(run.folder), "--out", str(tmp_path / "report")]) == 0
    with (tmp_path / "report" / "metrics.csv").open() as file:
        tokens = {row["metric"]: row["tokens"] for row in csv.DictReader(file)}
    assert (tokens["validation_loss"], tokens["clipped"]) == ("0", "")


def test_charts_follow_the_schema_of_vega_lite(three_seeds: Path) -> None:
    figures = {figure.key: figure for figure in make_figures(group(find_runs([three_seeds])))}
    for key in ("validation-loss", "max-logit", "max-logit-layers-1"):  # one of each type
        altair.Chart.from_dict(figures[key].on_page["tokens"])
        altair.Chart.from_dict(figures[key].in_files[key])


def test_tick_labels_are_numbers_without_exponents(report: Path) -> None:
    texts = [element.text or "" for element in ElementTree.parse(report / "figures/weight-norm.svg").iter()]
    assert "20" in texts
    assert [text for text in texts if "e+" in text] == []


def test_logits_below_one_are_labelled_by_decimals(tmp_path: Path) -> None:
    """And not as 400m, for 400 thousandths."""
    run = Run.open(write_run(tmp_path, "merit"))
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "attention":
            line["max_logits"] = [[0.2 + 0.01 * layer] for layer in range(len(line["max_logits"]))]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    picture = ElementTree.parse(tmp_path / "report/figures/max-logit-layers-1.svg")
    texts = [element.text or "" for element in picture.iter()]
    assert "0.22" in texts
    assert [text for text in texts if text.endswith("m")] == []


def test_an_optimizer_has_the_same_colour_in_every_report(three_seeds: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    write_run(alone, "merit", lr=1e-2)
    write_run(alone, "merit", lr=2e-2)
    three, merit = (
        {series.label: series.optimizer for series in group(find_runs([folder]))}
        for folder in (three_seeds, alone)
    )
    assert set(colours(merit).values()) == {colours(three)["MERIT"]}
    assert len(set(colours(three).values())) == 3
    assert len(set(dashes(merit).values())) == 2


def test_the_legend_of_a_picture_tells_two_learning_rates_apart(tmp_path: Path) -> None:
    for rate in (1e-2, 2e-2):
        write_run(tmp_path / "runs", "merit", lr=rate)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    picture = (tmp_path / "report" / "figures" / "validation-loss.svg").read_text()
    symbols = re.findall(
        r'role-legend-symbol".*?<path [^>]*d="M([^"]*)"[^>]*stroke-dasharray="([^"]*)"', picture
    )
    assert len(symbols) == 2
    assert len({dash for _, dash in symbols}) == 2
    assert all("A" not in shape for shape, _ in symbols), "strokes, not discs"


def test_text_from_a_run_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, "merit", note="</script><b>bold</b>")
    series = group(find_runs([tmp_path]))
    page = render_page(series, read_outcomes(series), [], "a summary", [])
    assert "&lt;b&gt;bold" in page
    assert "<b>bold" not in page


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_just_started_is_shown_beside_others(one_seed: Path, tmp_path: Path) -> None:
    Run.create(one_seed / "begun", {"optimizer": {"name": "lion", "lr": 1e-4}, "seed": 0}, {})
    folder = tmp_path / "report"
    assert main([str(one_seed), "--out", str(folder)]) == 0
    assert "Lion did not finish and is not counted" in (folder / "index.html").read_text()


def test_foreign_files_are_not_overwritten(
    one_seed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "index.html").write_text("<title>my thesis</title>")
    assert main([str(one_seed), "--out", str(folder)]) == 1
    assert capsys.readouterr().err == (
        f"merit report: {folder} holds files that merit did not write and will not overwrite; "
        "choose another folder with --out, or move them away\n"
    )
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    assert (folder / "index.html").read_text() == "<title>my thesis</title>"


@pytest.mark.usefixtures("undrawn")
def test_reports_of_earlier_versions_and_incomplete_ones_are_replaced(one_seed: Path, tmp_path: Path) -> None:
    earlier, incomplete = tmp_path / "earlier", tmp_path / "incomplete"
    assert main([str(one_seed), "--out", str(earlier)]) == 0
    shutil.copytree(earlier, incomplete)
    (earlier / "index.html").write_text("a page without a mark")
    for name in ("table.csv", "metrics.csv"):
        (incomplete / name).unlink()
    for folder in (earlier, incomplete):
        assert main([str(one_seed), "--out", str(folder)]) == 0
        assert "the lowest validation loss" in (folder / "index.html").read_text()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / ".keep").touch()
    assert main([str(one_seed), "--out", str(empty)]) == 0


def test_runs_without_measurements_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run.create(tmp_path / "begun", {"optimizer": {"name": "merit", "lr": 1e-2}, "seed": 0}, {})
    assert main([str(tmp_path / "begun"), "--out", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().err == (
        "merit report: nothing to report: no measurements recorded yet by begun\n"
    )
    assert not (tmp_path / "report").exists()


def test_bad_input_is_an_error_without_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere: no such folder" in capsys.readouterr().err
    folder = write_run(tmp_path, "merit")
    (folder / "config.json").write_text("{")
    assert main([str(folder)]) == 1
    assert "config.json is not JSON" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_page_that_could_not_be_written_leaves_nothing_in_the_way(
    one_seed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, or where the process is killed, the same command continues later."""

    def fail(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    folder = tmp_path / "report"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        assert main([str(one_seed), "--out", str(folder)]) == 1
    (folder / "index.html.0a1b.partial").touch()
    assert main([str(one_seed), "--out", str(folder)]) == 0
