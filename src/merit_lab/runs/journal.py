"""Write a run's numbers to metrics.jsonl, TensorBoard and, optionally, Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from merit_lab.runs.metrics import BEGINNING, Mark, MetricsWriter
from merit_lab.runs.run import Run


class NotWritten(OSError):
    """Raised when a run's directory could not be written to, as on a full disk; the run can be resumed."""


class Journal:
    """Writes a run's measurements to all destinations.

    Args:
        run: the run.
        mark: the end of the metrics file when the checkpoint was made from which the run resumes.
        step: the first step to come; TensorBoard drops what it has of it and later ones.
        wandb: name of the Weights & Biases project, None for none.
    """

    def __init__(self, run: Run, *, mark: Mark = BEGINNING, step: int = 0, wandb: str | None = None) -> None:
        self._folder = run.folder
        # The stack closes what is open if the next cannot be opened.
        with _writing_into(run.folder), ExitStack() as opened:
            self._metrics = opened.enter_context(MetricsWriter(run.metrics_path, mark))
            self._sinks: list[TensorBoard | WeightsAndBiases] = []  # besides the metrics file
            if wandb is not None:
                self._sinks.append(opened.enter_context(closing(WeightsAndBiases(run, project=wandb))))
            if find_spec("tensorboard"):  # a machine that only trains may not have it
                self._sinks.append(opened.enter_context(closing(TensorBoard(run, step=step))))
            self._opened = opened.pop_all()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record one measurement; see metrics.py for the kinds."""
        with _writing_into(self._folder):
            self._metrics.write({"kind": kind, "step": step, **values})
            scalars = dict(scalars_of(kind, values))
            for sink in self._sinks:
                sink.write(scalars, step)

    def sync(self) -> Mark:
        """Flush the metrics to disk and return the end of their file."""
        with _writing_into(self._folder):
            return self._metrics.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with _writing_into(self._folder):
                self._opened.close()
        except NotWritten:
            if error is None:  # otherwise that is what went wrong first
                raise


@contextmanager
def _writing_into(folder: Path) -> Iterator[None]:
    """Name the folder in the error of a write, which names nothing itself."""
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"the measurements could not be written to {folder} ({error.strerror or error}). Fix the cause, "
            "then resume the run"
        ) from error


class TensorBoard:
    """A file of events in the run directory, for ``tensorboard --logdir``.

    torch's SummaryWriter would write it in a thread, which prints a traceback of its own on a full disk.
    """

    def __init__(self, run: Run, *, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        file = (folder / f"events.out.tfevents.{time.time_ns()}").open("xb")  # read in the order of names
        self._records: Any = RecordWriter(file)
        self._add(step, file_version="brain.Event:2")
        self._add(step, session_log=SessionLog(status=SessionLog.START))  # later steps are dropped

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Take the numbers of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if scalars:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            self._add(step, summary=Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        self._records.flush()


class WeightsAndBiases:
    """The same numbers at Weights & Biases, in one run that is resumed too."""

    def __init__(self, run: Run, *, project: str) -> None:
        wandb = import_wandb()
        identity = f"{run.name}-{run.environment['started']}"
        self._run = wandb.init(
            project=project,
            name=run.name,
            id="".join(character if character.isalnum() else "-" for character in identity),
            resume="allow",
            config=run.config,
            dir=str(run.folder),
        )

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Take the numbers of a step."""
        if scalars:
            self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Write what is still held back."""
        self._run.finish()


def import_wandb() -> Any:
    """Import wandb, or raise an error that says how to do without it."""
    try:
        return import_module("wandb")
    except ImportError:
        raise ModuleNotFoundError(
            "Weights & Biases was requested, but the package wandb is not installed: pip install wandb, or "
            "leave it out."
        ) from None


def scalars_of(kind: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a measurement, with their names in a chart."""
    if kind == "attention":
        for layer, heads in enumerate(values["max_logits"]):
            yield f"attention/max_logit_layer_{layer:02d}", float(np.max(heads))  # NaN if there is one
        for layer, heads in enumerate(values["entropy"] or []):
            yield f"attention/entropy_layer_{layer:02d}", float(np.mean(heads))
    elif kind == "update":
        for name, statistics in values["parameters"].items():
            for key, value in statistics.items():
                yield f"update_{key}/{name}", value
    elif kind != "event":
        for key, value in values.items():
            if value is not None:
                yield f"{kind}/{key}", value
