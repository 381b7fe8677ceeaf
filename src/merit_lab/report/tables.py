"""The tables of a report, as rows of text: outcomes by series and by run, settings, environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merit_lab.report.comparable import HASH_DIGITS, data_names
from merit_lab.report.gather import differing, flatten, show
from merit_lab.report.outcome import RunOutcome, SeriesOutcome, Spread
from merit_lab.report.series import Series, have_other_data

# What the environment says about a person's machine and not about the result.
_PRIVATE = ("command", "folder", "host", "data.folder")
NOTHING = "\u2013"  # a dash


@dataclass(frozen=True)
class Table:
    """A head and rows of the same length; the first ``num_text`` columns are words, the rest numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text: int = 1

    def only(self, names: Sequence[str]) -> Table:
        """The columns of these names."""
        places = [place for place, name in enumerate(self.head) if name in names]
        return Table(
            tuple(self.head[place] for place in places),
            tuple(tuple(row[place] for place in places) for row in self.rows),
            num_text=sum(place < self.num_text for place in places),
        )

    def markdown(self) -> str:
        """The table in Markdown, numbers to the right."""
        rule = ["---" if place < self.num_text else "---:" for place in range(len(self.head))]
        lines = [self.head, rule, *self.rows]
        escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
        return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


@dataclass(frozen=True)
class Settings:
    """What all runs have in common, and by series what not."""

    common: tuple[tuple[str, str], ...]
    different: Table | None


def series_table(outcomes: Sequence[SeriesOutcome]) -> Table:
    """One row for each series: means over the finished runs, their spread, and what became of the others."""
    rows = []
    in_bits = have_other_data([own.series for own in outcomes])
    for own in outcomes:
        loss = own.spread("validation_loss")
        bits = {"Bits per byte": _mean(own.spread("bits_per_byte"), 3)} if in_bits else {}
        rows.append(
            {
                "Optimizer": own.label,
                "Runs": describe_runs(own),
                "Peak learning rate": NOTHING if own.series.lr is None else f"{own.series.lr:g}",
                "Validation loss": _mean(loss, 3),
                **bits,
                "Lowest to highest": _range(loss, 3),
                "Training loss": _mean(own.spread("training_loss"), 3),
                "Largest logit at the end": _mean(own.spread("final_logit"), 1),
                "At any time": _mean(own.spread("largest_logit"), 1),
                "Tokens/s": _mean(own.spread("tokens_per_second"), 0, with_deviation=False),
            }
        )
    if all(row["Lowest to highest"] == NOTHING for row in rows):
        for row in rows:
            del row["Lowest to highest"]
    return Table(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), num_text=2)


def describe_runs(outcome: SeriesOutcome) -> str:
    """How many runs of a series finished, diverged, and did neither."""
    kinds = {
        "finished": outcome.finished,
        "finished without validation": outcome.not_validated,
        "diverged": outcome.diverged,
        "unfinished": outcome.unfinished,
    }
    return ", ".join(f"{len(runs)} {kind}" for kind, runs in kinds.items() if runs)


def run_table(outcomes: Sequence[SeriesOutcome]) -> Table:
    """One row for each run, with its last values, whatever its status."""
    head = (
        "Run",
        "Series",
        "Status",
        "Seed",
        "Steps",
        "Validation loss",
        "Training loss",
        "Largest logit at the end",
        "At any time",
        "Tokens/s",
        "Minutes",
    )
    rows = [_run_row(own.label, run) for own in outcomes for run in own.runs]
    return Table(head, tuple(rows), num_text=3)


def _run_row(label: str, run: RunOutcome) -> tuple[str, ...]:
    status = f"{run.status}: {run.message}" if run.status == "diverged" and run.message else run.status
    return (
        run.name,
        label,
        status,
        str(run.seed),
        f"{run.step:,}",
        _number(run.validation_loss, 3),
        _number(run.training_loss, 3),
        _number(run.final_logit, 1),
        _number(run.largest_logit, 1),
        _number(run.tokens_per_second, 0),
        _number(None if run.seconds is None else run.seconds / 60, 1),
    )


def settings(series: Sequence[Series]) -> Settings:
    """The configurations: what is common, what differs; the data by their names."""
    names = data_names(run for own in series for run in own.runs)
    tables = [
        [{**run.settings, "data": names.get(run.fingerprint or "")} for run in own.runs] for own in series
    ]
    return _compare(series, tables)


def environment(series: Sequence[Series]) -> Settings:
    """Where the runs took place, without what is private to a machine."""
    tables = [
        [
            {path: value for path, value in flatten(run.environment).items() if path not in _PRIVATE}
            for run in own.runs
        ]
        for own in series
    ]
    return _compare(series, tables)


def _compare(series: Sequence[Series], tables: Sequence[Sequence[Mapping[str, object]]]) -> Settings:
    everything = [own for group in tables for own in group]
    paths = differing(everything)
    common = tuple((path, show(value)) for path, value in everything[0].items() if path not in paths)
    if not paths:
        return Settings(common, None)
    rows = tuple((path, *(_values(group, path) for group in tables)) for path in paths)
    return Settings(common, Table(("", *(own.label for own in series)), rows, num_text=1 + len(series)))


def _values(group: Sequence[Mapping[str, object]], path: str) -> str:
    values = dict.fromkeys(show(own[path]) if path in own else NOTHING for own in group)
    is_hash = path.rpartition(".")[2] == "fingerprint"
    return " | ".join(value[:HASH_DIGITS] if is_hash else value for value in values)


def _mean(spread: Spread | None, digits: int, *, with_deviation: bool = True) -> str:
    if spread is None:
        return NOTHING
    text = _number(spread.mean, digits)
    if with_deviation and spread.deviation is not None:
        text += f" ± {_number(spread.deviation, digits)}"
    return text


def _range(spread: Spread | None, digits: int) -> str:
    if spread is None or len(spread.values) < 2:
        return NOTHING
    return f"{_number(min(spread.values), digits)} to {_number(max(spread.values), digits)}"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"
