"""A run's checkpoint as a folder that Hugging Face's transformers opens."""

from __future__ import annotations

from pathlib import Path

import torch

from merit_lab.evaluate.tokenizer import ExportedTokenizer
from merit_lab.models.huggingface import check_exportable, export_checkpoint
from merit_lab.train.snapshot import Snapshot


def export(snapshot: Snapshot, folder: Path, tokenizer: ExportedTokenizer | None) -> None:
    """Write a checkpoint's weights and, where it is known, its tokenizer into a new or empty folder.

    The weights come last and under their name when they are complete: a folder with a model.safetensors is
    a whole one.
    """
    check_exportable(snapshot.config.model)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose another folder, or remove what is in it")
    model = snapshot.load_model(torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.write(folder, snapshot.config.model.context)
    export_checkpoint(model, folder)
