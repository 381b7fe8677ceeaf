"""The options that the benchmarks have in common, checked before anything is timed."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch


def add_options(parser: argparse.ArgumentParser, *, seconds: float, what: str) -> None:
    """Add --device, --seconds for each ``what``, and --output."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=duration,
        default=seconds,
        help=f"for each {what} (%(default)s); at least five steps",
    )
    parser.add_argument("--output", type=new_file, help="write the results as JSON")


def device(text: str) -> torch.device:
    """A device that is there. One of CUDA's becomes the current one, whose clock and memory are read."""
    try:
        found = torch.device(text)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; it must be cpu, cuda or cuda:N")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not there; torch sees {count} of CUDA's devices: use "
                + ("cpu" if count == 0 else f"cuda:0 to cuda:{count - 1}, or cpu")
            )
        torch.cuda.set_device(found.index or 0)
    return found


def duration(text: str) -> float:
    """A number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds; it must be finite and at least 0"
        )
    return value


def count(text: str) -> int:
    """A number of elements."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of elements; it must be a whole number above 0"
        )
    return int(text)


def new_file(text: str) -> Path:
    """A file that can be written, which is tried; the folder it is in is made."""
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: {error.strerror}; name another file"
        ) from None
    return path
