"""The page in a real browser: it draws its charts without loading other files, and its controls work."""

from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from fake_runs import write_run

from merit_lab.results.command import main

pytestmark = pytest.mark.browser

LINES = "document.querySelectorAll('#chart-validation-loss .mark-line path').length"


@pytest.fixture(scope="module")
def page(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    folder = tmp_path_factory.mktemp("browser")
    for seed in range(2):
        write_run(folder / "runs", "lamb", seed=seed)
        write_run(folder / "runs", "merit", seed=seed, diverges_at=80 if seed else None)
    assert main([str(folder / "runs"), "--out", str(folder / "report")]) == 0
    with chromium.open_page(browser, folder / "profile") as page:
        page.open(folder / "report" / "index.html")
        page.wait_for("document.documentElement?.dataset.drawn")
        yield page


def test_every_chart_is_drawn_without_errors_or_network(page: chromium.Page) -> None:
    num_marks = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('[data-chart]')].map((chart) => "
        "[chart.dataset.chart, chart.querySelectorAll('[class*=mark-line] path, .mark-rect path').length]))"
    )
    assert {"validation-loss", "training-loss", "max-logit", "max-logit-layers-1", "clipped"} <= set(
        num_marks
    )
    assert all(num_marks.values()), num_marks
    assert page.complaints == []
    outside = [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))]
    assert outside == []
    assert [url.rpartition("/")[2] for url in page.requests if url.startswith("file:")] == ["index.html"]


def test_a_series_is_hidden_and_shown_by_its_button(page: chromium.Page) -> None:
    everything = page.evaluate(LINES)
    page.evaluate("document.querySelector('#legend [data-series=LAMB]').click()")
    page.wait_for(f"{LINES} < {everything}")
    assert page.evaluate("document.querySelector('figure[data-series=LAMB]').hidden")
    assert not page.evaluate("document.querySelector('figure[data-series=MERIT]').hidden")
    page.evaluate("document.querySelector('#legend [data-series=LAMB]').click()")
    page.wait_for(f"{LINES} === {everything}")


def test_the_axis_can_be_tokens(page: chromium.Page) -> None:
    title = "document.querySelector('#chart-validation-loss .role-axis-title').textContent"
    assert page.evaluate(title) == "steps"
    page.evaluate("document.querySelector('#axis [value=tokens]').click()")
    page.wait_for(f"{title} === 'tokens'")
    page.evaluate("document.querySelector('#axis [value=step]').click()")
    page.wait_for(f"{title} === 'steps'")


def test_the_loss_can_be_seen_whole(page: chromium.Page) -> None:
    labels = (
        "[...document.querySelectorAll('#chart-validation-loss text')]"
        ".map((text) => text.textContent).sort().join()"
    )
    close_up = page.evaluate(labels)
    page.evaluate("document.querySelector('#range [value=whole]').click()")
    page.wait_for(f"{labels} !== {close_up!r}")
    page.evaluate("document.querySelector('#range [value=\"\"]').click()")
    page.wait_for(f"{labels} === {close_up!r}")


def test_values_are_shown_under_the_pointer(page: chromium.Page) -> None:
    tooltip = page.tooltip_at("#chart-validation-loss svg")
    assert tooltip.startswith("step")
    assert "LAMB" in tooltip
    assert "MERIT" in tooltip
    assert "NaN" not in tooltip


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_window(page: chromium.Page, width: int) -> None:
    page.send(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    page.wait_for(
        f"innerWidth === {width} && document.querySelector('#chart-max-logit svg').clientWidth < {width}"
    )
    page.wait_for(f"document.documentElement.scrollWidth <= {width}")


def test_light_and_dark_follow_the_system_and_then_the_switch(page: chromium.Page) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.role-axis-label text')).fill"
    colours = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.send("Emulation.setEmulatedMedia", features=features)
        colours[scheme] = page.evaluate(paper), page.evaluate(ink)
    assert colours["light"] == ("rgb(255, 255, 255)", "rgb(27, 31, 35)")
    assert colours["dark"] == ("rgb(20, 23, 26)", "rgb(228, 231, 234)")
    page.evaluate("document.querySelector('#theme [value=light]').click()")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"


def test_a_page_of_finished_runs_has_no_errors(browser: str, one_seed: Path, tmp_path: Path) -> None:
    assert main([str(one_seed), "--out", str(tmp_path / "report")]) == 0
    with chromium.open_page(browser, tmp_path / "profile") as page:
        page.open(tmp_path / "report" / "index.html")
        page.wait_for("document.documentElement?.dataset.drawn")
        assert page.complaints == []


def test_a_page_of_different_data_fits_a_phone(browser: str, tmp_path: Path) -> None:
    for digits in ("ab" * 32, "cd" * 32):
        write_run(tmp_path / digits, "merit", trained_on={"fingerprint": digits})
    folders = [str(tmp_path / digits) for digits in ("ab" * 32, "cd" * 32)]
    assert main([*folders, "--out", str(tmp_path / "report")]) == 0
    with chromium.open_page(browser, tmp_path / "profile") as page:
        page.open(tmp_path / "report" / "index.html", width=390)
        page.wait_for("document.documentElement?.dataset.drawn")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.querySelectorAll('.summary p').length") == 3


def test_the_page_had_no_errors(page: chromium.Page) -> None:
    assert page.complaints == []
