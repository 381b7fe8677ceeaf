"""The page of an arena in a real browser, at the widths of a phone and of a desktop."""

from collections.abc import Iterator
from pathlib import Path

import chromium
import fake_arena
import pytest

from merit_lab.arena.command import main
from merit_lab.study import runner

pytestmark = pytest.mark.browser

WIDTHS = (360, 1200)
CONTESTANTS = {
    "adamw": "AdamW",
    "muon": "Muon",
    "muon-merit": "MuonMERIT",
    "torch:Muon,momentum=0.95,rest=adamw,rest.betas=0.9,0.95": "torch:Muon + AdamW",
    "torch:SGD": "SGD",
    "torch:SGD,momentum=0.5": "SGD, momentum 0.5",
}
CHARTS = ("loss-batch4", "tuning-batch4-lr")


@pytest.fixture(scope="module")
def page(browser: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    folder = tmp_path_factory.mktemp("browser")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "train", fake_arena.train)
        arguments = [*fake_arena.arguments(data, folder / "out"), "--budget=4", "--seeds", "0", "1"]
        assert main([*arguments, "--optimizers", *CONTESTANTS]) == 0
    with chromium.open_page(browser, folder / "profile") as page:
        page.open(folder / "out" / "report" / "index.html")
        page.wait_for("document.documentElement?.dataset.drawn")
        yield page


def set_width(page: chromium.Page, width: int) -> None:
    page.send(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    chart = "document.querySelector('[data-chart] svg')"
    page.wait_for(f"innerWidth === {width} && {chart}.clientWidth < {width}")


def legend(chart: str) -> str:
    """The legend labels that lie within a chart."""
    place = f"[data-chart={chart}]"
    return f"""(() => {{
        const all = document.querySelector('{place} svg').getBoundingClientRect();
        const isInside = ({{ left, right, top, bottom }}) =>
            left >= all.left && right <= all.right + 1 && top >= all.top && bottom <= all.bottom;
        return [...document.querySelectorAll('{place} .role-legend-label text')]
            .filter((text) => isInside(text.getBoundingClientRect()))
            .map((text) => text.textContent).sort().join('|');
    }})()"""


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(page: chromium.Page, width: int) -> None:
    set_width(page, width)
    page.wait_for(f"document.documentElement.scrollWidth <= {width}")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_summary_and_all_contestants_are_visible(page: chromium.Page, width: int) -> None:
    set_width(page, width)
    answer = page.evaluate("document.querySelector('.summary').innerText")
    assert answer.startswith("With a batch of 4 MuonMERIT ends lowest, at a validation loss of")
    box = "document.querySelector('.summary').getBoundingClientRect()"
    assert page.evaluate(f"{box}.bottom + scrollY < innerHeight && {box}.right <= innerWidth")
    rows = "[...document.querySelector('table').querySelectorAll('tbody th')]"
    assert sorted(page.evaluate(f"{rows}.map((row) => row.innerText)")) == sorted(CONTESTANTS.values())
    assert page.evaluate(f"{rows}.every((row) => row.getBoundingClientRect().right < innerWidth)")


def test_a_caption_does_not_stick_to_its_table(page: chromium.Page) -> None:
    caption, table = "document.querySelector('.caption')", "document.querySelector('.caption + .scroll')"
    gap = page.evaluate(f"{table}.getBoundingClientRect().top - {caption}.getBoundingClientRect().bottom")
    assert gap >= 8


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("chart", CHARTS)
def test_charts_are_drawn_with_a_legend_of_all_contestants(
    page: chromium.Page, chart: str, width: int
) -> None:
    set_width(page, width)
    page.wait_for(f"{legend(chart)} === {'|'.join(sorted(CONTESTANTS.values()))!r}")
    lines = page.evaluate(f"document.querySelectorAll('[data-chart={chart}] .mark-line path').length")
    assert lines >= len(CONTESTANTS)


def test_values_are_shown_under_the_pointer(page: chromium.Page) -> None:
    set_width(page, 1200)
    tooltip = page.tooltip_at("[data-chart=tuning-batch4-lr] .mark-symbol path")
    assert any(name in tooltip for name in CONTESTANTS.values())
    assert "learning rate" in tooltip


def test_the_theme_follows_the_browser_and_then_the_switch(page: chromium.Page) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.role-legend-label text')).fill"
    seen = {}
    for scheme in ("light", "dark"):
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        seen[scheme] = page.evaluate(paper), page.evaluate(ink)
    assert seen["light"] == ("rgb(255, 255, 255)", "rgb(27, 31, 35)")
    assert seen["dark"] == ("rgb(20, 23, 26)", "rgb(228, 231, 234)")
    page.evaluate("document.querySelector('#theme [value=light]').click()")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"


def test_there_were_no_errors_and_no_network_requests(page: chromium.Page) -> None:
    assert page.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)
