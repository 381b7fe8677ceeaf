"""Evaluate a run's checkpoint, set by set; existing results are not computed again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merit_lab.checks import check_at_least
from merit_lab.folders import check_writable
from merit_lab.measure.evaluate.export import export
from merit_lab.measure.evaluate.harness import BOOTSTRAP, Harness, check_hub, package_versions
from merit_lab.measure.evaluate.sets import SETS, check_local, expand
from merit_lab.measure.evaluate.tokenizer import tokenizer_of
from merit_lab.models import HuggingFaceConfig
from merit_lab.progress import WorkProgress
from merit_lab.runs import EvaluationResult, environment, result_path
from merit_lab.train.snapshot import Snapshot, default_device


def evaluate(
    folder: Path | str,
    names: Sequence[str],
    *,
    step: int | None = None,
    task_files: Path | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
    gpt2_vocabulary: Path | None = None,
    progress: WorkProgress | None = None,
) -> list[EvaluationResult]:
    """Evaluate a checkpoint zero-shot, and return the results in the order of the names.

    Each result is written to the run directory as soon as it is complete, so an interrupted call continues
    with the next set.

    Args:
        folder: the run directory.
        names: sets, figures and tables of the paper (fig5, fig12, table1) or, without ``task_files``, any
            task of lm-eval.
        step: of the checkpoint; None for the newest.
        task_files: folder with the files of the sets; None to load them from the Hugging Face hub.
        limit: use only this many items of each set, from its beginning; None for all.
        tokenizer: "gpt2", "bytes" or a tokenizer.json, if the run's data does not name it.
        gpt2_vocabulary: a folder with GPT-2's vocab.bpe and encoder.json.
        progress: where to show progress.
    """
    names = expand(names)
    if not names:
        raise ValueError(f"no set is given; choose from {', '.join(SETS)}")
    if limit is not None:
        check_at_least("limit", limit, 1)
    versions = package_versions()
    check_hub(names) if task_files is None else check_local(names)
    progress = progress or WorkProgress()
    snapshot = Snapshot.find(folder, step)
    encoder = tokenizer_of(snapshot.run, tokenizer, gpt2_vocabulary)
    if encoder is None:
        raise ValueError(
            f"the tokenizer of {snapshot.config.data} is unknown, since the folder has no dataset.json; "
            "give it with --tokenizer: gpt2, bytes, or the path of a tokenizer.json"
        )
    device = default_device()
    autocast = device.type == "cuda" and snapshot.config.precision != "float32"
    common = {
        "checkpoint": snapshot.manifest.files,
        "tokenizer": {"name": encoder.name, "sha256": encoder.sha256},
        "prefix_token": encoder.prefix,
        "precision": "bf16" if autocast else "float32",
        "lm_eval": versions["lm-eval"],
        "num_fewshot": 0,
        "bootstrap": BOOTSTRAP,
        "limit": limit,
    }
    context = snapshot.config.model.context
    if isinstance(snapshot.config.model, HuggingFaceConfig):  # whose positions do not tell it
        common["context"] = context
    inputs = {name: {**common, **_source(name, task_files)} for name in names}
    results = {name: _known(snapshot, name, inputs[name]) for name in names}
    missing = [name for name in names if results[name] is None]
    for name in names:
        if name not in missing:
            progress.say(f"{name}: already evaluated")
    if missing:
        check_writable(result_path(snapshot.run, snapshot.step, missing[0], limit).parent)
        with tempfile.TemporaryDirectory(prefix="merit-evaluate-") as scratch:
            progress.say(f"exporting the checkpoint of step {snapshot.step}")
            export(snapshot, Path(scratch), encoder)
            harness = Harness(
                Path(scratch),
                prefix=encoder.prefix,
                context=context,
                device=device,
                autocast=autocast,
                task_files=task_files,
                progress=progress,
            )
            here = environment(device=device, data=snapshot.run.environment.get("data", {}))
            here["versions"] |= versions
            for name in missing:
                result = _evaluate(harness, name, snapshot.step, inputs[name], here)
                result.write(result_path(snapshot.run, snapshot.step, name, limit))
                results[name] = result
                progress.say(f"{name}: {result.num_items:,} items in {result.seconds:.0f} s")
    return [result for result in results.values() if result is not None]


def _source(name: str, task_files: Path | None) -> dict[str, Any]:
    """Return the task and the source of its items. A file is read completely, to refuse a bad one early."""
    task = SETS[name].task if name in SETS else name
    if task_files is None:
        return {"task": task, "data": {"from": "hub"}}
    _, sha256 = SETS[name].rows(task_files)
    return {"task": task, "data": {"from": "file", "file": SETS[name].file, "sha256": sha256}}


def _known(snapshot: Snapshot, name: str, inputs: dict[str, Any]) -> EvaluationResult | None:
    """Return the result of an earlier call with the same inputs, if there is one."""
    path = result_path(snapshot.run, snapshot.step, name, inputs["limit"])
    if not path.exists():
        return None
    result = EvaluationResult.read(path)
    return result if result.inputs == inputs else None


def _evaluate(
    harness: Harness, name: str, step: int, inputs: dict[str, Any], environment: dict[str, Any]
) -> EvaluationResult:
    """Evaluate one set."""
    began = time.monotonic()
    outcome = harness.evaluate(name, inputs["limit"])
    return EvaluationResult(
        name=name,
        step=step,
        metrics=outcome.metrics,
        num_items=outcome.num_items,
        num_truncated=outcome.num_truncated,
        version=outcome.version,
        inputs=inputs,
        environment=environment,
        seconds=time.monotonic() - began,
    )
