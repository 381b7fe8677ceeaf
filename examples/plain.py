"""MuonMERIT in a plain PyTorch loop: warm-up, clipping, a checkpoint, and an attention monitor.

    python examples/plain.py
    python examples/plain.py --steps 120    # continues where the first one stopped
    python examples/plain.py --optimizer SOAPMERIT --checkpoint runs/plain-soap.pt

Gradients are clipped inside the step; every 20th step is observed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from merit_optim import optimizer_class, param_groups
from merit_optim.monitor import AttentionMonitor

VOCABULARY, WIDTH, CONTEXT, BATCH = 64, 64, 32, 32


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token from those before it."""
        seen, wanted = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1], device=tokens.device)
        hidden = self.embedding(seen)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted.flatten())


def batch(step: int) -> Tensor:
    """Return sequences with a rule to learn: each token is 5 times the one before, plus 3."""
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(step))]
    for _ in range(CONTEXT):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model.")
    parser.add_argument("--optimizer", default="MuonMERIT", help="or MERIT, LAMB, Muon, SOAPMERIT, ...")
    parser.add_argument("--steps", type=int, default=60, help="total, including earlier runs")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/plain.pt"), help="read if it exists, and written"
    )
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Model().to(device)
    # Each optimizer has a default learning rate; set lr=... to change it.
    optimizer = optimizer_class(arguments.optimizer)(param_groups(model, weight_decay=0.1), max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    monitor = AttentionMonitor(model, every=20)

    step = 0
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        step = saved["step"]

    while step < arguments.steps:
        with monitor:  # every 20th step is observed, the others cost nothing
            loss = model(batch(step).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        step += 1
        if reading := monitor.read():
            largest = reading.scalars()["attention/max_logit"]
            print(f"step {step}: loss {loss.item():.4f}, largest attention logit {largest:.2f}", flush=True)
    print(f"step {step}: loss {model(batch(step).to(device)).item():.6f}")

    arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"schedule": schedule.state_dict(), "step": step}, arguments.checkpoint)


if __name__ == "__main__":
    main()
