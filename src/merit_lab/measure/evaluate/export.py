"""Export a run's checkpoint to a folder that Hugging Face's transformers opens."""

from __future__ import annotations

from pathlib import Path

import torch

from merit_lab.folders import refuse_file
from merit_lab.measure.evaluate.tokenizer import ExportedTokenizer
from merit_lab.models.huggingface import check_exportable, export_checkpoint
from merit_lab.train.snapshot import Snapshot


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
