"""`merit evaluate`: zero-shot tasks on a checkpoint of a run. `merit export`: it as a Hugging Face model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from merit_lab.checks import check_at_least
from merit_lab.folders import refuse_file
from merit_lab.measure.checkpoint import (
    AtCheckpoint,
    Measured,
    Part,
    StoppableProgress,
    measure_missing,
    run_command,
)
from merit_lab.measure.evaluate.sets import PAPER_SETS, SETS, check_local, expand
from merit_lab.measure.evaluate.tokenizer import ExportedTokenizer, tokenizer_of
from merit_lab.models import HuggingFaceConfig
from merit_lab.models.export import check_exportable, export_checkpoint
from merit_lab.runs import environment
from merit_lab.tables import Table, print_table
from merit_lab.train.snapshot import Snapshot, default_device

_PACKAGES = ("lm-eval", "transformers", "datasets", "accelerate")


@dataclass(frozen=True, kw_only=True)
class _WithTokenizer(AtCheckpoint):
    """The options of both commands."""

    tokenizer: str | None = None
    """gpt2, bytes or a tokenizer.json, for data without a dataset.json (nanoGPT's)."""
    gpt2_vocabulary: Path | None = None
    """Folder with GPT-2's vocab.bpe and encoder.json. None: tiktoken's cache, or a download."""

    def tokenizer_of(self, snapshot: Snapshot) -> ExportedTokenizer | None:
        """Return the tokenizer of the run's data, or None if it is unknown."""
        return tokenizer_of(snapshot.run, self.tokenizer, self.gpt2_vocabulary)


@dataclass(frozen=True, kw_only=True)
class Evaluate(_WithTokenizer):
    """Evaluate a checkpoint zero-shot with lm-eval. The results go into the run directory. If interrupted,
    the same command continues; existing results are not computed again."""

    tasks: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="Sets, figures and tables of the paper or, without --task-files, any task of lm-eval. "
            + "; ".join(f"{name}: {' '.join(sets)}" for name, sets in PAPER_SETS.items())
        ),
    ] = ("fig5",)
    task_files: Annotated[
        Path | None,
        tyro.conf.arg(
            help="Folder with the files of the sets. None: they come from the Hugging Face hub. The files: "
            + ", ".join(chosen.file for chosen in SETS.values())
        ),
    ] = None
    limit: int | None = None
    """Use only this many items of each set, from its beginning."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"no set is given; choose from {', '.join(SETS)}")
        if self.limit is not None:
            check_at_least("limit", self.limit, 1)


@dataclass(frozen=True, kw_only=True)
class Export(_WithTokenizer):
    """Write a checkpoint as a folder that AutoModelForCausalLM and AutoTokenizer open."""

    folder: tyro.conf.Positional[Path]
    """Folder to create."""


def evaluate(options: Evaluate) -> Measured:
    """Evaluate a checkpoint; results that are known already are not computed again.

    Each set is a part, of its first N items named SET-first-N. A result has each metric and its standard
    error by lm-eval's names, ``items`` and ``truncated``.
    """
    names, task_files, limit = expand(options.tasks), options.task_files, options.limit
    versions = _versions()
    if task_files is not None:
        check_local(names)
        # Read when these libraries are imported: they then do not use the network.
        os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    snapshot = options.snapshot()
    encoder = options.tokenizer_of(snapshot)
    if encoder is None:
        raise ValueError(
            f"the tokenizer of {snapshot.config.data} is unknown, since the folder has no dataset.json; "
            "give it with --tokenizer: gpt2, bytes, or the path of a tokenizer.json"
        )
    from merit_lab.measure.evaluate import harness

    if task_files is None:
        harness.check_hub(names)
    device, context = default_device(), snapshot.config.model.context
    autocast = device.type == "cuda" and snapshot.config.precision != "float32"
    common = {
        "checkpoint": snapshot.manifest.files,
        "tokenizer": {"name": encoder.name, "sha256": encoder.sha256},
        "prefix_token": encoder.prefix,
        "precision": "bf16" if autocast else "float32",
        "lm_eval": versions["lm-eval"],
        "num_fewshot": 0,
        "bootstrap": harness.BOOTSTRAP,
        "limit": limit,
    }
    if isinstance(snapshot.config.model, HuggingFaceConfig):  # whose positions do not tell it
        common["context"] = context
    with tempfile.TemporaryDirectory(prefix="merit-evaluate-") as scratch:

        @cache  # once it is needed
        def exported(progress: StoppableProgress) -> harness.CheckpointLM:
            progress.say(f"exporting the checkpoint of step {snapshot.step}")
            export(snapshot, Path(scratch), encoder)
            return harness.CheckpointLM(
                Path(scratch),
                prefix=encoder.prefix,
                context=context,
                device=device,
                autocast=autocast,
                progress=progress,
            )

        def measure(name: str, progress: StoppableProgress) -> dict[str, Any]:
            return harness.run_task(exported(progress), name, limit, task_files)

        parts = {
            name if limit is None else f"{name}-first-{limit}": Part(
                {**common, **_source(name, task_files)}, partial(measure, name)
            )
            for name in names
        }
        about = environment(device=device, data=snapshot.run.environment.get("data", {}))
        about["versions"] |= versions
        return measure_missing("evaluate", snapshot, parts, about, "sequences")


def export(snapshot: Snapshot, folder: Path, tokenizer: ExportedTokenizer | None) -> None:
    """Write a checkpoint's weights and, if known, its tokenizer to a new or empty folder.

    The weights come last and are renamed when they are complete: a folder with a model.safetensors is
    complete.
    """
    check_exportable(snapshot.config.model)
    refuse_file(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose another folder, or empty it")
    model = snapshot.load_model(torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.write(folder, snapshot.config.model.context)
    export_checkpoint(model, folder)


def _versions() -> dict[str, str]:
    """Return the versions of the packages for evaluation. Raise ModuleNotFoundError if one is missing."""
    try:
        return {package: metadata.version(package) for package in _PACKAGES}
    except metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(
            f"evaluation needs the package {error.name}, which is not installed: "
            "pip install 'merit-optim[eval]'",
            name=error.name,
        ) from None


def _source(name: str, task_files: Path | None) -> dict[str, Any]:
    """Return the task and the source of its items. A file is read completely, to refuse a bad one early."""
    task = SETS[name].task if name in SETS else name
    if task_files is None:
        return {"task": task, "data": {"from": "hub"}}
    _, sha256 = SETS[name].rows(task_files)
    return {"task": task, "data": {"from": "file", "file": SETS[name].file, "sha256": sha256}}


def main(argv: Sequence[str]) -> int:
    """Run `merit evaluate` and return its exit status."""
    return run_command("evaluate", Evaluate, _show, argv)


def _show(options: Evaluate) -> None:
    measured = evaluate(options)
    print_table(_table(measured))
    for name, result in measured.results.items():
        if result["truncated"]:
            print(f"{name}: {result['truncated']:,} prompts exceeded the context and were truncated")
    print(f"\nThe results are in {measured.path}")


def _table(measured: Measured) -> Table:
    """A row for each metric of each set."""
    rows = []
    for name, result in measured.results.items():
        left = (name, f"{result['items']:,}")
        for key, value in result.items():
            metric, comma, answers = key.partition(",")
            if key in ("items", "truncated") or metric.endswith("_stderr"):
                continue
            error = result.get(f"{metric}_stderr{comma}{answers}")
            rows.append((left[0], key, left[1], f"{value:.4g}", "" if error is None else f"{error:.2g}"))
            left = ("", "")
    return Table(("Set", "Measure", "Items", "Value", "Error"), tuple(rows), num_text=2)


def export_main(argv: Sequence[str]) -> int:
    """Run `merit export` and return its exit status."""
    return run_command("export", Export, _export, argv)


def _export(options: Export) -> None:
    snapshot = options.snapshot()
    tokenizer = options.tokenizer_of(snapshot)
    export(snapshot, options.folder, tokenizer)
    about = (
        "without a tokenizer, which the run's data does not name: give --tokenizer"
        if tokenizer is None
        else f"with the tokenizer {tokenizer.name}"
    )
    print(f"{options.folder} holds the model after {snapshot.step} steps, {about}")
