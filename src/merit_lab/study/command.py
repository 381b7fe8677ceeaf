"""What the commands of studies share: arguments, how trials are trained or listed, the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import tyro

from merit_lab.command_line import rules
from merit_lab.models.names import KNOWN, find_model, is_model
from merit_lab.runs import RunInUse
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
    from merit_lab.study.state import is_done

    check_folder(folder / "report")  # before training, not after it
    left = [trial for trial in trials if not is_done(trial.folder)]
    if arguments.list is not None and left:
        write_list(left, arguments.list)
        raise Listed(
            f"{len(left)} of {len(trials)} runs are missing; they are listed in {arguments.list}. Train them "
            f"with merit train --list {arguments.list} --out {folder}, then give the same command again."
        )
    carry_out(trials, folder, arguments.jobs, arguments.storage)


def conclude(command: str, make: Callable[[], Page], folder: Path) -> int:
    """Print the answer of a study and write its page; on the first rank."""
    if is_first_rank():
        from merit_lab.study.answer import show

        page = make()
        show(page, command)
        print(f"The page: {page.write(folder / 'report')}")
    return 0


A = TypeVar("A", bound=StudyArguments)


def parse(
    kind: type[A],
    argv: Sequence[str],
    *,
    command: str,
    study: str,
    optimizer: OptimizerConfig | None = None,
    replaced: Mapping[str, str],
) -> tuple[A, Path]:
    """Parse the arguments of a study, and return them with its folder.

    Args:
        kind: a dataclass of the arguments; its docstring is the help.
        argv: the command line, the model first.
        command: the command's name.
        study: a noun for the study, with its article, for messages.
        optimizer: the default settings of the optimizer.
        replaced: options of `merit train` that the study has not, and what to write instead.
    """
    model_name = argv[0] if argv else "--help"
    if not is_model(model_name):
        _refuse_model(command, (kind.__doc__ or "").partition("\n")[0], model_name)
    name, model = find_model(model_name)
    config = TrainConfig(data=tyro.MISSING, model=model, optimizer=optimizer or OptimizerConfig())
    required = [one.name for one in fields(kind) if one.default is MISSING and one.name != "config"]
    # What a study calls as a run does, it sets itself.
    names = {one.name for one in fields(TrainConfig)}
    own = [(TrainConfig, one.name) for one in fields(kind) if one.name in names]
    make: Any = kind
    for option, instead in replaced.items():
        if (value := typed(argv, option)) is not None:
            raise ValueError(
                f"{option} {value} applies to a single run; in {study} write for example {instead}"
            )
    arguments: A = tyro.cli(
        kind,
        default=make(config=config, **dict.fromkeys(required, tyro.MISSING)),
        args=argv[1:],
        prog=f"merit {command} {model_name}",
        config=(tyro.conf.AvoidSubcommands,),  # the model has been chosen
        registry=rules(without=[*(_field(config, option) for option in replaced), *own]),
    )
    refuse_replaced_vocab(argv, arguments.config)
    return arguments, arguments.out or Path("runs", f"{command}-{name}")


def _field(config: TrainConfig, option: str) -> tuple[type, str]:
    """Return the field of an option, with its class."""
    *group, name = option.removeprefix("--").replace("-", "_").split(".")
    return type(getattr(config, group[0]) if group else config), name


def _refuse_model(command: str, summary: str, model_name: str) -> NoReturn:
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
