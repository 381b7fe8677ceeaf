"""lm-eval: its tasks on an exported checkpoint, with sets from local files or from the hub.

A set from a local file is lm-eval's own task of that name, with nothing changed but where the rows come
from: prompts and measures are those that others report.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from merit_lab.evaluate.display import EvaluationDisplay
from merit_lab.evaluate.results import Metric
from merit_lab.evaluate.rows import Row
from merit_lab.evaluate.sets import SETS

BOOTSTRAP = 1000  # resamples for the standard error of a perplexity
_PACKAGES = ("lm-eval", "transformers", "datasets", "accelerate")
_CHATTY = ("lm_eval", "transformers", "datasets", "evaluate", "accelerate")


@dataclass(frozen=True)
class Outcome:
    """The numbers of lm-eval for one set."""

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
        display: EvaluationDisplay,
    ) -> None:
        if task_files is not None:
            # Read when these libraries are imported: nothing is looked for on the network.
            offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
            os.environ.update(offline)
        from merit_lab.evaluate.lm import CheckpointLM

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
                output = lm_eval.evaluate(
                    lm=self._lm, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False
                )
            finally:
                self._display.end()
        task_name = task.task_name
        return Outcome(
            metrics=_metrics(output["results"][task_name], output["higher_is_better"][task_name]),
            num_items=output["n-samples"][task_name]["effective"],
            num_truncated=self._lm.num_truncated,
            version=output["versions"][task_name],
        )

    def _load(self, name: str, limit: int | None, scratch: Path) -> Any:
        """The task, as lm-eval's TaskManager gives it."""
        chosen = SETS.get(name)
        manager = _task_manager(chosen.tasks_folder if chosen else None)
        if chosen is not None and self._task_files is not None:
            rows, _ = chosen.rows(self._task_files)
            definition = manager.task_index[chosen.task].yaml_path
            return manager.load([str(_localize(chosen.task, definition, rows[:limit], scratch))])
        try:
            return manager.load([chosen.task if chosen else name])
        except OSError as error:
            raise OSError(
                f"{name} could not be read from the Hugging Face hub ({error}); where there is no network, "
                "name a folder with the files of the sets by --task-files"
            ) from error


@functools.cache
def _task_manager(folder: str | None) -> Any:
    """lm-eval's tasks of one folder, or all; the index of all can take a minute to read."""
    managers = import_module("lm_eval.tasks")
    if folder is None:
        return managers.TaskManager()
    own_tasks = Path(str(managers.__file__)).parent / folder
    return managers.TaskManager(include_path=own_tasks, include_defaults=False)


def check_hub(names: Sequence[str]) -> None:
    """Raise ValueError where neither the sets nor lm-eval's tasks have a name."""
    for name in names:
        if name in SETS:
            continue
        with _quiet():
            manager = _task_manager(None)
        if name in manager.all_subtasks:
            continue
        if name in manager.all_tasks:
            raise ValueError(f"{name!r} is a group of lm-eval's tasks; name the tasks one by one")
        nearest = difflib.get_close_matches(name, sorted({*SETS, *manager.all_subtasks}))
        hint = f"; near to it are {', '.join(nearest)}" if nearest else ""
        raise ValueError(f"lm-eval has no task {name!r}{hint}")


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


def _metrics(output: dict[str, Any], higher_is_better: dict[str, bool | None]) -> dict[str, Metric]:
    """lm-eval's numbers: "acc,none" and "acc_stderr,none", where "none" is the filter of the answers."""
    metrics = {}
    for key, value in output.items():
        name, comma, answers = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        error = output.get(f"{name}_stderr,{answers}")
        metrics[name if answers == "none" else key] = Metric(
            value=float(value),
            stderr=float(error) if isinstance(error, (int, float)) else None,  # else it is "N/A"
            higher_is_better=higher_is_better.get(name),
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
