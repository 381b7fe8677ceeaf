"""What the commands of studies share: arguments, how trials are trained or listed, the exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from merit_lab.command_line import rules
from merit_lab.folders import refuse_file
from merit_lab.models.names import KNOWN, find_model
from merit_lab.runs import RunInUse
from merit_lab.tables import Table, print_table
from merit_lab.train import Interrupted, OptimizerConfig, TrainConfig
from merit_lab.train.arguments import refuse_replaced_vocab, typed
from merit_lab.train.rank import is_first_rank, is_reported_here

if TYPE_CHECKING:
    from merit_lab.results.page import Page
    from merit_lab.study.trial import Trial


@dataclass(frozen=True, kw_only=True)
class StudyArguments:
    """The arguments that all studies have."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    optimizers: tuple[str, ...] = ("adamw", "lamb-uncorrected", "merit")
    """The optimizers, in order, as NAME or NAME,OPTION=VALUE,..."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the data order."""
    out: Path | None = None
    """Folder of the study, which all machines that work on it share. None: runs/COMMAND-MODEL."""
    jobs: int = 1
    """Runs at the same time: several of a small model on one GPU, up to the number of cores on a CPU."""
    storage: str | None = None
    """URL of a database that holds the trials: postgresql://user@host/name. None: a journal in OUT."""
    list: Path | None = None
    """Train nothing: write the runs that are missing into this file, for `merit train --list`."""


class Listed(Exception):
    """Raised when the missing runs were written into a file instead of being trained."""


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
    except Listed as listed:
        print(listed)
        return 0
    except (OSError, ValueError, RunInUse) as error:
        if is_reported_here(error):
            print(f"{command}: {error}", file=sys.stderr)
        return 1


def train_all(trials: Sequence[Trial], folder: Path, arguments: StudyArguments) -> None:
    """Train the trials that are not done, or write them into the file that the arguments name."""
    from merit_lab.results.page import check_folder
    from merit_lab.study.search import carry_out, write_list  # imports torch, which --help does not need

    check_folder(folder / "report")  # before training, not after it
    left = [trial for trial in trials if not trial.is_done]
    if arguments.list is not None and left:
        write_list(left, arguments.list)
        raise Listed(
            f"{len(left)} of {len(trials)} runs are missing; they are listed in {arguments.list}. Train them "
            f"with merit train --list {arguments.list} --out {folder}, then give the same command again."
        )
    carry_out(trials, folder, arguments.jobs, arguments.storage)


def conclude(command: str, make: Callable[[], Page], folder: Path) -> None:
    """Print what a study answers, with tables that are not folded, and write its page; on the first rank."""
    if not is_first_rank():
        return
    page = make()
    for section in page.sections:
        for part in section.parts:
            if isinstance(part, Table) and not section.folded:
                print_table(part)
    for warning in page.warnings:
        print(f"{command}: {warning}", file=sys.stderr)
    print(f"\n{page.summary}\nThe page: {page.write(folder / 'report')}")


A = TypeVar("A", bound=StudyArguments)


def run_study(
    name: str,
    kind: type[A],
    argv: Sequence[str],
    work: Callable[[A, Path], Callable[[], Page]],
    *,
    replaced: Mapping[str, str],
    optimizer: OptimizerConfig | None = None,
) -> int:
    """Run the command of a study and return its exit status: 128 + n after signal n, as in shells.

    Args:
        name: the command's name.
        kind: a dataclass of its arguments, whose docstring is the help.
        argv: the command line, the model first.
        work: trains in a folder, and returns what makes the page.
        replaced: options of `merit train` that the study has not, and what to write instead.
        optimizer: the default settings of the optimizer.
    """

    def whole() -> None:
        arguments, folder = _parse(name, kind, argv, replaced, optimizer or OptimizerConfig())
        refuse_file(folder)
        if arguments.config.measure.validation_every == 0:
            raise ValueError("measure.validation_every is 0; a study compares validation losses")
        conclude(f"merit {name}", work(arguments, folder), folder)

    return exit_status(f"merit {name}", whole)


def _parse(
    command: str, kind: type[A], argv: Sequence[str], replaced: Mapping[str, str], optimizer: OptimizerConfig
) -> tuple[A, Path]:
    """The arguments of a study and its folder."""
    if not argv or argv[0] in ("-h", "--help"):
        about = (kind.__doc__ or "").partition("\n")[0]
        print(f"usage: merit {command} MODEL --data FOLDER [options]\n\n{about}\n\nThe models are: {KNOWN}.")
        print(f"The options of a model: merit {command} MODEL --help")
        raise SystemExit(0)
    if argv[0].startswith("-"):
        raise ValueError(f"the model is missing; it comes first. The models are: {KNOWN}")
    name, model = find_model(argv[0])
    for option, instead in replaced.items():
        if (value := typed(argv, option)) is not None:
            raise ValueError(
                f"{option} {value} is of a single run; `merit {command}` takes for example {instead}"
            )
    config = TrainConfig(data=tyro.MISSING, model=model, optimizer=optimizer)
    required = [one.name for one in fields(kind) if one.default is MISSING and one.name != "config"]
    # What a study calls as a run does, it sets itself.
    names = {one.name for one in fields(TrainConfig)}
    own = [(TrainConfig, one.name) for one in fields(kind) if one.name in names]
    make: Any = kind
    arguments: A = tyro.cli(
        kind,
        default=make(config=config, **dict.fromkeys(required, tyro.MISSING)),
        args=argv[1:],
        prog=f"merit {command} {argv[0]}",
        config=(tyro.conf.AvoidSubcommands,),  # the model has been chosen
        registry=rules(without=[*(_field(config, option) for option in replaced), *own]),
    )
    refuse_replaced_vocab(argv, arguments.config)
    return arguments, arguments.out or Path("runs", f"{command}-{name}")


def _field(config: TrainConfig, option: str) -> tuple[type, str]:
    """Return the field of an option, with its class."""
    *group, name = option.removeprefix("--").replace("-", "_").split(".")
    return type(getattr(config, group[0]) if group else config), name
