"""Parsing, exit status and final output of the commands that carry out studies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import tyro

from merit_lab.command_line import rules
from merit_lab.models.names import KNOWN, find_model, is_model
from merit_lab.runs import RunInUse
from merit_lab.train import Interrupted, OptimizerConfig, TrainConfig
from merit_lab.train.rank import is_first_rank, is_reported_here
from merit_lab.train.typed import refuse_replaced_vocab, typed

if TYPE_CHECKING:
    from merit_lab.study.study import Conclusion


def exit_status(command: str, work: Callable[[], int | None]) -> int:
    """Do the work of a command that trains, and return its exit status.

    The status is what ``work`` returns, with 0 for None. Errors and signals are reported on stderr.
    """
    try:
        return work() or 0
    except Interrupted as interrupted:
        if is_first_rank():
            print(f"{command}: {interrupted}. Run the same command again to continue.", file=sys.stderr)
        return 128 + interrupted.signum
    except KeyboardInterrupt:
        print(f"{command}: stopped. Run the same command again to continue.", file=sys.stderr)
        return 130
    except (OSError, ValueError, RunInUse) as error:
        if is_reported_here(error):
            print(f"{command}: {error}", file=sys.stderr)
        return 1


def print_conclusion(command: str, conclusion: Conclusion | None, *also: str) -> None:
    """Print the warnings, the summary and the path of the page, and then the lines of ``also``."""
    if conclusion is not None:
        for warning in conclusion.warnings:
            print(f"{command}: {warning}", file=sys.stderr)
        print(f"\n{conclusion.summary}\nThe page: {conclusion.page}", *also, sep="\n")


class StudyArguments(Protocol):
    """The arguments that all studies have in common."""

    @property
    def config(self) -> TrainConfig:
        """The configuration that all runs share."""

    @property
    def out(self) -> Path | None:
        """Folder of the study; None for one named after the command and the model."""


A = TypeVar("A", bound=StudyArguments)


def parse(
    kind: type[A],
    argv: Sequence[str],
    *,
    command: str,
    summary: str,
    study: str,
    lr: str,
    optimizer: OptimizerConfig | None = None,
    required: Sequence[str] = (),
    replaced: Mapping[str, str] | None = None,
) -> tuple[A, Path]:
    """Parse the arguments of a study, and return them with its folder.

    Args:
        kind: a dataclass of the arguments.
        argv: the command line, the model first.
        command: the command's name.
        summary: its purpose in one sentence.
        study: a noun for the study, with its article, for messages.
        lr: an example of how learning rates are given, for messages.
        optimizer: the default settings of the optimizer.
        required: names of the arguments without a default, except the data.
        replaced: options of `merit train` that the study has not, and what to do instead.
    """
    model_name = argv[0] if argv else "--help"
    if not is_model(model_name):
        refuse_model(command, summary, model_name)
    name, model = find_model(model_name)
    config = TrainConfig(data=tyro.MISSING, model=model, optimizer=optimizer or OptimizerConfig())
    make: Callable[..., A] = kind  # a dataclass, which the protocol cannot express
    default = make(config=config, **dict.fromkeys(required, tyro.MISSING))
    replaced = {
        "--seed": f"in {study} write for example --seeds 0 1 2",
        "--optimizer.name": f"in {study} write for example --optimizers lamb merit",
        "--optimizer.lr": f"in {study} write for example {lr}",
        **(replaced or {}),
    }
    _refuse_replaced(argv, replaced)
    arguments = tyro.cli(
        kind,
        default=default,
        args=argv[1:],
        prog=f"merit {command} {model_name}",
        config=(tyro.conf.AvoidSubcommands,),  # the model has been chosen
        registry=rules(without=[_field(config, option) for option in replaced]),
    )
    refuse_replaced_vocab(argv, arguments.config)
    return arguments, arguments.out or Path("runs", f"{command}-{name}")


def _refuse_replaced(argv: Sequence[str], replaced: Mapping[str, str]) -> None:
    """Raise if an option is given that a study varies between its runs."""
    for option, way_out in replaced.items():
        if (value := typed(argv, option)) is not None:
            raise ValueError(f"{option} {value} applies to a single run; {way_out}")


def _field(config: TrainConfig, option: str) -> tuple[type, str]:
    """Return the field of an option, with its class."""
    *group, name = option.removeprefix("--").replace("-", "_").split(".")
    return type(getattr(config, group[0]) if group else config), name


def refuse_model(command: str, summary: str, model_name: str) -> NoReturn:
    """Print the help, or an error about the model, and exit."""
    parser = argparse.ArgumentParser(
        prog=f"merit {command}",
        usage=f"merit {command} MODEL --data FOLDER [options]",
        description=f"{summary} The models are: {KNOWN}.",
        epilog=f"The options of a model: merit {command} MODEL --help",
    )
    if model_name in ("-h", "--help"):
        parser.print_help()
        raise SystemExit(0)
    if model_name.startswith("-"):
        parser.error(f"the model is missing; it comes first. The models are: {KNOWN}")
    try:
        find_model(model_name)
    except ValueError as error:
        parser.error(str(error))
    raise AssertionError(f"{model_name} is a model")
