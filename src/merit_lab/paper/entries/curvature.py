"""Curvature at the end of training: figure 7."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from merit_lab.measure.curvature.command import CurvatureConfig, measure_curvature
from merit_lab.models import num_parameters
from merit_lab.paper.entry import Analysis, PaperEntry, Unavailable
from merit_lab.paper.records import Records, TrialRecord, spread_text
from merit_lab.paper.setups import Scale
from merit_lab.paper.verdict import Verdict, paired
from merit_lab.runs import Measurements, step_path
from merit_lab.study.charts import Axis, line_chart
from merit_lab.tables import NOTHING, Table

_MOST_POINTS = 200
_PAPER = {"AdamW": (37.231, 12994.91), "MERIT": (12.326, 3444.92)}


def _is_measured(record: TrialRecord, config: CurvatureConfig) -> bool:
    """Whether everything shown has been measured with these settings."""
    wanted = {
        "eigenvalues": {"top": config.top},
        "trace": {"probes": config.probes},
        "density": {"probes": config.density_probes, "steps": config.density_steps},
    }
    parts = _parts(record)
    return all(
        name in parts
        and parts[name]["settings"].items() >= {"sequences": config.sequences, **settings}.items()
        for name, settings in wanted.items()
    )


def _measure(record: TrialRecord, scale: Scale, _: Path | None) -> None:
    config = CurvatureConfig(
        sequences=scale.curvature_sequences,
        top=1,
        probes=scale.curvature_probes,
        density=True,
        density_probes=1,
        density_steps=2 * scale.curvature_probes,
    )
    if _is_measured(record, config):
        return  # known without the data
    if not record.config.data.is_dir():
        raise Unavailable(
            f"Curvature needs the runs' data, which are not in {record.config.data}: give them with --data"
        )
    try:
        measure_curvature(record.folder, config, step=record.config.steps, data=record.config.data)
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"Curvature needs {error.name}, which is not installed: pip install 'merit-optim[curvature]'"
        ) from None


def _parts(record: TrialRecord) -> dict[str, dict[str, Any]]:
    """The measurements of the run's last step with their settings, by part."""
    assert record.config.steps is not None, "the configuration is resolved"
    path = step_path(record.folder / "curvature", record.config.steps).with_suffix(".json")
    return Measurements(path).parts


def _read(record: TrialRecord) -> dict[str, Any]:
    """The results by part."""
    return {name: part["result"] for name, part in _parts(record).items()}


def _top(record: TrialRecord) -> float | None:
    parts = _read(record)
    return parts["eigenvalues"]["values"][0] if "eigenvalues" in parts else None


def _trace(record: TrialRecord) -> float | None:
    parts = _read(record)
    return parts["trace"]["value"] if "trace" in parts else None


def _density(record: TrialRecord) -> list[tuple[float, float]]:
    """The density at a limited number of points, at least a tenth of one eigenvalue's weight."""
    spectrum = _read(record).get("density")
    if spectrum is None:
        return []
    points = list(zip(spectrum["grid"], spectrum["density"], strict=True))
    least = 0.1 / num_parameters(record.config.model)
    return [(at, max(value, least)) for at, value in points[:: -(-len(points) // _MOST_POINTS)]]


def _fig7(records: Records, scale: Scale) -> Analysis:
    adamw, merit = records.of(series="AdamW"), records.of(series="MERIT")
    quantities: dict[str, Callable[[TrialRecord], float | None]] = {"top eigenvalue": _top, "trace": _trace}
    claim = Verdict(
        claim="MERIT ends in a flatter place than AdamW: a smaller top eigenvalue and a smaller trace of the "
        "Hessian.",
        source="figure 7",
        comparisons=tuple(
            paired(
                f"MERIT's {name} below AdamW's",
                merit.by_seed(quantity, diverged=math.inf),
                adamw.by_seed(quantity, diverged=math.inf),
                paper=f"{_PAPER['MERIT'][place]} against {_PAPER['AdamW'][place]}",
            )
            for place, (name, quantity) in enumerate(quantities.items())
        ),
    )
    has_paper = bool(scale.gpt2[0].paper)
    rows = []
    for series in records.series:
        runs = records.of(series=series)
        paper = [str(value) if has_paper else NOTHING for value in _PAPER[series]]
        ours = [spread_text(runs.by_seed(quantity), ".4g") for quantity in quantities.values()]
        rows.append((series, runs.statuses, paper[0], ours[0], paper[1], ours[1]))
    head = ("Optimizer", "Runs", "Top eigenvalue, paper", "Top eigenvalue", "Trace, paper", "Trace")
    lines = {}
    for series in records.series:
        spectra = ((record.folder.name, _density(record), False) for record in records.of(series=series).all)
        lines[series] = [line for line in spectra if line[1]][:1]
    chart = line_chart(
        lines,
        records.optimizers,
        Axis("eigenvalue", ".3~g"),
        Axis("density", ".0e", logarithmic=True),
        name="density",
        title="Spectral density of the Hessian",
        caption="Lanczos quadrature of the first seed that finished, smoothed by a hundredth of its width. "
        "The scale is logarithmic because nearly all eigenvalues are close to zero.",
    )
    note = (
        f"The Hessian of the mean loss over {scale.curvature_sequences} training sequences; the paper does "
        "not name its data, so magnitudes need not agree."
    )
    return Analysis(
        table=Table(head, tuple(rows), num_text=2),
        charts=(chart,),
        verdicts=(claim,),
        notes=(note,),
    )


ENTRIES = (
    PaperEntry(
        name="fig7",
        title="Figure 7: curvature at the end",
        shows="Hessian at the end point: top eigenvalue, trace, spectral density",
        trials=lambda scale, seeds: scale.trials([scale.gpt2[0]], ("adamw", "merit"), seeds),
        analyse=_fig7,
        measure=_measure,
    ),
)
