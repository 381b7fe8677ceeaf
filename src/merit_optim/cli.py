"""The `merit` command.

Each subcommand is a function that takes its arguments and returns an exit status. It is imported when it is
called: `merit --help` must start fast and work if only the base package is installed.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO

from merit_optim import __version__
from merit_optim.spelling import did_you_mean


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, and its module."""

    summary: str
    module: str
    """Its ``main(arguments)``, or the function after a colon, runs the subcommand."""

    def run(self, name: str, arguments: list[str]) -> int:
        """Import and run it. If an optional package is missing, exit with the command that installs it."""
        try:
            module, _, function = self.module.partition(":")
            status: int = getattr(import_module(module), function or "main")(arguments)
        except ModuleNotFoundError as error:
            if error.name is None:  # raised by the lab, with the way out
                sys.exit(f"merit {name}: {error}")
            package = error.name.partition(".")[0]
            if package in ("merit_optim", "merit_lab"):
                raise
            sys.exit(
                f"merit {name}: this needs {package}, which is not installed; install it with: "
                "pip install 'merit-optim[lab]'"
            )
        return status


COMMANDS = {
    "info": Command("Print versions, devices and available engines", "merit_optim.info"),
    "demo": Command("Compare five optimizers on a small text", "merit_lab.study.demo"),
    "prepare": Command("Convert text to token files for training", "merit_lab.data.command"),
    "train": Command("Train a language model, or resume a run", "merit_lab.train.command"),
    "compare": Command("Train with several optimizers and seeds, and report", "merit_lab.study.compare"),
    "sweep": Command("Tune the learning rate or another setting", "merit_lab.study.sweep"),
    "arena": Command("Tune several optimizers with equal budgets, and rank them", "merit_lab.study.arena"),
    "advise": Command("Suggest settings for another run from records", "merit_lab.study.advise"),
    "scale": Command("Measure steps to a target loss against the batch size", "merit_lab.study.scale"),
    "batch-size": Command(
        "Estimate the useful batch size of a run from its gradient noise", "merit_lab.measure.noise"
    ),
    "curvature": Command(
        "Measure the Hessian at a checkpoint of a run", "merit_lab.measure.curvature.command"
    ),
    "evaluate": Command("Run zero-shot tasks on a checkpoint of a run", "merit_lab.measure.evaluate.command"),
    "export": Command(
        "Export a checkpoint as a Hugging Face model", "merit_lab.measure.evaluate.command:export_main"
    ),
    "report": Command("Make a page, figures and tables from runs", "merit_lab.results.command"),
    "runs": Command("List runs, or write all they recorded as two tables", "merit_lab.runs.command"),
    "keep": Command(
        "Copy the records of runs, small enough for version control", "merit_lab.runs.keep_command"
    ),
    "reproduce": Command("Repeat the paper's figures and tables, with verdicts", "merit_lab.paper.command"),
    "bench": Command("Time an optimizer's step on this machine", "merit_lab.measure.bench.command"),
    "completion": Command("Print shell completion for bash, zsh or fish", "merit_lab.completion"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _streams_that_may_close():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    parser = _build_parser()
    if not arguments:
        parser.print_help()
        return 0
    name, *rest = arguments
    if name in COMMANDS:
        try:
            return COMMANDS[name].run(name, rest)
        except KeyboardInterrupt:  # commands that can be resumed handle this themselves
            print(f"\nmerit {name}: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
    if not name.startswith("-"):
        parser.error(_unknown_command(name))
    parser.parse_args(arguments)
    return 0


@contextlib.contextmanager
def _streams_that_may_close() -> Iterator[None]:
    """End quietly when nobody reads standard output any more, as in `merit info | head`.

    Without a reader of standard error a command goes on: those that train write their progress there, and
    a run must not be lost with its reader.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is not None:  # it is None where the shell has closed it: `merit info >&-`
        sys.stdout = _Stream(sys.stdout, ends=True)
    if sys.stderr is not None:
        sys.stderr = _Stream(sys.stderr, ends=False)
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a failure is handled, and not by the interpreter at exit
    finally:
        sys.stdout, sys.stderr = before


class _Stream:
    """A stream that, once it cannot be written to, ends the program or drops what it is given.

    It raises SystemExit and no OSError, which commands would report as an error of theirs.
    """

    def __init__(self, stream: TextIO, *, ends: bool) -> None:
        self._stream, self._ends = stream, ends

    def write(self, text: str) -> int:
        with self._handled():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._handled():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _handled(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # also for the flush at exit
            if self._ends:
                if isinstance(error, BrokenPipeError):
                    sys.exit(128 + signal.SIGPIPE)
                sys.exit(f"merit: cannot write to standard output: {error.strerror}")


def _build_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"    {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="merit",
        usage="merit [--version] [--help] command ...",
        description="Optimizers for large-batch language model training, and a lab to compare them.",
        epilog="\n".join(["commands (each has its own --help):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"merit-optim {__version__}")
    return parser


def _unknown_command(name: str) -> str:
    hint = did_you_mean(name, COMMANDS, otherwise=";")
    return f"unknown command {name!r}{hint} the commands are: {', '.join(COMMANDS)}"
