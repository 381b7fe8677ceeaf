"""A checkpoint of a run: which one it is, and the model with its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from merit_optim.lab.models import LanguageModel, build
from merit_optim.lab.record import Run
from merit_optim.lab.train import TrainConfig, checkpoint
from merit_optim.lab.train.checkpoint import Manifest
from merit_optim.lab.train.parallel import Ranks


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checkpoint whose files are whole; nothing is loaded yet."""

    run: Run
    config: TrainConfig
    path: Path
    manifest: Manifest

    @classmethod
    def find(cls, folder: Path | str, step: int | None = None) -> Self:
        """The checkpoint of a run after ``step`` steps, or its newest one that is whole."""
        run = Run.open(folder)
        config = TrainConfig.from_dict(run.config)
        if step is None:
            newest, manifest, complaints = checkpoint.find(run.checkpoints)
            if newest is None or manifest is None:
                reasons = "; ".join(complaints) or "none was written yet"
                raise ValueError(f"{run.folder} has no checkpoint that can be used: {reasons}")
            path = newest
        else:
            path = run.checkpoints / f"step-{step:08d}"
            if not path.is_dir():
                there = sorted(int(known.name[5:]) for known in run.checkpoints.glob("step-" + "[0-9]" * 8))
                steps = ", ".join(map(str, there)) or "none"
                raise ValueError(f"{run.folder} has no checkpoint of step {step}; it has those of: {steps}")
            manifest = checkpoint.read(path)
        if manifest.config != config.fingerprint:
            raise ValueError(
                f"{path} was written with another configuration than {run.folder / 'config.json'} holds; "
                "undo the change there"
            )
        return cls(run=run, config=config, path=path, manifest=manifest)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.manifest.step

    def load_model(self) -> LanguageModel:
        """The model with its weights, on the CPU."""
        model = build(self.config.model)
        # SGD has no state, so the weights are all that is read.
        stateless = torch.optim.SGD(model.parameters(), lr=0.0)
        checkpoint.load(self.path, model, stateless, Ranks(rank=0, size=1, device=torch.device("cpu")))
        return model
