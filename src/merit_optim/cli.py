"""The `merit` command.

To add a subcommand, write its two functions and enter them in `COMMANDS`. Keep imports of torch
and of optional packages inside the functions: `merit --help` must start at once and must work
where only the base package is installed.
"""

import argparse
import difflib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from merit_optim import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, what adds its arguments, and what runs it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    if not arguments:
        parser.print_help()
        return 0
    # Before argparse sees it: its own message names every choice but not the nearest one.
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        parser.error(_unknown_command(arguments[0]))
    options = parser.parse_args(arguments)
    return COMMANDS[options.command].run(options)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="merit", description="MERIT: an optimizer for large-batch language model training."
    )
    parser.add_argument("--version", action="version", version=f"merit-optim {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=f"{command.summary}.")
        command.add_arguments(subparser)
    return parser


def _unknown_command(given: str) -> str:
    nearest = difflib.get_close_matches(given, COMMANDS, n=1)
    suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown command {given!r}; {suggestion}the commands are: {', '.join(COMMANDS)}"


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def _info(options: argparse.Namespace) -> int:
    del options
    for label, value in _describe_installation():
        print(f"{label:<12} {value}")
    return 0


def _describe_installation() -> Iterator[tuple[str, str]]:
    """Yield (label, value) lines; a label is empty where it repeats the one above."""
    import torch

    from merit_optim.optim import engines

    yield "merit-optim", __version__
    yield "python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    yield "torch", torch.__version__
    yield "triton", _triton_version()
    yield "devices", f"cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    for device in _accelerators():
        yield "", device
    label = "engines"
    for engine, obstacle in engines.availability().items():
        status = "available" if obstacle is None else f"not available: {obstacle}"
        yield label, f"{engine}: {status}"
        label = ""


def _triton_version() -> str:
    try:
        import triton
    except ImportError as error:
        return f"not available: {error}"
    return str(triton.__version__)


def _accelerators() -> Iterator[str]:
    """Yield one line for each device other than the CPU that torch can use."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    for index in range(torch.accelerator.device_count()):
        device = f"{accelerator.type}:{index}"
        if accelerator.type == "cuda":
            properties = torch.cuda.get_device_properties(index)
            gibibytes = properties.total_memory / 2**30
            device += f": {properties.name}, {gibibytes:.0f} GiB"
        yield device


COMMANDS = {
    "info": Command(
        "Print versions, devices, and which optimizer engines can be used here",
        _no_arguments,
        _info,
    ),
}
