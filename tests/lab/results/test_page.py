"""The page and its charts: what users name and measure cannot break them."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import altair as alt
import chromium
import polars as pl
import pytest
from written_runs import HOSTILE

from merit_lab.results import charts, drawing
from merit_lab.results.page import Page, Section, check_folder


def frame(names: tuple[str, ...] = ("AdamW", "LAMB")) -> pl.DataFrame:
    rows = [
        {"series": name, "batch": batch, "steps": 1000 / batch + place, "low": 1.0, "high": 9.0}
        for place, name in enumerate(names)
        for batch in (64, 128, 256)
    ]
    return pl.DataFrame(rows)


def all_charts(of: pl.DataFrame) -> list[charts.Chart]:
    return [
        charts.lines(of, "batch", "steps", name="lines", title="Lines", log_x=True, low="low", high="high"),
        charts.steps_to(of, name="to", title="To", ideals=of, missed=of.head(1), fits=of),
        charts.points(of, "steps", name="points", title="Points"),
        charts.heat(of, "batch", "low", "steps", name="heat", title="Heat", log=True),
    ]


def page_of(of: pl.DataFrame, names: Sequence[str] = ("A page",)) -> Page:
    return Page(
        names[0],
        facts=names,
        summary=f"{' '.join(names)} did `well`.",
        warnings=names,
        sections=[
            *(Section(name, [name, of], caption=name) for name in names),
            Section("Charts", all_charts(of)),
            Section("Folded", of, folded=True),
        ],
        runs=of,
    )


@pytest.fixture(scope="module")
def window(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    with chromium.open_page(browser, tmp_path_factory.mktemp("browser") / "profile") as window:
        yield window


def test_whatever_names_are_the_page_and_its_files_hold(tmp_path: Path) -> None:
    page = page_of(frame(("AdamW", *HOSTILE)), HOSTILE).write(tmp_path / "page")
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\uffff\u2028]", text)
    assert text.count("<script") == 0
    assert text.count("<svg") == text.count("</svg>") == 4
    for picture in ("lines", "to", "points"):
        root = ElementTree.parse(tmp_path / "page" / "figures" / f"{picture}.svg").getroot()
        assert all(name in "".join(root.itertext()) for name in ("AdamW", "bell\ufffd")), picture
    markdown = (tmp_path / "page" / "table.md").read_text(encoding="utf-8")
    assert "<script" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    written = pl.read_csv(tmp_path / "page" / "table.csv")["series"].unique(maintain_order=True)
    assert written.to_list() == ["AdamW", *HOSTILE]


@pytest.mark.browser
def test_the_page_fits_its_window_and_needs_nothing_else(window: chromium.Page, tmp_path: Path) -> None:
    path = page_of(frame(("MERIT, lr 0.024, momentum 0.9", *HOSTILE)), HOSTILE).write(tmp_path / "page")
    for width in (360, 390, 1280):
        window.open(path, width=width)
        assert window.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        assert window.complaints == []
        assert [url for url in window.requests if not url.startswith("data:")] == [path.as_uri()]


@pytest.mark.browser
def test_charts_can_be_read_on_light_and_dark_pages(window: chromium.Page, tmp_path: Path) -> None:
    path = page_of(frame()).write(tmp_path / "page")
    colours = set()
    for scheme in ("light", "dark"):
        preference = {"name": "prefers-color-scheme", "value": scheme}
        window.send("Emulation.setEmulatedMedia", features=[preference])
        window.open(path)
        text = window.evaluate("getComputedStyle(document.querySelector('svg .role-axis-label text')).fill")
        assert text == window.evaluate("getComputedStyle(document.body).color")
        colours.add(text)
    assert len(colours) == 2


def test_a_picture_is_the_same_each_time_and_ids_are_its_own() -> None:
    first, second = all_charts(frame()), all_charts(frame())
    assert first == second
    ids = [one for chart in first for one in re.findall(r'id="([^"]+)"', chart.svg)]
    assert len(ids) == len(set(ids)) > 0


def test_an_optimizer_has_its_colour_in_every_chart() -> None:
    for names in (("AdamW", "LAMB"), ("LAMB", "MERIT", "AdamW")):
        for chart in all_charts(frame(names))[:3]:
            assert "#00875f" in chart.svg, chart.name  # of AdamW


def test_charts_follow_the_schema_of_vega_lite(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def layer(*layers: alt.Chart) -> alt.LayerChart:
        seen.append(alt.LayerChart(layer=list(layers)))
        return seen[-1]

    monkeypatch.setattr(drawing.alt, "layer", layer)
    all_charts(frame())
    assert len(seen) == 4
    for chart in seen:
        chart.to_dict(validate=True)


def test_values_that_are_no_numbers_do_not_end_a_chart() -> None:
    values = pl.Series("steps", [math.nan, math.inf, -math.inf, 1.0, 2.0, 3.0])
    assert all("<svg" in chart.svg for chart in all_charts(frame().with_columns(values)))


def test_files_of_others_are_not_overwritten_and_those_of_an_earlier_page_are(tmp_path: Path) -> None:
    page = page_of(frame())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="--out"):
        page.write(tmp_path)
    with pytest.raises(NotADirectoryError, match="file"):
        check_folder(tmp_path / "file")
    folder = tmp_path / "page"
    page.write(folder)
    (folder / "figures" / "of-an-earlier-page.svg").write_text("")
    page.write(folder)
    assert {path.name for path in folder.iterdir()} == {"index.html", "figures", "table.md", "table.csv"}
    assert {path.stem for path in (folder / "figures").iterdir()} == {chart.name for chart in page.charts}
