"""`merit compare`: train with several optimizers and seeds, and report."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from merit_lab.compare.plan import parse_learning_rates
from merit_lab.compare.work import compare
from merit_lab.models import PRESETS
from merit_lab.record import RunInUse
from merit_lab.train import Interrupted, OptimizerConfig, TrainConfig
from merit_lab.train.parallel import is_first_rank

_SUMMARY = "Train one model with several optimizers and seeds, and report."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train one model with several optimizers and seeds, and report.

    Each run is a directory OUT/OPTIMIZER-lrRATE-seedSEED, the report is OUT/report. A call that was stopped
    is repeated to go on: finished runs are not trained again.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the first weights and of the order of the data."""
    lr: tuple[str, ...] = ()
    """Peak learning rates as OPTIMIZER=RATE; several for one optimizer are all tried. Else the paper's."""
    out: Path | None = None
    """Folder of the comparison. None: runs/compare-MODEL."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells have it."""

    def work() -> None:
        arguments, folder = parse(list(argv))
        report = compare(
            arguments.config,
            folder,
            optimizers=arguments.optimizers,
            seeds=arguments.seeds,
            learning_rates=parse_learning_rates(arguments.lr),
        )
        if report is not None:
            print(f"\n{report.summary}\nThe page: {report.page}")

    return exit_status("merit compare", work)


def exit_status(command: str, work: Callable[[], int | None]) -> int:
    """Do the work of a command that trains, which can be stopped and repeated; say how it ended.

    What the work returns is the status; None is 0.
    """
    try:
        return work() or 0
    except Interrupted as interrupted:
        if is_first_rank():
            print(f"{command}: {interrupted}. The same command goes on from there.", file=sys.stderr)
        return 128 + interrupted.signum
    except KeyboardInterrupt:
        print(f"{command}: stopped. The same command goes on.", file=sys.stderr)
        return 130
    except (OSError, ValueError, RunInUse) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1


def parse(argv: list[str]) -> tuple[Arguments, Path]:
    """The arguments, and the folder of the comparison."""
    preset = argv[0] if argv else "--help"
    if preset not in PRESETS:
        refuse_model("compare", _SUMMARY, preset)
    default = Arguments(config=TrainConfig(data=tyro.MISSING, model=PRESETS[preset]))
    arguments = tyro.cli(Arguments, default=default, args=argv[1:], prog=f"merit compare {preset}")
    refuse_single_run_options(arguments.config, "a comparison", lr="--lr merit=9e-3")
    return arguments, arguments.out or Path("runs", f"compare-{preset}")


def refuse_single_run_options(config: TrainConfig, what: str, *, lr: str) -> None:
    """Raise where an option of a single run is given that differs between the runs of ``what``.

    That they differ is what it is for.
    """
    for name, value, plain, instead in (
        ("--seed", config.seed, TrainConfig.seed, "--seeds 0 1 2"),
        ("--optimizer.name", config.optimizer.name, OptimizerConfig.name, "--optimizers lamb merit"),
        ("--optimizer.lr", config.optimizer.lr, OptimizerConfig.lr, lr),
    ):
        if value != plain:
            raise ValueError(f"{name} {value} is for one run; in {what} write for example {instead}")


def refuse_model(command: str, summary: str, given: str) -> NoReturn:
    """Show the help, or say which models there are."""
    models = ", ".join(PRESETS)
    parser = argparse.ArgumentParser(
        prog=f"merit {command}",
        usage=f"merit {command} MODEL --data FOLDER [options]",
        description=f"{summary} The models are: {models}.",
        epilog=f"The options of a model: merit {command} MODEL --help",
    )
    if given in ("-h", "--help"):
        parser.print_help()
        raise SystemExit(0)
    if given.startswith("-"):
        parser.error(f"the model is missing; it comes first. The models are: {models}")
    nearest = difflib.get_close_matches(given, PRESETS, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    parser.error(f"unknown model {given!r}; {hint}the models are: {models}")
