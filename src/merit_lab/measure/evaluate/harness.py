"""Tasks of lm-eval on an exported checkpoint, with sets from local files or from the hub.

A set from a local file is lm-eval's task of that name; only the source of the rows is changed, so prompts and
metrics are comparable to other reports. Imports lm-eval, and so is imported only to evaluate something.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from merit_lab.measure.evaluate.sets import SETS
from merit_lab.models.transformers_config import quiet
from merit_lab.progress import WorkProgress
from merit_optim.spelling import did_you_mean

BOOTSTRAP = 1000  # resamples for the standard error of a perplexity
_CHATTY = ("lm_eval", "transformers", "datasets", "evaluate", "accelerate", "huggingface_hub")
_TOKENS_ON_A_CPU = 4096  # in one forward pass
_LARGEST_BATCH = 64

_HFLM: Any = import_module("lm_eval.models.huggingface").HFLM
Request = tuple[Any, list[int], list[int]]  # origin, context, continuation


class CheckpointLM(_HFLM):  # type: ignore[misc]
    """An exported checkpoint as lm-eval's model, with progress and a count of prompts that do not fit.

    Args:
        folder: of the checkpoint, with its tokenizer.
        prefix: the token before a text that has no context.
        context: the longest sequence that it was trained on; its positions may be many more.
        device: where to compute.
        autocast: bf16 matrix products, as in training on CUDA.
        progress: where to show progress.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prefix: int,
        context: int,
        device: torch.device,
        autocast: bool,
        progress: WorkProgress,
    ) -> None:
        self.set_name, self.num_truncated, self.progress = "", 0, progress
        with _quiet():
            super().__init__(
                pretrained=str(folder),
                max_length=context,
                device=str(device),
                dtype="float32",
                mixed_precision_dtype="bfloat16" if autocast else None,
                # On a GPU lm-eval finds the largest batch that fits.
                batch_size=1 if device.type == "cpu" else "auto",
                max_batch_size=_LARGEST_BATCH,
                prefix_token_id=prefix,
            )
        if device.type == "cpu":
            self.batch_size_per_gpu = min(max(_TOKENS_ON_A_CPU // self.max_length, 1), _LARGEST_BATCH)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations; ``override_bs`` is set for windows of whole texts."""
        del disable_tqdm  # shown by ours
        if override_bs is None:
            longest = max(len(continuation) for _, _, continuation in requests)
            if longest > self.max_length:
                raise ValueError(
                    f"{self.set_name} has an answer of {longest} tokens, which is longer than the model's "
                    f"context of {self.max_length}: it cannot be evaluated with this model"
                )
            # The model's input is all but the last token.
            self.num_truncated = sum(
                len(context) + len(continuation) > self.max_length + 1
                for _, context, continuation in requests
            )
            # lm-eval computes requests that differ only in the last token once.
            inputs = {(*context, *continuation[:-1]) for _, context, continuation in requests}
            self.progress.begin(self.set_name, len(inputs), "sequences")
        output: list[tuple[float, bool]] = super()._loglikelihood_tokens(
            requests, disable_tqdm=True, override_bs=override_bs
        )
        return output

    def _model_call(self, inps: Tensor, *rest: Any, **options: Any) -> Tensor:
        logits: Tensor = super()._model_call(inps, *rest, **options)
        if logits.isnan().any():
            # Tasks would still return a number: of answers with NaN likelihood the first is chosen.
            raise ValueError(
                f"{self.set_name}: the model's logits are NaN, so the run diverged; choose an earlier "
                "checkpoint with --checkpoint"
            )
        self.progress.advance(len(inps))
        return logits


def run_task(lm: CheckpointLM, name: str, limit: int | None, task_files: Path | None) -> dict[str, float]:
    """Return lm-eval's numbers for a set, or for its first ``limit`` items.

    They are each metric and its standard error by lm-eval's names ("acc", "acc_stderr"; "f1,strict" if
    answers were filtered), ``items`` and ``truncated``, the number of prompts that did not fit.
    """
    lm.set_name, lm.num_truncated = name, 0
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        tasks = _load(name, limit, task_files, Path(scratch))
        (task,) = tasks["tasks"].values()
        task.set_config(key="num_fewshot", value=0)
        # Not simple_evaluate: it also inspects the machine, which takes seconds each time.
        output = import_module("lm_eval").evaluate(
            lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False
        )
    metrics = {
        key.removesuffix(",none"): float(value)
        for key, value in output["results"][task.task_name].items()
        if "," in key and isinstance(value, (int, float))  # an error that is unknown is "N/A"
    }
    num_items = output["n-samples"][task.task_name]["effective"]
    return {**metrics, "items": num_items, "truncated": lm.num_truncated}


def check_hub(names: Sequence[str]) -> None:
    """Raise ValueError if a name is neither a set nor a task of lm-eval."""
    if all(name in SETS for name in names):
        return
    with _quiet():
        known = {*SETS, *_task_manager(None).all_subtasks}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, sorted(known), otherwise=".")
            raise ValueError(f"lm-eval has no task {name!r}{hint} Give the tasks of a group one by one")


def _load(name: str, limit: int | None, task_files: Path | None, scratch: Path) -> Any:
    """Return the task from lm-eval's TaskManager, with the rows of a local file if there are task files."""
    chosen = SETS.get(name)
    manager = _task_manager(chosen.tasks_folder if chosen else None)
    if chosen is not None and task_files is not None:
        rows, data = chosen.rows(task_files)[0][:limit], scratch / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task = {
            "include": str(manager.task_index[chosen.task].yaml_path),
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(scratch / "cache")},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
        }
        definition = scratch / f"{chosen.task}.yaml"
        definition.write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
        return manager.load([str(definition)])
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the bars and warnings of lm-eval and its libraries, and its pool of processes.

    Forking a process with torch's threads is unsafe, and a thousand resamples do not need a pool.
    """
    silence = io.StringIO()
    with (
        mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"),
        quiet(*_CHATTY),
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
    ):
        yield
