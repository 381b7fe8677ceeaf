"""lm-eval: its tasks on an exported checkpoint, with sets from local files or from the hub.

A set from a local file is lm-eval's own task of that name, with nothing changed but where the rows come
from: prompts and measures are those that others report.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from merit_optim.lab.evaluate.display import Display
from merit_optim.lab.evaluate.results import Metric
from merit_optim.lab.evaluate.rows import Row
from merit_optim.lab.evaluate.sets import SETS

BOOTSTRAP = 1000  # resamples for the standard error of a perplexity
_PACKAGES = ("lm-eval", "transformers", "datasets", "accelerate")
_CHATTY = ("lm_eval", "transformers", "datasets", "evaluate", "accelerate")


@dataclass(frozen=True)
class Outcome:
    """What lm-eval found on one set."""

    metrics: dict[str, Metric]
    num_items: int
    num_truncated: int
    version: float | str


def package_versions() -> dict[str, str]:
    """The versions of what evaluation needs; ModuleNotFoundError, with the way out, where it is missing."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise ModuleNotFoundError(
                f"evaluation needs the package {package}, which is not installed: "
                "pip install 'merit-optim[eval]'",
                name=package,
            ) from None
    return versions


class Harness:
    """An exported checkpoint, ready for one set after the other.

    Args:
        checkpoint: folder of the exported checkpoint.
        prefix: the token before a text that has no context.
        device: what to compute on.
        autocast: bf16 matrix products.
        task_files: folder of local sets; None for the hub's.
        display: what to tell about progress.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        prefix: int,
        device: torch.device,
        autocast: bool,
        task_files: Path | None,
        display: Display,
    ) -> None:
        if task_files is not None:
            # Read when these libraries are imported: nothing is looked for on the network.
            offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
            os.environ.update(offline)
        from merit_optim.lab.evaluate.lm import CheckpointLM

        self._task_files, self._display = task_files, display
        with _quiet():
            self._lm = CheckpointLM(
                checkpoint, prefix=prefix, device=device, autocast=autocast, display=display
            )

    def evaluate(self, name: str, limit: int | None) -> Outcome:
        """The measures of a set, or of its first ``limit`` items."""
        lm_eval = import_module("lm_eval")
        self._lm.set_name, self._lm.num_truncated = name, 0
        with tempfile.TemporaryDirectory() as scratch, _quiet():
            tasks = self._load(name, limit, Path(scratch))
            (task,) = tasks["tasks"].values()
            task.set_config(key="num_fewshot", value=0)
            # Not simple_evaluate: it also asks the machine about itself, for seconds, each time.
            try:
                found = lm_eval.evaluate(
                    lm=self._lm, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False
                )
            finally:
                self._display.end()
        task_name = task.task_name
        return Outcome(
            metrics=_metrics(found["results"][task_name], found["higher_is_better"][task_name]),
            num_items=found["n-samples"][task_name]["effective"],
            num_truncated=self._lm.num_truncated,
            version=found["versions"][task_name],
        )

    def _load(self, name: str, limit: int | None, scratch: Path) -> Any:
        """The task, as lm-eval's TaskManager gives it."""
        managers = import_module("lm_eval.tasks")
        if name not in SETS:
            manager = managers.TaskManager()
            if name not in manager.all_subtasks:
                raise ValueError(f"lm-eval has no task {name!r} (a group of tasks is to be named one by one)")
            return manager.load([name])
        chosen = SETS[name]
        # The index of all of lm-eval's tasks takes a minute to read.
        own_tasks = Path(str(managers.__file__)).parent / chosen.tasks_folder
        manager = managers.TaskManager(include_path=own_tasks, include_defaults=False)
        if self._task_files is None:
            return manager.load([chosen.task])
        rows, _ = chosen.rows(self._task_files)
        definition = manager.task_index[chosen.task].yaml_path
        return manager.load([str(_localize(chosen.task, definition, rows[:limit], scratch))])


def _localize(name: str, definition: Path, rows: list[Row], scratch: Path) -> Path:
    """lm-eval's definition of a task, with other rows as its data."""
    data = scratch / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "include": str(definition),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(scratch / "cache")},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    path = scratch / f"{name}.yaml"
    path.write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return path


def _metrics(found: dict[str, Any], higher_is_better: dict[str, bool]) -> dict[str, Metric]:
    """lm-eval's numbers: "acc,none" with "acc_stderr,none", which is "N/A" where there is no error."""
    metrics = {}
    for name, better in higher_is_better.items():
        error = found.get(f"{name}_stderr,none")
        metrics[name] = Metric(
            value=float(found[f"{name},none"]),
            stderr=float(error) if isinstance(error, (int, float)) else None,
            higher_is_better=better,
        )
    return metrics


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's and its libraries' bars and warnings; and without its pool of processes.

    Forking a process that has torch's threads is unsafe, and a thousand resamples need no pool.
    """
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    before = os.environ.get("DISABLE_MULTIPROC")
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
