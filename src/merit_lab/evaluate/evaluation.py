"""The evaluation of a run's checkpoint, set by set; what was evaluated before is not computed again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merit_lab.evaluate.display import EvaluationDisplay
from merit_lab.evaluate.export import export
from merit_lab.evaluate.harness import BOOTSTRAP, Harness, check_hub, package_versions
from merit_lab.evaluate.results import EvaluationResult, result_path
from merit_lab.evaluate.sets import SETS, check_local, expand
from merit_lab.evaluate.tokenizer import tokenizer_of
from merit_lab.record import environment
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
    display: EvaluationDisplay | None = None,
) -> list[EvaluationResult]:
    """Evaluate a checkpoint zero-shot, and return the results in the order of the names.

    Each result is written into the run directory when it is there, so a call that was stopped goes on with
    the next set.

    Args:
        folder: the run directory.
        names: of sets, of the paper's figures and tables (fig5, fig12, table1) or, without ``task_files``,
            of any task that lm-eval has.
        step: of the checkpoint; None for the newest.
        task_files: folder with the files of the sets; None to take them from the Hugging Face hub.
        limit: items of each set to take, from its beginning; None for all.
        tokenizer: "gpt2", "bytes" or a tokenizer.json, where the run's data do not say.
        gpt2_vocabulary: a folder with GPT-2's vocab.bpe and encoder.json.
        display: what to tell about progress.
    """
    names = expand(names)
    if not names:
        raise ValueError(f"no set is named; choose from {', '.join(SETS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be a whole number above 0, or None for all items")
    versions = package_versions()
    check_hub(names) if task_files is None else check_local(names)
    display = display or EvaluationDisplay()
    snapshot = Snapshot.find(folder, step)
    encoder = tokenizer_of(snapshot.run, tokenizer, gpt2_vocabulary)
    if encoder is None:
        raise ValueError(
            f"the tokenizer of {snapshot.config.data} is not known, since the folder has no dataset.json; "
            "name it with --tokenizer: gpt2, bytes, or the path of a tokenizer.json"
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
    inputs = {name: {**common, **_source(name, task_files)} for name in names}
    results = {name: _known(snapshot, name, inputs[name]) for name in names}
    missing = [name for name in names if results[name] is None]
    for name in names:
        if name not in missing:
            display.say(f"{name}: evaluated before")
    if missing:
        with tempfile.TemporaryDirectory(prefix="merit-evaluate-") as scratch:
            display.say(f"exporting the checkpoint of step {snapshot.step}")
            export(snapshot, Path(scratch), encoder)
            harness = Harness(
                Path(scratch),
                prefix=encoder.prefix,
                device=device,
                autocast=autocast,
                task_files=task_files,
                display=display,
            )
            here = environment(device=device, data=snapshot.run.environment["data"])
            here["versions"] |= versions
            for name in missing:
                result = _evaluate(harness, name, snapshot.step, inputs[name], here)
                result.write(result_path(snapshot.run, snapshot.step, name, limit))
                results[name] = result
                display.say(f"{name}: {result.num_items:,} items in {result.seconds:.0f} s")
    return [result for result in results.values() if result is not None]


def _source(name: str, task_files: Path | None) -> dict[str, Any]:
    """The task and where its items come from, all of which are read: a bad file is refused at once."""
    task = SETS[name].task if name in SETS else name
    if task_files is None:
        return {"task": task, "data": {"from": "hub"}}
    _, sha256 = SETS[name].rows(task_files)
    return {"task": task, "data": {"from": "file", "file": SETS[name].file, "sha256": sha256}}


def _known(snapshot: Snapshot, name: str, inputs: dict[str, Any]) -> EvaluationResult | None:
    """The result of an earlier call, if it answers this one."""
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
