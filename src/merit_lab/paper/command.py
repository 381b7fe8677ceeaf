"""`merit reproduce`: reproduce figures and tables of the paper, with verdicts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from merit_lab.command_line import rules
from merit_lab.data import Dataset
from merit_lab.folders import refuse_file
from merit_lab.paper.artefact import Result, check_scale, tally
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.plan import Corpus, Runs
from merit_lab.paper.records import Data, Records
from merit_lab.paper.scales import SCALES, Scale
from merit_lab.paper.work import Task, reproduce
from merit_lab.study import cost
from merit_lab.study.command import exit_status
from merit_lab.study.cost import UTILISATION, Cost, Speed, duration
from merit_lab.text import amount
from merit_lab.train.parallel import Ranks
from merit_lab.train.reports import peak_flops

_DAY = 86400.0  # seconds
_SMALL_COST = 1e15  # FLOPs: hours on a slow core, so there is no need to measure the speed
_REFERENCE_GPU = "H100"
_COLOURS = {"holds": "green", "does not hold": "red", "not decided": "yellow", "not run": "dim"}
_ABOUT = """\
Reproduce figures and tables of the MERIT paper, each with a verdict: whether the paper's claim held here.
Runs that exist are used and missing ones trained; repeat the command to resume after an interruption.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells do."""
    names = "\n".join(f"  {entry.name:<12} {entry.title}" for entry in ENTRIES.values())
    scales = "\n".join(f"  {scale.name:<12} {scale.summary}" for scale in SCALES.values())

    def work() -> int:
        task = tyro.cli(
            Task,
            args=argv,
            prog="merit reproduce",
            description=f"{_ABOUT}\nnames:\n  all          all of these\n{names}\n\nscales:\n{scales}",
            config=(tyro.conf.FlagCreatePairsOff,),
            registry=rules(),
        )
        refuse_file(task.folder)
        if task.list:
            _show_costs(task)
            return 0
        check_scale(task.at_scale, task.folder)
        if not (task.no_training or _agreed(task)):
            return 1
        results = reproduce(task)
        if Ranks.join().is_first:
            _print_verdicts(results, task.folder)
        return 0

    return exit_status("merit reproduce", work)


def _rows(task: Task) -> dict[str, Data]:
    """The rows of all entries that have runs. Data are not prepared for this."""
    corpora = [Corpus.of(Dataset.open(task.data))] if task.data else Records.read(task.folder).corpora
    return task.all_rows(corpora[0] if corpora else Corpus())


def _cost(rows: Iterable[Data]) -> Cost:
    """What is left to train of several entries; runs that they share are counted once."""
    left = {trial.folder: trial for of_entry in rows for trial in of_entry.left}
    return Cost.of((trial.config, trial.steps_done) for trial in left.values())


def _speed(scale: Scale) -> Speed:
    """This machine's speed; for a large scale on a machine without a GPU, that of a GPU."""
    if scale.is_large and Ranks.join().device.type != "cuda":
        peak = peak_flops(_REFERENCE_GPU)
        assert peak is not None
        return Speed(UTILISATION * peak, 1, f"stated: {UTILISATION:.0%} of the peak of one {_REFERENCE_GPU}")
    return cost.find_speed(next(Runs("first", ("adamw",)).planned(scale, 1, Corpus())).config)


def _show_costs(task: Task) -> None:
    """Print the list of entries with what they cost, less the training already done."""
    speed, whole = _speed(task.at_scale), _rows(task)
    table = _table("Name", "What it shows")
    for head in ("Runs", "Left", "Tokens", "FLOPs", "GPU hours" if speed.num_gpus else "Time"):
        table.add_column(head, justify="right", no_wrap=True)
    lines = [(entry.name, entry.title, [entry.name]) for entry in task.entries]
    for name, shows, names in [*lines, ("together", "runs that entries share counted once", list(whole))]:
        rows = [whole[one] for one in names if one in whole]
        num_runs, left = len({run for data in rows for run in data.values("run")}), _cost(rows)
        spent = f"{left.gpu_hours(speed):,.2f}" if speed.num_gpus else duration(left.seconds(speed))
        counts = str(num_runs), str(left.num_left), amount(left.tokens), f"{left.flops:.1e}"
        table.add_row(name, shows, *counts, spent)
    console = Console(highlight=False)
    console.print(f"scale {task.scale}: {task.at_scale.summary}\n", markup=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"\nTraining only; training already done in {task.folder} is deducted. Speed: "
        f"{speed.flops / 1e12:.3g} TFLOP/s, {speed.source}.",
        markup=False,
        soft_wrap=True,
    )


def _agreed(task: Task) -> bool:
    """Whether to start. If it takes many GPU hours or days, show the cost and ask."""
    ranks = Ranks.join()

    def takes_days() -> bool:
        """Whether the rest would take this machine more than a day, as a GPU's scale does on a CPU."""
        whole = _cost(_rows(task).values())
        return whole.flops >= _SMALL_COST and whole.seconds(_speed(task.at_scale)) > _DAY

    if not task.at_scale.is_large and not ranks.first(takes_days):
        return True
    if ranks.is_first:
        _show_costs(task)
    if task.yes:
        return True
    if ranks.size > 1 or not sys.stdin.isatty():
        print("merit reproduce: pass --yes to start", file=sys.stderr)
        return False
    try:
        return input("Start? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D, after which the cursor is still behind the question
        print()
        return False


def _print_verdicts(results: Sequence[Result], folder: Path) -> None:
    table = _table("Entry", "Verdict", "Claim")
    for result in results:
        lines = [(verdict.outcome, verdict.claim) for verdict in result.verdicts]
        names = itertools.chain([result.entry], itertools.repeat(""))
        for name, (outcome, claim) in zip(names, lines or [(result.outcome, result.missing)], strict=False):
            table.add_row(name, Text(outcome, style=_COLOURS[outcome]), Text(claim))
    Console(highlight=False).print(table)
    print(f"\n{tally(results)}\nThe page: {folder / 'index.html'}")


def _table(*heads: str) -> Table:
    """A table for the terminal, the last of whose columns wraps."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=head != heads[-1])
    return table
