"""The `merit` command.

Each subcommand is a function that takes its own arguments and returns an exit status. It is imported
when it is called: `merit --help` must start at once and must work where only the base package is
installed.
"""

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from merit_optim import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, and where it is."""

    summary: str
    module: str
    """Its ``main(arguments)`` runs the subcommand."""

    def run(self, name: str, arguments: list[str]) -> int:
        """Import and run it; a missing optional package ends the program with the way out."""
        try:
            status: int = import_module(self.module).main(arguments)
        except ModuleNotFoundError as error:
            if error.name is None:  # the lab's own words, which name the way out
                sys.exit(f"merit {name}: {error}")
            package = error.name.partition(".")[0]
            if package in ("merit_optim", "merit_lab"):
                raise
            sys.exit(
                f"merit {name}: this needs {package}, which is not installed; it comes with: "
                "pip install 'merit-optim[lab]'"
            )
        return status


COMMANDS = {
    "info": Command("Print versions, devices, and which engines can be used here", "merit_optim.info"),
    "demo": Command("AdamW, LAMB and MERIT on a text that every machine has", "merit_lab.compare.demo"),
    "prepare": Command("Turn text into token files to train on", "merit_lab.data.command"),
    "train": Command("Train a language model, or go on with a run that stopped", "merit_lab.train.command"),
    "compare": Command("Train with several optimizers and seeds, and report", "merit_lab.compare.command"),
    "sweep": Command("Find each optimizer's learning rate, or another setting", "merit_lab.sweep.command"),
    "arena": Command("Tune several optimizers alike, and rank them", "merit_lab.arena.command"),
    "advise": Command("What arenas say about another model or batch", "merit_lab.arena.advise_command"),
    "scale": Command("Steps to a target loss against the batch size", "merit_lab.scale.command"),
    "batch-size": Command(
        "Which batch still pays for a run, by its gradient noise", "merit_lab.noise.command"
    ),
    "curvature": Command("The Hessian of the loss at a checkpoint of a run", "merit_lab.curvature.command"),
    "evaluate": Command("Zero-shot tasks on a checkpoint of a run", "merit_lab.evaluate.command"),
    "export": Command("A run's checkpoint as a Hugging Face model", "merit_lab.evaluate.export_command"),
    "report": Command("Make a page, figures and tables from runs", "merit_lab.report.command"),
    "show": Command("List runs, or print what they recorded as JSON", "merit_lab.report.show_command"),
    "keep": Command(
        "Copy what runs recorded, small enough for version control", "merit_lab.report.keep_command"
    ),
    "reproduce": Command(
        "Repeat the paper's figures and tables, with verdicts", "merit_lab.reproduce.command"
    ),
    "bench": Command("Time an optimizer's step on this machine", "merit_lab.bench.command"),
    "completion": Command("Let bash, zsh or fish complete all of this", "merit_lab.completion"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    if not arguments:
        parser.print_help()
        return 0
    name, *rest = arguments
    if name in COMMANDS:
        try:
            status = COMMANDS[name].run(name, rest)
            sys.stdout.flush()
        except BrokenPipeError:  # of `merit info | head`, for example
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
            return 128 + signal.SIGPIPE
        except KeyboardInterrupt:  # those that can go on from where they were say so themselves
            print(f"\nmerit {name}: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        return status
    if not name.startswith("-"):
        parser.error(_unknown_command(name))
    parser.parse_args(arguments)
    return 0


def _build_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"    {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="merit",
        usage="merit [--version] [--help] command ...",
        description="MERIT: an optimizer for large-batch language model training.",
        epilog="\n".join(["commands (each has its own --help):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"merit-optim {__version__}")
    return parser


def _unknown_command(given: str) -> str:
    nearest = difflib.get_close_matches(given, COMMANDS, n=1)
    suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown command {given!r}; {suggestion}the commands are: {', '.join(COMMANDS)}"
