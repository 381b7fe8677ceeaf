"""Run directories as training would leave them, without training."""

from pathlib import Path
from typing import Protocol

from merit_lab.data import Dataset
from merit_lab.runs import MetricsWriter, Run
from merit_lab.train import TrainConfig


class WriteRun(Protocol):
    """The fixture ``write_run``."""

    def __call__(
        self,
        optimizer: str,
        lr: float,
        loss: float | None,
        *,
        seed: int = 0,
        end: str = "finished",
        weight_decay: float = 0.1,
        width: int = 64,
        layers: int = 4,
    ) -> None: ...


def write_finished_run(config: TrainConfig, folder: Path, loss: float | None, end: str = "finished") -> None:
    """Write a run that ended with a loss; None means that it diverged."""
    dataset = Dataset.open(config.data)
    environment = {"data": {"fingerprint": dataset.fingerprint}, "device": {"name": "cpu"}}
    run = Run.create(folder, config.resolve(dataset.vocab_size).to_dict(), environment)
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "started", "message": ""})
        metrics.write({"kind": "validation", "step": 0, "tokens": 0, "loss": 5.5})
        if loss is not None:
            metrics.write({"kind": "validation", "step": 10, "tokens": 640, "loss": loss})
        event = end if loss is not None else "diverged"
        metrics.write({"kind": "event", "step": 10, "what": event, "message": "the end"})
