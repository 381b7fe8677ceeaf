"""The chart of a sweep and its page: all runs are visible, and nothing is loaded from the network."""

from pathlib import Path
from typing import Any

import altair
import chromium
import pytest
from sweep_runs import WriteRun

from merit_lab.results.write import refuse_folder
from merit_lab.study import page as study_page
from merit_lab.study.charts import Chart
from merit_lab.sweep.charts import make_chart
from merit_lab.sweep.ledger import Ledger
from merit_lab.sweep.page import make_page


@pytest.fixture
def ledger(write_run: WriteRun, tmp_path: Path) -> Ledger:
    """Two optimizers; two runs ended far above the others and one diverged."""
    for seed in (0, 1):
        for lr, loss in ((0.01, 2.4), (0.02, 2.0), (0.04, 2.5), (0.08, 40.0)):
            write_run("merit", lr, loss + 0.1 * seed, seed=seed)
        for lr, other in ((0.01, 2.3), (0.02, 2.1), (0.04, 2.2), (0.08, None if seed else 2.3)):
            write_run("lamb", lr, other, seed=seed)
    return Ledger.read(tmp_path / "out", [])


def rows(figure: Chart, name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in figure.spec["datasets"][name]]


def test_every_run_is_a_dot_or_a_mark_at_the_top(ledger: Ledger) -> None:
    figure = make_chart(ledger)
    marks = {row["run"]: row["what"] for row in rows(figure, "marks")}
    assert len(rows(figure, "seeds")) == 13
    assert sorted(marks.values()) == ["40.000", "40.100", "diverged at step 0"]
    heights = {(row["series"], row["y"]) for row in rows(figure, "marks")}
    assert len({y for _, y in heights}) == 2  # those of LAMB and MERIT do not cover each other
    # The line of means joins no cell in which a seed diverged.
    assert [row["x"] for row in rows(figure, "cells") if row["series"] == "LAMB"] == [0.01, 0.02, 0.04]


def test_the_axis_focuses_on_close_losses(ledger: Ledger) -> None:
    scales = [layer["encoding"]["y"].get("scale") for layer in make_chart(ledger).spec["layer"]]
    low, high = next(scale["domain"] for scale in scales if scale)
    assert low < 2.0
    assert 2.6 < high < 3.5


def test_without_outliers_there_is_no_band(write_run: WriteRun, tmp_path: Path) -> None:
    for lr, loss in ((0.01, 2.4), (0.02, 2.0), (0.04, 2.5)):
        write_run("merit", lr, loss)
    assert rows(make_chart(Ledger.read(tmp_path / "out", [])), "marks") == []


def test_the_chart_matches_the_schema(ledger: Ledger) -> None:
    altair.LayerChart.from_dict(dict(make_chart(ledger).spec))


def test_a_grid_in_which_all_runs_diverged_has_a_page(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("merit", 0.1, None)
    write_run("merit", 0.2, None)
    page = make_page(Ledger.read(tmp_path / "out", []), may_grow=True)
    assert page.summary == "No run finished, so there is no best value."
    assert page.write(tmp_path / "report").exists()
    assert (tmp_path / "report" / "best.json").read_text() == "{}\n"


def test_a_page_that_was_stopped_on_the_way_is_written_again(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(path: Path, *_: object) -> None:
        path.write_text("<svg")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(study_page, "write_svg", stop)
        with pytest.raises(KeyboardInterrupt):
            make_page(ledger, may_grow=True).write(tmp_path / "report")
    refuse_folder(tmp_path / "report")
    assert make_page(ledger, may_grow=True).write(tmp_path / "report").exists()


@pytest.mark.browser
def test_a_browser_draws_the_page_without_a_network(browser: str, ledger: Ledger, tmp_path: Path) -> None:
    written = make_page(ledger, may_grow=True).write(tmp_path / "report")
    with chromium.open_page(browser, tmp_path / "profile") as page:
        page.open(written)
        assert page.wait_for("document.documentElement?.dataset.drawn") == "1"
        assert page.wait_for("document.querySelector('.chart').textContent.includes('peak learning rate')")
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
