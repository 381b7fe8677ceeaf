"""MuonMERIT with Lightning, with a checkpoint that a later run continues.

    python examples/lightning_train.py
    python examples/lightning_train.py --epochs 4    # continues where the first one stopped
    python examples/lightning_train.py --optimizer MERIT --folder runs/lightning-merit

Statistics of attention and updates are logged with the loss: runs/lightning/logs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from merit_optim import optimizer_class, param_groups
from merit_optim.integrations.lightning import MeritCallback

VOCABULARY, WIDTH, CONTEXT, BATCH = 64, 64, 32, 32


class Model(LightningModule):
    """A small language model."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer_class = optimizer_class(optimizer)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        seen, wanted = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1], device=tokens.device)
        hidden = self.block(self.embedding(seen), src_mask=mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Each optimizer has a default learning rate; set lr=... to change it.
        return self.optimizer_class(param_groups(self, weight_decay=0.1), max_grad_norm=1.0)


def sequences(count: int) -> Tensor:
    """Return sequences with a rule to learn: each token is 5 times the one before, plus 3."""
    tokens = [torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))]
    for _ in range(CONTEXT):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with Lightning.")
    parser.add_argument("--optimizer", default="MuonMERIT", help="or MERIT, LAMB, Muon, SOAPMERIT, ...")
    parser.add_argument("--epochs", type=int, default=2, help="total, including earlier runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/lightning"), help="folder of checkpoint and logs"
    )
    arguments = parser.parse_args()

    torch.manual_seed(0)
    checkpoints = arguments.folder / "checkpoints"
    last = checkpoints / "last.ckpt"
    trainer = Trainer(
        max_epochs=arguments.epochs,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        log_every_n_steps=10,
        logger=CSVLogger(arguments.folder, name="logs"),  # any logger receives the callback's numbers
        callbacks=[MeritCallback(), ModelCheckpoint(checkpoints, save_last=True)],  # at the end of epochs
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(sequences(320)), batch_size=BATCH)
    trainer.fit(Model(arguments.optimizer), loader, ckpt_path=str(last) if last.exists() else None)
    if "loss" in trainer.callback_metrics:
        print(f"step {trainer.global_step}: loss {trainer.callback_metrics['loss'].item():.6f}")
    else:
        print(f"{arguments.epochs} epochs are done; use --epochs for more")


if __name__ == "__main__":
    main()
