"""`merit evaluate`: zero-shot tasks on a checkpoint of a run. `merit export`: it as a Hugging Face model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from merit_lab.checks import check_at_least
from merit_lab.folders import refuse_file
from merit_lab.measure.checkpoint import AtCheckpoint, Part, measure_missing, run_command
from merit_lab.measure.evaluate.sets import PAPER_SETS, SETS, check_local, expand
from merit_lab.measure.evaluate.tokenizer import ExportedTokenizer, tokenizer_of
from merit_lab.models import HuggingFaceConfig
from merit_lab.models.export import check_exportable, export_checkpoint
from merit_lab.progress import WorkProgress
from merit_lab.runs import environment
from merit_lab.tables import Table, print_table
from merit_lab.train.snapshot import Snapshot, default_device

_PACKAGES = ("lm-eval", "transformers", "datasets", "accelerate")


@dataclass(frozen=True)
class Evaluation:
    """The results on some sets, and the file they are in."""

    path: Path
    results: dict[str, dict[str, Any]]
    """By set: each metric and its standard error by lm-eval's names, ``items`` and ``truncated``."""


def evaluate(
    run: Path | str,
    names: Sequence[str],
    *,
    step: int | None = None,
    task_files: Path | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
    gpt2_vocabulary: Path | None = None,
) -> Evaluation:
    """Evaluate a checkpoint zero-shot; results that are known already are not computed again.

    Each result is written to the run directory as soon as it is complete, so an interrupted call continues
    with the next set.

    Args:
        run: the run directory.
        names: sets, figures and tables of the paper (fig5, fig12, table1) or, without ``task_files``, any
            task of lm-eval.
        step: of the checkpoint; None for the newest.
        task_files: folder with the files of the sets; None to load them from the Hugging Face hub.
        limit: use only this many items of each set, from its beginning; None for all.
        tokenizer: "gpt2", "bytes" or a tokenizer.json, if the run's data does not name it.
        gpt2_vocabulary: a folder with GPT-2's vocab.bpe and encoder.json.
    """
    names = expand(names)
    if not names:
        raise ValueError(f"no set is given; choose from {', '.join(SETS)}")
    if limit is not None:
        check_at_least("limit", limit, 1)
    versions = _versions()
    if task_files is not None:
        check_local(names)
        # Read when these libraries are imported: they then do not use the network.
        os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    snapshot = Snapshot.find(run, step)
    encoder = tokenizer_of(snapshot.run, tokenizer, gpt2_vocabulary)
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
    progress = WorkProgress()
    with tempfile.TemporaryDirectory(prefix="merit-evaluate-") as scratch:
        opened: list[harness.CheckpointLM] = []  # once it is needed

        def measure(name: str) -> dict[str, Any]:
            if not opened:
                progress.say(f"exporting the checkpoint of step {snapshot.step}")
                export(snapshot, Path(scratch), encoder)
                opened.append(
                    harness.CheckpointLM(
                        Path(scratch),
                        prefix=encoder.prefix,
                        context=context,
                        device=device,
                        autocast=autocast,
                        progress=progress,
                    )
                )
            return harness.run_task(opened[0], name, limit, task_files)

        def about() -> dict[str, Any]:
            here = environment(device=device, data=snapshot.run.environment.get("data", {}))
            return here | {"versions": here["versions"] | versions}

        keys = {name: name if limit is None else f"{name}-first-{limit}" for name in names}
        parts = {
            keys[name]: Part({**common, **_source(name, task_files)}, partial(measure, name))
            for name in names
        }
        written = measure_missing("evaluate", snapshot, parts, about, progress)
    return Evaluation(written.path, {name: written.parts[key]["result"] for name, key in keys.items()})


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


def _source(name: str, task_files: Path | None) -> dict[str, Any]:
    """Return the task and the source of its items. A file is read completely, to refuse a bad one early."""
    task = SETS[name].task if name in SETS else name
    if task_files is None:
        return {"task": task, "data": {"from": "hub"}}
    _, sha256 = SETS[name].rows(task_files)
    return {"task": task, "data": {"from": "file", "file": SETS[name].file, "sha256": sha256}}


@dataclass(frozen=True, kw_only=True)
class _WithTokenizer(AtCheckpoint):
    """The options of both commands."""

    tokenizer: str | None = None
    """gpt2, bytes or a tokenizer.json, for data without a dataset.json (nanoGPT's)."""
    gpt2_vocabulary: Path | None = None
    """Folder with GPT-2's vocab.bpe and encoder.json. None: tiktoken's cache, or a download."""


@dataclass(frozen=True, kw_only=True)
class Export(_WithTokenizer):
    """Write a checkpoint as a folder that AutoModelForCausalLM and AutoTokenizer open."""

    folder: tyro.conf.Positional[Path]
    """Folder to create."""


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


def main(argv: Sequence[str]) -> int:
    """Run `merit evaluate` and return its exit status."""
    return run_command("evaluate", Evaluate, _evaluate, argv)


def _evaluate(arguments: Evaluate) -> None:
    evaluation = evaluate(
        arguments.run,
        arguments.tasks,
        step=arguments.checkpoint,
        task_files=arguments.task_files,
        limit=arguments.limit,
        tokenizer=arguments.tokenizer,
        gpt2_vocabulary=arguments.gpt2_vocabulary,
    )
    print_table(_table(evaluation))
    for name, result in evaluation.results.items():
        if result["truncated"]:
            print(f"{name}: {result['truncated']:,} prompts exceeded the context and were truncated")
    print(f"\nThe results are in {evaluation.path}")


def _table(evaluation: Evaluation) -> Table:
    """A row for each metric of each set."""
    rows = []
    for name, result in evaluation.results.items():
        left = (name, f"{result['items']:,}")
        for key, value in result.items():
            if key in ("items", "truncated") or key.partition(",")[0].endswith("_stderr"):
                continue
            metric, comma, answers = key.partition(",")
            error = result.get(f"{metric}_stderr{comma}{answers}")
            rows.append((left[0], key, left[1], f"{value:.4g}", "" if error is None else f"{error:.2g}"))
            left = ("", "")
    return Table(("Set", "Measure", "Items", "Value", "Error"), tuple(rows), num_text=2)


def export_main(argv: Sequence[str]) -> int:
    """Run `merit export` and return its exit status."""
    return run_command("export", Export, _export, argv)


def _export(arguments: Export) -> None:
    snapshot = Snapshot.find(arguments.run, arguments.checkpoint)
    tokenizer = tokenizer_of(snapshot.run, arguments.tokenizer, arguments.gpt2_vocabulary)
    export(snapshot, arguments.folder, tokenizer)
    about = (
        "without a tokenizer, which the run's data does not name: give --tokenizer"
        if tokenizer is None
        else f"with the tokenizer {tokenizer.name}"
    )
    print(f"{arguments.folder} holds the model after {snapshot.step} steps, {about}")
