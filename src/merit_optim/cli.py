"""The `merit` command.

Each subcommand is a function that takes its own arguments and returns an exit status. It is imported
when it is called: `merit --help` must start at once and must work where only the base package is
installed.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from merit_optim import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, and where it is."""

    summary: str
    module: str
    """Its ``main(arguments)`` runs the subcommand."""

    def load(self) -> Callable[[list[str]], int]:
        """Import it; a missing optional package ends the program with the way out."""
        try:
            main: Callable[[list[str]], int] = import_module(self.module).main
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("merit_optim"):
                raise
            sys.exit(
                f"merit: this command needs {error.name}, which is not installed; the lab's packages come "
                "with: pip install 'merit-optim[lab]'"
            )
        return main


COMMANDS = {
    "info": Command(
        "Print versions, devices, and which optimizer engines can be used here", "merit_optim.info"
    ),
    "prepare": Command("Turn text into token files to train on", "merit_optim.lab.data.command"),
    "train": Command(
        "Train a language model, or go on with a run that stopped", "merit_optim.lab.train.command"
    ),
    "compare": Command(
        "Train with several optimizers and seeds, and report", "merit_optim.lab.compare.command"
    ),
    "demo": Command("AdamW, LAMB and MERIT on a text that every machine has", "merit_optim.lab.compare.demo"),
    "report": Command("Make a page, figures and tables from runs", "merit_optim.lab.report.command"),
    "bench": Command("Time an optimizer's step on this machine", "merit_optim.lab.bench.command"),
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
        return COMMANDS[name].load()(rest)
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
