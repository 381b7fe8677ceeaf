"""The pages in a real browser: charts are drawn from the page alone, and nothing is wider than the window."""

from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from toy_scale import make_scale

from merit_lab.data import Dataset
from merit_lab.paper.registry import choose
from merit_lab.paper.work import Task, reproduce

pytestmark = pytest.mark.browser

NAMES = ("fig2", "fig3", "fig5", "fig14", "table2")


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    reproduce(
        Task(entries=choose(NAMES), scale=make_scale(seeds=1), corpus=Dataset.open(data), folder=folder)
    )
    return folder


@pytest.fixture(scope="module")
def page(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    with chromium.open_page(browser, tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_s_page_draws_its_charts(name: str, folder: Path, page: chromium.Page) -> None:
    num_charts = len(list((folder / name).glob("*.svg")))
    page.open(folder / name / "index.html", width=360)
    if num_charts:
        assert page.wait_for("document.documentElement?.dataset.drawn") == str(num_charts)
        assert page.evaluate("document.querySelectorAll('.chart svg.marks').length") == num_charts
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.complaints == []
    broken = page.evaluate(
        "[...document.querySelectorAll('footer a, nav a')].map((link) => link.getAttribute('href')).join()"
    )
    assert all((folder / name / link).exists() for link in broken.split(","))


def test_the_overview_leads_to_every_page(folder: Path, page: chromium.Page) -> None:
    page.open(folder / "index.html", width=360)
    assert page.evaluate("document.querySelectorAll('.card img').length") == len(NAMES) - 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.complaints == []
    page.evaluate("document.querySelector('#theme [value=dark]').click()")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    links = page.evaluate(
        "[...document.querySelectorAll('.card[href]')].map((link) => link.getAttribute('href')).join()"
    )
    assert links.split(",") == [f"{name}/index.html" for name in NAMES]
