"""Draw the results of step.py: step times as multiples of torch's fused AdamW.

    python benchmarks/draw.py benchmarks/results/step-h200.json docs/images/step-time.svg

Needs altair and vl-convert-python, which the lab extra brings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

# What is drawn, in this order from above, and how.
SERIES = {
    "torch AdamW, fused": "#6f767d",
    "MERIT, fused": "#0072b2",
    "clip_grad_norm_ and torch AdamW, fused": "#6f767d",
    "MERIT, fused, max_grad_norm": "#0072b2",
    "torch AdamW, foreach": "#6f767d",
    "naive MERIT": "#d55e00",
}
LONGEST = 4  # multiples; a longer bar is cut and says so
CONFIG = {
    "font": "Arial, Helvetica, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 11, "labelLimit": 320, "titleFontSize": 11, "titleFontWeight": "normal"},
    "title": {"fontSize": 12, "anchor": "start", "offset": 8, "frame": "group"},
}


def main(source: str, target: str) -> None:
    record = json.loads(Path(source).read_text())
    models = list(dict.fromkeys(row["model"] for row in record["results"]))
    # Two beside each other: the text can still be read where the picture is as wide as a column of text.
    panels = [
        panel(record["results"], model, with_names=place % 2 == 0) for place, model in enumerate(models)
    ]
    title = f"step time on one {record['environment']['device']}, torch's fused AdamW = 1 (float32)"
    chart = alt.concat(*panels, columns=2, spacing=20, background="white", config=CONFIG).properties(
        title=alt.TitleParams(
            title, orient="bottom", anchor="middle", frame="bounds", fontWeight="normal", fontSize=11
        )
    )
    Path(target).write_text(vl_convert.vegalite_to_svg(chart.to_dict()))


def panel(results: list[dict[str, Any]], model: str, *, with_names: bool) -> alt.LayerChart:
    """One model's bars; only panels on the left have room for their names."""
    rows = {row["contestant"]: row for row in results if row["model"] == model}
    baseline = rows["torch AdamW, fused"]["median_ms"]
    bars = [describe(name, rows[name]["median_ms"] if name in rows else None, baseline) for name in SERIES]
    base = alt.Chart(alt.Data(values=bars)).encode(
        y=alt.Y(
            "name:N",
            sort=list(SERIES),
            title=None,
            axis=alt.Axis(
                labels=with_names,
                ticks=False,
                domain=False,
                labelPadding=6,
                minExtent=250 if with_names else 0,
            ),
        )
    )
    x = alt.X(
        "bar:Q",
        title=None,
        scale=alt.Scale(domain=[0, LONGEST]),
        axis=alt.Axis(values=[0, 1, 2, 3, 4], gridOpacity=0.5),
    )
    bar = base.mark_bar(size=16).encode(x, color=alt.Color("colour:N", scale=None))
    outside = base.mark_text(align="left", dx=5, fontSize=11).encode(x, text="outside:N")
    inside = base.mark_text(align="right", dx=-6, fontSize=11, color="white").encode(x, text="inside:N")
    one = (
        alt.Chart(alt.Data(values=[{}])).mark_rule(strokeDash=[2, 3], color="#5f6368").encode(x=alt.datum(1))
    )
    title = f"{model}, {rows['MERIT, fused']['num_elements'] / 1e6:,.0f}M"
    return alt.layer(bar, one, outside, inside).properties(width=190, height=150, title=title)


def describe(name: str, milliseconds: float | None, baseline: float) -> dict[str, Any]:
    """A bar's length, colour and text, which stands inside a long bar and beside a short one."""
    if milliseconds is None:
        return {"name": name, "bar": 0, "colour": SERIES[name], "outside": "not measured", "inside": ""}
    ratio = milliseconds / baseline
    text = f"{milliseconds:.3g} ms" + (f", {ratio:.0f} times" if ratio > LONGEST else "")
    is_long = ratio > 0.65 * LONGEST
    return {
        "name": name,
        "bar": min(ratio, LONGEST),
        "colour": SERIES[name],
        "outside": "" if is_long else text,
        "inside": text if is_long else "",
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
