"""The page and its charts: what users name and measure cannot break them."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import altair as alt
import chromium
import polars as pl
import pytest

from merit_lab.results import charts, drawing
from merit_lab.results.page import Page, Section, check_folder

HOSTILE = (
    "bell\x07",
    "noncharacter\uffff",
    "line\nbreak",
    "separator\u2028",
    'quote"\\"',
    "</svg></style><script>document.title='taken'</script>",
    "a|b",
    "x" * 10_000,
)


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
        charts.heat(of, "batch", "series", "steps", name="heat", title="Heat", log=True),
    ]


def page_of(of: pl.DataFrame, name: str = "A page") -> Page:
    return Page(
        name,
        facts=[name],
        summary=f"{name} did `well`.",
        warnings=[name],
        sections=[
            Section(name, [name, of, *all_charts(of)], caption=name),
            Section("Folded", of, folded=True),
        ],
        runs=of,
    )


@pytest.fixture(scope="module")
def window(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    with chromium.open_page(browser, tmp_path_factory.mktemp("browser") / "profile") as window:
        yield window


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_whatever_a_name_is_the_page_and_its_files_hold(name: str, tmp_path: Path) -> None:
    page = page_of(frame((name, "AdamW")), name).write(tmp_path / "page")
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\uffff\u2028]", text)
    assert text.count("<script") == 0
    assert text.count("<svg") == text.count("</svg>") == 4
    for picture in (tmp_path / "page" / "figures").iterdir():
        assert "AdamW" in "".join(ElementTree.parse(picture).getroot().itertext()), picture.name
    markdown = (tmp_path / "page" / "table.md").read_text(encoding="utf-8")
    assert "<script" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    assert pl.read_csv(tmp_path / "page" / "table.csv")["series"][0] == name


@pytest.mark.browser
@pytest.mark.parametrize("name", [HOSTILE[-1], "MERIT, lr 0.024, momentum 0.9"], ids=["long", "usual"])
def test_the_page_fits_its_window_and_needs_nothing_else(
    window: chromium.Page, name: str, tmp_path: Path
) -> None:
    path = page_of(frame((name, "AdamW")), name).write(tmp_path / "page")
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_do_not_end_a_chart(value: float) -> None:
    of = frame().with_columns(steps=pl.when(pl.col("batch") == 64).then(value).otherwise(pl.col("steps")))
    assert all("<svg" in chart.svg for chart in all_charts(of))


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
