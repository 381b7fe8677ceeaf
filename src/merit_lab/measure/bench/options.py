"""The common options of the benchmarks, checked before anything is timed."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch


def add_options(parser: argparse.ArgumentParser, *, seconds: float, unit: str) -> None:
    """Add --device, --seconds for each ``unit``, and --out."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=duration,
        default=seconds,
        help=f"seconds for each {unit} (%(default)s); at least five steps",
    )
    parser.add_argument("--out", "--output", dest="output", type=new_file, help="write the results as JSON")


def device(text: str) -> torch.device:
    """Parse an available device. A CUDA device becomes the current one, whose clock and memory are read."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; it must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not available; torch sees {count} CUDA devices: use "
                + ("cpu" if count == 0 else f"cuda:0 to cuda:{count - 1}, or cpu")
            )
        torch.cuda.set_device(device.index or 0)
    return device


def duration(text: str) -> float:
    """Parse a number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds; it must be finite and at least 0"
        )
    return value


def count(text: str) -> int:
    """Parse a number of elements."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of elements; it must be a whole number above 0"
        )
    return int(text)


def new_file(text: str) -> Path:
    """Parse the path of a file to write. Create its folder, and check that it can be written."""
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
