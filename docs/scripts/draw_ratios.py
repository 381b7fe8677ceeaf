"""The picture in docs/update.md: a weight, its update, and the ratios that MERIT takes.

    python docs/scripts/draw_ratios.py runs/demo/merit-lr0.04-seed0 docs/images/ratios.png

Reads the last checkpoint of a run with MERIT: the query, key and value weight of the second block.
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import vl_convert
from safetensors import safe_open
from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim.axes.directions import adam
from merit_optim.optim.axes.holds import Decay
from merit_optim.optim.axes.ratios import Merit
from merit_optim.optim.axes.ratios.ratio import sizes

NAME = "blocks.1.attention.query_key_value.weight"
RATIO = Merit()


def tensors(run: Path) -> tuple[Tensor, Tensor, Tensor]:
    """The weight and its two moments."""
    folder = max((run / "checkpoints").iterdir())
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as stored:
        weight = stored.get_tensor(f"model.{NAME}")
        exp_avg, exp_avg_sq = (
            stored.get_tensor(f"optimizer.{NAME}.{key}") for key in ("exp_avg", "exp_avg_sq")
        )
    return weight, exp_avg, exp_avg_sq


def panel(values: Tensor, title: str, scheme: str, width: int) -> alt.Chart:
    """A matrix as a picture, queries, keys and values below each other."""
    rows = [
        {"row": r, "column": c, "value": round(value, 5)}
        for r, line in enumerate(values.tolist())
        for c, value in enumerate(line)
    ]
    return (
        alt.Chart(alt.Data(values=rows), title=title)
        .mark_rect()
        .encode(
            alt.X("column:O", axis=None),
            alt.Y("row:O", axis=None),
            alt.Color(
                "value:Q", scale=alt.Scale(scheme=scheme), legend=alt.Legend(title=None, gradientLength=120)
            ),
        )
        .properties(width=width, height=384)
    )


def main() -> None:
    weight, exp_avg, exp_avg_sq = tensors(Path(sys.argv[1]))
    update = Decay().inside(adam.quotient(exp_avg, exp_avg_sq, 1e-6), weight, 0.1)
    of_both = (sizes(x[None], RATIO, is_vector=False) for x in (weight, update))
    ratios, undefined = algorithm.ratios_of(*of_both)
    whole = ratios.whole_N.item()
    scale = RATIO.scale(ratios, undefined)[0].expand_as(weight)
    scaled = (scale * update).abs()
    panels = [
        panel(weight.abs(), "|w|", "viridis", 128),
        panel(update.abs(), "|u|", "viridis", 128),
        panel(scale, f"s; the whole weight's ratio is {whole:.2f}", "magma", 128),
        panel(
            scaled.clamp(max=1.0), f"min(|s u|, 1); {(scaled > 1).float().mean():.1%} clipped", "viridis", 128
        ),
    ]
    chart = alt.hconcat(*panels).resolve_scale(color="independent").configure_view(stroke=None)
    Path(sys.argv[2]).write_bytes(vl_convert.vegalite_to_png(chart.to_dict(), scale=1.0))
    print(f"ratios from {scale.min():.2f} to {scale.max():.2f}, median {scale.median():.2f}")


if __name__ == "__main__":
    main()
