"""What the commands share that carry out studies: how they begin and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import tyro

from merit_lab.models.names import KNOWN, find_model, is_model
from merit_lab.record import RunInUse
from merit_lab.train import Interrupted, OptimizerConfig, TrainConfig
from merit_lab.train.rank import is_first_rank

if TYPE_CHECKING:
    from merit_lab.study.study import Conclusion


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


def tell(command: str, conclusion: Conclusion | None, *also: str) -> None:
    """Say what a study came to, at the end of its command; ``also`` are more lines."""
    if conclusion is not None:
        for warning in conclusion.warnings:
            print(f"{command}: {warning}", file=sys.stderr)
        print(f"\n{conclusion.summary}\nThe page: {conclusion.page}", *also, sep="\n")


class Arguments(Protocol):
    """What the arguments of every study have."""

    @property
    def config(self) -> TrainConfig:
        """What all runs share."""

    @property
    def out(self) -> Path | None:
        """Its folder; None for one named after the command and the model."""


A = TypeVar("A", bound=Arguments)


def parse(
    kind: type[A],
    argv: Sequence[str],
    *,
    command: str,
    summary: str,
    what: str,
    lr: str,
    optimizer: OptimizerConfig | None = None,
    required: Sequence[str] = (),
) -> tuple[A, Path]:
    """The arguments of a study, and its folder.

    Args:
        kind: a dataclass of the arguments.
        argv: what was given, the model first.
        command: the command's name.
        summary: what it is for, in a sentence.
        what: a study of this kind, with its article.
        lr: how learning rates are given, as an example.
        optimizer: the optimizer's settings by default.
        required: the arguments that have no default, beside the data.
    """
    given = argv[0] if argv else "--help"
    if not is_model(given):
        refuse_model(command, summary, given)
    name, model = find_model(given)
    config = TrainConfig(data=tyro.MISSING, model=model, optimizer=optimizer or OptimizerConfig())
    make: Callable[..., A] = kind  # a dataclass, which a protocol does not say
    default = make(config=config, **dict.fromkeys(required, tyro.MISSING))
    arguments = tyro.cli(
        kind,
        default=default,
        args=argv[1:],
        prog=f"merit {command} {given}",
        config=(tyro.conf.AvoidSubcommands,),  # the model has been chosen
    )
    refuse_single_run_options(arguments.config, what, lr=lr)
    return arguments, arguments.out or Path("runs", f"{command}-{name}")


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
    parser = argparse.ArgumentParser(
        prog=f"merit {command}",
        usage=f"merit {command} MODEL --data FOLDER [options]",
        description=f"{summary} The models are: {KNOWN}.",
        epilog=f"The options of a model: merit {command} MODEL --help",
    )
    if given in ("-h", "--help"):
        parser.print_help()
        raise SystemExit(0)
    if given.startswith("-"):
        parser.error(f"the model is missing; it comes first. The models are: {KNOWN}")
    try:
        find_model(given)
    except ValueError as error:
        parser.error(str(error))
    raise AssertionError(f"{given} is a model")
