"""The table of docs/choosing.md: what `merit advise` answers for runs that were measured."""

import polars as pl
from evidence_runs import RESULTS, SIZES

from merit_lab.results.names import DISPLAY_NAMES as NAMES
from merit_lab.study.advise import Size, advise, read_records
from merit_lab.tables import NOTHING, Table

_RUNS = (  # size, batch, steps
    ("10M", 512, 200),
    ("33M", 512, 200),
    ("98M", 512, 200),
    ("10M", 64, 1600),
    ("10M", 512, 800),
    ("98M", 512, 800),
)
_LEVEL = 0.02  # what seeds of one setting differ by
_ADAMS = ("adamw", "lamb-uncorrected", "merit")  # optimizers with Adam's direction


def choosing() -> Table:
    """For each run the lowest optimizer, those level with it, and the lowest with Adam's direction."""
    records = read_records(RESULTS)
    widths = {name: width for width, name in SIZES.items()}
    rows = []
    for name, batch, steps in _RUNS:
        alike = pl.col("model.width") == widths[name], pl.col("batch") == batch, pl.col("steps") == steps
        parameters = records.filter(*alike)["parameters"].mode()[0]
        advice = advise(records, Size(batch, parameters, steps))
        adam = next(one for one in advice if one.name in _ADAMS)
        taken = [one for one in advice if one.loss < advice[0].loss + _LEVEL or one is adam]
        for place, one in enumerate(taken):
            run = f"{name}, {steps:,} steps of {batch}" if place == 0 else ""
            rest = NOTHING if one.rate_scale is None else f"{one.rate_scale:.2g}"
            numbers = f"{one.lr:g}", rest, f"{one.settings.warmup:.0%}", f"{one.loss:.3f}"
            rows.append((run, f"`{NAMES[one.name]}`", *numbers))
    return Table(
        ("Your run", "Optimizer", "`lr`", "`rate_scale` of the rest", "Warm-up", "Loss"),
        tuple(rows),
        num_text=2,
    )
