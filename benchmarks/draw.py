"""Draw the results of step.py: step times as multiples of torch's fused AdamW.

    python benchmarks/draw.py benchmarks/results/step-h200.json docs/images/step-time.svg

Needs matplotlib, which the lab extra brings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

# What is drawn, in this order from above, and how.
SERIES = {
    "torch AdamW, fused": "#9aa0a6",
    "MERIT, fused": "#1a73e8",
    "clip_grad_norm_ and torch AdamW, fused": "#9aa0a6",
    "MERIT, fused, max_grad_norm": "#1a73e8",
    "torch AdamW, foreach": "#9aa0a6",
    "naive MERIT": "#d93025",
}


def main(source: str, target: str) -> None:
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    record = json.loads(Path(source).read_text())
    models = list(dict.fromkeys(row["model"] for row in record["results"]))
    figure, axes = plt.subplots(1, len(models), figsize=(3.1 * len(models), 2.6), sharey=True)
    for axis, model in zip(axes, models, strict=True):
        rows = {row["contestant"]: row for row in record["results"] if row["model"] == model}
        baseline = rows["torch AdamW, fused"]["median_ms"]
        names = list(reversed(SERIES))
        for place, name in enumerate(names):
            if name not in rows:
                axis.text(0.03, place, "not measured", va="center", fontsize=7, color="#80868b")
                continue
            milliseconds = rows[name]["median_ms"]
            ratio = milliseconds / baseline
            axis.barh(place, min(ratio, 4), color=SERIES[name], height=0.62)
            label = f"{milliseconds:.3g} ms" + (f", {ratio:.0f} times" if ratio > 4 else "")
            inside = ratio > 2.6
            axis.text(
                min(ratio, 4) + (-0.06 if inside else 0.06),
                place,
                label,
                va="center",
                ha="right" if inside else "left",
                fontsize=7,
                color="white" if inside else "#3c4043",
            )
        axis.axvline(1, color="#5f6368", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_xlim(0, 4)
        axis.set_title(f"{model}, {rows['MERIT, fused']['num_elements'] / 1e6:,.0f}M", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    device = record["environment"]["device"]
    figure.supxlabel(f"step time on one {device}, torch's fused AdamW = 1 (float32)", fontsize=8)
    figure.tight_layout()
    figure.savefig(target, facecolor="white")


if __name__ == "__main__":
    main(*sys.argv[1:])
