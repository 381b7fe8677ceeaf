"""`merit train`: train a language model, or go on with a run that was stopped."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from merit_lab import train as training
from merit_lab.models.config import PRESETS
from merit_lab.models.names import find_model, is_model, num_parameters
from merit_lab.record import Run, RunInUse
from merit_lab.train.config import TrainConfig
from merit_lab.train.rank import is_first_rank
from merit_lab.train.signals import Interrupted

if TYPE_CHECKING:
    from merit_lab.train.loop import Resume


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a language model. Under torchrun all processes train together."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run directory to make. None: runs/MODEL-OPTIMIZER-lrRATE-seedSEED."""
    auto_resume: bool = False
    """Go on with the run if it is there already, else begin it: one command for a scheduler to repeat."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells have it."""
    try:
        config, folder, resume = parse(list(argv))
        run = training.train(config, folder, resume=resume)  # which brings torch: parsing does without
    except Interrupted as interrupted:
        if is_first_rank():
            print(f"merit train: {interrupted}. Go on with: {_resume_command(folder)}", file=sys.stderr)
        return 128 + interrupted.signum
    except (OSError, ValueError, RunInUse) as error:
        print(f"merit train: {error}", file=sys.stderr)
        return 1
    if run.status == "diverged":
        if is_first_rank():
            print(f"merit train: the run diverged; {run.folder} has its numbers", file=sys.stderr)
        return 1
    if is_first_rank():
        print(_last_words(run))
    return 0


def _last_words(run: Run) -> str:
    """Where the run is, what it came to, and what one may do next."""
    losses = [line["loss"] for line in run.lines() if line["kind"] == "validation"]
    loss = f", with a validation loss of {losses[-1]:.4f}" if losses else ""
    return f"The run is in {run.folder}{loss}.\nTo see it: merit report {run.folder}"


def parse(argv: list[str]) -> tuple[TrainConfig | None, Path, Resume]:
    """The configuration, the run directory, and whether to go on with what is there."""
    given = argv[0] if argv else "--help"
    if not is_model(given) or "--resume" in argv:
        asked = _parse_without_model(argv or ["--help"])
        folder = asked.resume
        _check_trust(folder, asked.trust)
        own = _config_of(folder)
        if asked.data is not None:
            own = dataclasses.replace(own, data=asked.data)
        if asked.steps is not None:
            longer = asked.out or folder.with_name(f"{folder.name}-steps{asked.steps}")
            return own.extended(asked.steps), longer, folder
        return (None if asked.data is None else own), folder, True
    name, model = find_model(given)
    arguments = tyro.cli(
        Arguments,
        default=Arguments(config=TrainConfig(data=tyro.MISSING, model=model)),
        args=argv[1:],
        prog=f"merit train {given}",
        config=(tyro.conf.AvoidSubcommands,),  # the model has been chosen
    )
    config = arguments.config
    optimizer = config.optimizer.resolve(model)
    kind = optimizer.name.rpartition(":")[2]  # of MODULE:CLASS, the class
    default = Path("runs") / f"{name}-{kind}-lr{optimizer.lr:g}-seed{config.seed}"
    return config, arguments.out or default, "auto" if arguments.auto_resume else False


def _config_of(folder: Path) -> TrainConfig:
    return TrainConfig.from_dict(Run.open(folder).config)


def _check_trust(folder: Path, trusted: Collection[str]) -> None:
    """Raise where a run would have modules imported that nobody named on the command line.

    A run directory may come from anywhere, and what is imported is run.
    """
    named = _config_of(folder).optimizer.modules_of_others()
    if unknown := [name for name in named if name not in trusted]:
        raise ValueError(
            f"{folder / 'config.json'} names {' and '.join(unknown)}, which going on would import, and so "
            f"run. If you trust that: {_resume_command(folder)}"
        )


def _resume_command(folder: Path) -> str:
    """What one types to go on with a run."""
    named = _config_of(folder).optimizer.modules_of_others()
    return shlex.join(["merit", "train", "--resume", str(folder), *(["--trust", *named] if named else [])])


def _parse_without_model(argv: list[str]) -> argparse.Namespace:
    """What is to say of a run that is there: no more than these options."""
    models = "\n".join(
        f"  {name:<14} {num_parameters(model) / 1e6:.1f}M parameters" for name, model in PRESETS.items()
    )
    parser = argparse.ArgumentParser(
        prog="merit train",
        usage="merit train MODEL --data FOLDER [--auto-resume] [options]\n"
        "       merit train --resume FOLDER [--data FOLDER] [--trust MODULE:CLASS ...]\n"
        "       merit train --resume FOLDER --steps N [--out FOLDER]",
        description="Train a language model, or go on with a run that was stopped, by whatever.\n"
        f"Under torchrun all processes train together.\n\nmodels:\n{models}\n"
        "  hf:FOLDER      any causal model of Hugging Face's transformers, by its config.json",
        epilog="The options of a model: merit train MODEL --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="go on with the run in this folder")
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="with --resume: the data, if they moved")
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help="with --resume: a longer run that begins with this one's steps, if its schedule allows it",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="with --steps: the longer run's folder (FOLDER-stepsN)"
    )
    parser.add_argument(
        "--trust",
        metavar="MODULE:CLASS",
        nargs="+",
        action="extend",
        default=[],
        help="with --resume: optimizers of the run's that may be imported, which runs their code",
    )
    if is_model(argv[0]):
        parser.error(
            "a run goes on with the model and the options that it began with; resume it without "
            f"{argv[0]}: merit train --resume FOLDER"
        )
    if not argv[0].startswith("-"):
        try:
            find_model(argv[0])
        except ValueError as error:
            parser.error(str(error))
    arguments, unknown = parser.parse_known_args(argv)
    complaint = f"unrecognized arguments: {' '.join(unknown)}; " if unknown else ""
    if arguments.resume is None:
        parser.error(f"{complaint}the model is missing; it comes first: merit train tiny --data FOLDER")
    if unknown:
        parser.error(f"{complaint}a run goes on with the options that it began with")
    if arguments.out is not None and arguments.steps is None:
        parser.error("--out is for a longer run, with --steps; what is resumed stays in its folder")
    return arguments
