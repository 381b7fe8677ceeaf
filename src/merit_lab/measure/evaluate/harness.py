"""Run tasks of lm-eval on an exported checkpoint, with sets from local files or from the hub.

A set from a local file is lm-eval's task of that name; only the source of the rows is changed, so prompts and
metrics are comparable to other reports.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from merit_lab.measure.evaluate.rows import Row
from merit_lab.measure.evaluate.sets import SETS
from merit_lab.models.quiet import quiet
from merit_lab.progress import WorkProgress
from merit_lab.runs import Metric
from merit_optim.spelling import nearest

BOOTSTRAP = 1000  # resamples for the standard error of a perplexity
_PACKAGES = ("lm-eval", "transformers", "datasets", "accelerate")
_CHATTY = ("lm_eval", "transformers", "datasets", "evaluate", "accelerate", "huggingface_hub")


@dataclass(frozen=True)
class Outcome:
    """The numbers of lm-eval for one set."""

    metrics: dict[str, Metric]
    num_items: int
    num_truncated: int
    version: float | str


def package_versions() -> dict[str, str]:
    """Return the versions of the packages for evaluation. Raise ModuleNotFoundError if one is missing."""
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
    """An exported checkpoint, ready to be evaluated on several sets.

    Args:
        checkpoint: folder of the exported checkpoint.
        prefix: the token before a text that has no context.
        context: the longest sequence that it was trained on.
        device: where to compute.
        autocast: bf16 matrix products.
        task_files: folder of local sets; None for the hub's.
        progress: where to show progress.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        prefix: int,
        context: int,
        device: torch.device,
        autocast: bool,
        task_files: Path | None,
        progress: WorkProgress,
    ) -> None:
        if task_files is not None:
            # Read when these libraries are imported: they then do not use the network.
            offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
            os.environ.update(offline)
        from merit_lab.measure.evaluate.lm import CheckpointLM

        self._task_files, self._progress = task_files, progress
        with _quiet():
            self._lm = CheckpointLM(
                checkpoint,
                prefix=prefix,
                context=context,
                device=device,
                autocast=autocast,
                progress=progress,
            )

    def evaluate(self, name: str, limit: int | None) -> Outcome:
        """Return the metrics of a set, or of its first ``limit`` items."""
        lm_eval = import_module("lm_eval")
        self._lm.set_name, self._lm.num_truncated = name, 0
        with tempfile.TemporaryDirectory() as scratch, _quiet():
            tasks = self._load(name, limit, Path(scratch))
            (task,) = tasks["tasks"].values()
            task.set_config(key="num_fewshot", value=0)
            # Not simple_evaluate: it also inspects the machine, which takes seconds each time.
            try:
                output = lm_eval.evaluate(
                    lm=self._lm, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False
                )
            finally:
                self._progress.end()
        task_name = task.task_name
        return Outcome(
            metrics=_metrics(output["results"][task_name], output["higher_is_better"][task_name]),
            num_items=output["n-samples"][task_name]["effective"],
            num_truncated=self._lm.num_truncated,
            version=output["versions"][task_name],
        )

    def _load(self, name: str, limit: int | None, scratch: Path) -> Any:
        """Return the task from lm-eval's TaskManager."""
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
                f"{name} could not be read from the Hugging Face hub ({error}); without a network, give a "
                "folder with the files of the sets with --task-files"
            ) from error


@functools.cache
def _task_manager(folder: str | None) -> Any:
    """Return lm-eval's tasks of one folder, or all; reading the index of all can take a minute."""
    managers = import_module("lm_eval.tasks")
    if folder is None:
        return managers.TaskManager()
    own_tasks = Path(str(managers.__file__)).parent / folder
    return managers.TaskManager(include_path=own_tasks, include_defaults=False)


def check_hub(names: Sequence[str]) -> None:
    """Raise ValueError if a name is neither a set nor a task of lm-eval."""
    for name in names:
        if name in SETS:
            continue
        with _quiet():
            manager = _task_manager(None)
        if name in manager.all_subtasks:
            continue
        if name in manager.all_tasks:
            raise ValueError(f"{name!r} is a group of lm-eval's tasks; give the tasks one by one")
        similar = nearest(name, sorted({*SETS, *manager.all_subtasks}), num=3)
        hint = f"; the nearest are {', '.join(similar)}" if similar else ""
        raise ValueError(f"lm-eval has no task {name!r}{hint}")


def _localize(name: str, definition: Path, rows: list[Row], scratch: Path) -> Path:
    """Write lm-eval's definition of a task with other rows as its data, and return its path."""
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
    """Convert lm-eval's numbers: "acc,none" and "acc_stderr,none", where "none" is the filter of answers."""
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
    """Suppress the bars and warnings of lm-eval and its libraries, and its pool of processes.

    Forking a process with torch's threads is unsafe, and a thousand resamples do not need a pool.
    """
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with (
            quiet(*_CHATTY),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
