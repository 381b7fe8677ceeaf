"""`merit show`: list runs, or print their records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from merit_lab.results.curves import last_validation_loss
from merit_lab.results.gather import MeasuredRun, open_runs, say_what_is_left_out
from merit_lab.runs import Run, as_json
from merit_lab.tables import NOTHING, Table, print_table
from merit_optim.spelling import did_you_mean


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit show",
        description="List runs with their status, last step and last validation loss; or, given a run or a "
        "kind, print configuration, environment and measurements, one JSON object a line.",
    )
    parser.add_argument(
        "path", type=Path, help="a run directory, a folder of runs, also nested, or a file of `merit keep`"
    )
    parser.add_argument("run", nargs="?", help="the name of one run (all)")
    parser.add_argument(
        "--kind", help="only these lines: config, environment, train, validation, attention, update or event"
    )
    options = parser.parse_args(argv)
    try:
        say_what_is_left_out("merit show", [options.path])
        runs = open_runs([options.path])
        if options.run is not None:
            runs = {options.run: _choose(runs, options.run, options.path)}
        if options.run is None and options.kind is None:
            print_table(_table(runs))
        else:
            _print_lines(runs, options.kind)
    except (OSError, ValueError) as error:
        print(f"merit show: {error}", file=sys.stderr)
        return 1
    return 0


def _choose(runs: Mapping[str, Run], name: str, path: Path) -> Run:
    if name not in runs:
        hint = did_you_mean(name, runs, otherwise=";")
        raise ValueError(f"{path} holds no run {name!r}{hint} `merit show {path}` lists its runs")
    return runs[name]


def _table(runs: Mapping[str, Run]) -> Table:
    rows = []
    for name, run in runs.items():
        measured = MeasuredRun.skim(run)
        loss = last_validation_loss(measured.rows)
        last_step, _ = measured.extent
        rows.append((name, measured.status, str(last_step), NOTHING if loss is None else f"{loss:.4g}"))
    return Table(("Run", "Status", "Last step", "Validation loss"), tuple(rows), num_text=2)


def _print_lines(runs: Mapping[str, Run], kind: str | None) -> None:
    kinds = set()
    for name, run in runs.items():
        for line in _lines(run):
            kinds.add(line["kind"])
            if kind in (None, line["kind"]):
                print(as_json({"run": name, **line}))
    if kind is not None and kind not in kinds:
        raise ValueError(f"there are no lines of kind {kind!r}; there are {', '.join(sorted(kinds))}")


def _lines(run: Run) -> Iterator[dict[str, Any]]:
    yield {"kind": "config", **run.config}
    yield {"kind": "environment", **run.environment}
    yield from run.lines()
