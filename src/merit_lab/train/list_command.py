"""`merit train --list`: train the runs of a list, side by side, and show how far they are."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from merit_lab.checks import check_at_least
from merit_lab.json_values import decode
from merit_lab.models.names import find_model
from merit_lab.runs import OVER, Run, holds_run
from merit_lab.train.config import TrainConfig

_DESCRIPTION = """Train the runs of a list, each in a folder of its own inside --out. The same command
continues: what is over is not repeated. It may run several times, and on machines that share the folder.

Each line of the list is a JSON object: the settings of a run by their names, nested or dotted. The model may
be a preset, and "name" names the run's folder:

  {"name": "a", "data": "data/mix", "model": "nano-10m-bpe", "optimizer.lr": 0.01, "steps": 800, "batch": 128}

Attention is observed only in runs that ask for it with measure.attention_every or measure.entropy_every."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit status: 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="merit train", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", metavar="FILE", type=Path, required=True, help="a JSON object a line")
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="processes, on one GPU or several")
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="the data of lines that name none")
    arguments = parser.parse_args(argv)
    check_at_least("--jobs", arguments.jobs, 1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a list is trained by --jobs processes, each by itself; start it without torchrun")
    runs = read_list(arguments.list, arguments.out, arguments.data)
    left = {folder: config for folder, config in runs.items() if not _is_over(folder)}
    print(f"{len(left)} of {len(runs)} runs are left", file=sys.stderr)
    from merit_lab.train.jobs import hand_out  # which imports torch

    failed, began = [], time.monotonic()
    jobs = min(arguments.jobs, max(1, len(left)))
    for number, done in enumerate(
        hand_out(left.items(), jobs, arguments.out / "logs") if left else (), start=1
    ):
        seconds = (time.monotonic() - began) / number
        what = done.error or _loss(done.folder)
        text = f"[{number} of {len(left)}] {done.folder.name} {done.status}{what and f', {what}'}"
        rest = f"; {seconds:.1f} s a run, {_duration(seconds * (len(left) - number))} left"
        print(text + rest, file=sys.stderr, flush=True)
        if done.status == "failed":
            failed.append(done.folder.name)
    if failed:
        print(f"merit train: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    print(f"The runs are in {arguments.out}.\nTo see them: merit report {arguments.out}")
    return 1 if failed else 0


def read_list(path: Path, out: Path, data: Path | None = None) -> dict[Path, TrainConfig]:
    """Return the configuration of each run directory that a list names. Raise ValueError, with the line."""
    runs: dict[Path, TrainConfig] = {}
    for number, text in _lines(path):
        try:
            values = decode(text)
            if not isinstance(values, dict):
                raise ValueError(f"it holds a {type(values).__name__}, not an object of settings")
            name = values.pop("name", None)
            config = _config(values, data)
            folder = out / _checked(_default_name(config) if name is None else name)
            if folder in runs:
                raise ValueError(f"{folder.name} is the name of an earlier line too; give each its own")
        except ValueError as error:
            raise ValueError(f"line {number} of {path}: {error}") from None
        runs[folder] = config
    if not runs:
        raise ValueError(f"{path} has no lines; write a JSON object of settings a line")
    return runs


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error})") from None
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _config(values: dict[str, Any], data: Path | None) -> TrainConfig:
    """Return the configuration that a line means."""
    nested: dict[str, Any] = {} if data is None else {"data": str(data)}
    model = values.pop("model", {})
    if isinstance(model, str):  # a preset, which dotted settings change
        model = dataclasses.asdict(find_model(model)[1])
    for key, value in {"model": model, **values}.items():
        *parents, last = key.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{key} is given, and {parent} is {place!r}")
        place[last] = {**place.get(last, {}), **value} if isinstance(value, dict) else value
    return TrainConfig.from_dict(nested)


def _default_name(config: TrainConfig) -> str:
    kind, lr = config.optimizer.name.rpartition(":")[2], config.optimizer.lr
    rate = "" if lr is None else f"-lr{lr:g}"
    return f"{kind}{rate}-seed{config.seed}-{config.fingerprint[:8]}"


def _checked(name: object) -> str:
    if not isinstance(name, str) or not name or name in (".", "..", "logs") or set(name) & set("/\0\n"):
        raise ValueError(f"the name is {name!r}; it must be that of a folder, without a slash")
    return name


def _is_over(folder: Path) -> bool:
    return holds_run(folder) and Run.open(folder).status in OVER


def _loss(folder: Path) -> str:
    """The last validation loss of a run, in words."""
    loss = Run.open(folder).last_loss if holds_run(folder) else None
    return "" if loss is None else f"validation loss {loss:.4f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min" if minutes else f"{seconds} s"
