"""`merit train`: train a language model, or resume a run.

`--list` and `--resume`, for machines that only train, need neither tyro nor what studies and reports need.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from merit_lab import train as training
from merit_lab.models.config import PRESETS
from merit_lab.models.names import find_model, is_model, num_parameters
from merit_lab.runs import NotWritten, Run, RunInUse
from merit_lab.train import list_command
from merit_lab.train.config import TrainConfig
from merit_lab.train.rank import is_first_rank, is_reported_here
from merit_lab.train.signals import Interrupted

if TYPE_CHECKING:
    from merit_lab.train.start import Resume


class Parsed(NamedTuple):
    """The arguments of ``train``."""

    config: TrainConfig | None
    folder: Path
    resume: Resume = False


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""
    try:
        if "--list" in argv:
            return list_command.main(list(argv))
        config, folder, resume = parse(list(argv))
        # This imports torch, which parsing does not need.
        run = training.train(config, folder, resume=resume)
    except Interrupted as interrupted:
        way = "The same command continues." if "--list" in argv else f"To resume: {_resume_command(folder)}"
        if is_first_rank():
            print(f"merit train: {interrupted}. {way}", file=sys.stderr)
        return 128 + interrupted.signum
    except (OSError, ValueError, RunInUse) as error:
        if is_reported_here(error):
            way = f": {_resume_command(folder)}" if isinstance(error, NotWritten) else ""
            print(f"merit train: {error}{way}", file=sys.stderr)
        return 1
    has_diverged = run.status == "diverged"
    if is_first_rank() and has_diverged:
        print(f"merit train: the run diverged; its metrics are in {run.folder}", file=sys.stderr)
    elif is_first_rank():
        loss = "" if run.last_loss is None else f", with a validation loss of {run.last_loss:.4f}"
        print(f"The run is in {run.folder}{loss}.\nTo see it: merit report {run.folder}")
    return int(has_diverged)


def parse(argv: list[str]) -> Parsed:
    """Return what the command line asks for."""
    if argv and is_model(argv[0]) and "--resume" not in argv:
        from merit_lab.train import arguments  # which imports tyro

        config, folder, auto = arguments.parse(argv)
        return Parsed(config, folder, resume="auto" if auto else False)
    options = _parse_without_model(argv or ["--help"])
    folder = options.resume
    named = _config_of(folder).optimizer.classes_to_import()
    # A run directory may come from anywhere, and importing a module runs its code.
    if unknown := [name for name in named if name not in options.trust]:
        raise ValueError(
            f"{folder / 'config.json'} names {' and '.join(unknown)}; to resume the run, that code has to be "
            f"imported and run. If you trust it: {_resume_command(folder)}"
        )
    moved = options.data and dataclasses.replace(_config_of(folder), data=options.data)
    return Parsed(moved, folder, resume=True)


def _config_of(folder: Path) -> TrainConfig:
    return TrainConfig.from_dict(Run.open(folder).config)


def _resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    named = _config_of(folder).optimizer.classes_to_import()
    return shlex.join(["merit", "train", "--resume", str(folder), *(["--trust", *named] if named else [])])


def _parse_without_model(argv: list[str]) -> argparse.Namespace:
    """Parse the options for an existing run, whose model and configuration are already known."""
    models = "\n".join(
        f"  {name:<14} {num_parameters(model) / 1e6:.1f}M parameters" for name, model in PRESETS.items()
    )
    parser = argparse.ArgumentParser(
        prog="merit train",
        usage="merit train MODEL --data FOLDER [--auto-resume] [options]\n"
        "       merit train --resume FOLDER [--data FOLDER] [--trust MODULE:CLASS ...]\n"
        "       merit train --list FILE --out FOLDER [--jobs N]",
        description="Train a language model, or resume a run that was stopped for any reason.\n"
        f"Under torchrun all processes train together.\n\nmodels:\n{models}\n"
        "  hf:FOLDER      any causal model of Hugging Face's transformers, from its config.json",
        epilog="For the options of a model: merit train MODEL --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="resume the run in this folder")
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="with --resume: the data, if it moved")
    parser.add_argument(
        "--trust",
        metavar="MODULE:CLASS",
        nargs="+",
        action="extend",
        default=[],
        help="with --resume: the run's optimizers that may be imported, which runs their code",
    )
    if is_model(argv[0]):
        parser.error(
            "a run is resumed with the model and the options that it started with; resume it without "
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
        parser.error(f"{complaint}a run is resumed with the options that it started with")
    return arguments
