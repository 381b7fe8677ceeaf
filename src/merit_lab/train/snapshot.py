"""A run at one of its checkpoints: the model with its weights, and the data it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from merit_lab.data import Dataset, validation_sequences
from merit_lab.models import Model, build
from merit_lab.runs import Run, environment, step_path
from merit_lab.train import checkpoint
from merit_lab.train.checkpoint import Manifest, steps_of
from merit_lab.train.config import TrainConfig
from merit_lab.train.parallel import Ranks


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checkpoint of a run; nothing is loaded yet."""

    run: Run
    config: TrainConfig
    path: Path
    manifest: Manifest

    @classmethod
    def find(cls, folder: Path | str, step: int | None = None) -> Self:
        """Find the checkpoint of a run after ``step`` steps, or its newest intact one."""
        run = Run.open(folder)
        config = TrainConfig.from_dict(run.config)
        if step is None:
            found, complaints = checkpoint.find(run.checkpoints)
            if found is None:
                reasons = "; ".join(complaints) or "none was written yet"
                raise ValueError(f"{run.folder} has no usable checkpoint: {reasons}")
            path, manifest = found
        else:
            path = step_path(run.checkpoints, step)
            if not path.is_dir():
                known = ", ".join(map(str, steps_of(run.checkpoints))) or "none"
                raise ValueError(f"{run.folder} has no checkpoint of step {step}; available steps: {known}")
            manifest = checkpoint.read(path)
        manifest.check_config(path, config)
        return cls(run=run, config=config, path=path, manifest=manifest)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.manifest.step

    def load_model(self, device: torch.device, *, twice: bool = False) -> Model:
        """Return the model with its weights, in float32; ``twice`` if it must be twice differentiable."""
        model = build(self.config.model.to_measure(twice=twice)).to(device).eval()
        checkpoint.load_weights(self.path, model, Ranks(rank=0, size=1, device=device))
        return model

    def environment(self, dataset: Dataset) -> dict[str, Any]:
        """Describe this process and the data, for a measurement at this checkpoint."""
        data = {"folder": str(dataset.folder.resolve()), "fingerprint": dataset.fingerprint}
        return environment(device=default_device(), data=data)

    def open_data(self, folder: Path | None = None) -> Dataset:
        """Open the data of the run, from its original folder or from another that has the same data."""
        dataset = Dataset.open(self.config.data if folder is None else folder)
        self.run.check_data(dataset.folder, dataset.fingerprint)
        return dataset

    def training_sequences(self, dataset: Dataset, limit: int) -> Tensor:
        """Return sequences of the training file, evenly spread over it.

        They depend only on file, context and number: runs that differ in optimizer or seed are measured on
        the same ones, and each has seen the same share of them.
        """
        return torch.from_numpy(validation_sequences(dataset.train, self.config.model.context, limit))


def mean_loss(model: Model, sequences: Tensor, micro_batch: int) -> Callable[[], Iterator[Tensor]]:
    """Return a function that yields, per micro-batch, terms that sum to the mean loss over ``sequences``."""
    device = next(model.parameters()).device

    def parts() -> Iterator[Tensor]:
        for piece in sequences.split(micro_batch):
            yield token_loss(model, piece.to(device)) * (len(piece) / len(sequences))

    return parts


def token_loss(model: Model, sequences: Tensor) -> Tensor:
    """Return the mean loss over the tokens of some sequences."""
    loss: Tensor | None = model(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()).loss
    assert loss is not None, "with targets there is a loss"
    return loss


def default_device() -> torch.device:
    """Return the GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
