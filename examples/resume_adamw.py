"""Continue an AdamW run with MERIT, and keep AdamW's moments.

    python examples/resume_adamw.py

MERIT's state has AdamW's names and meaning, so an AdamW checkpoint can be loaded. The learning rate and other
options are not loaded: they mean different things in the two optimizers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from merit_optim import MERIT, param_groups

VOCABULARY, WIDTH, BATCH = 64, 64, 64


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, VOCABULARY),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Train and return the last loss; each token is 5 times the one before, plus 3."""
    loss = torch.tensor(torch.nan)
    for step in steps:
        tokens = torch.randint(VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), (5 * tokens + 3) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue an AdamW run with MERIT.")
    parser.add_argument(
        "--checkpoint", type=Path, help="where to put AdamW's checkpoint; None: a temporary folder"
    )
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or Path(tempfile.mkdtemp()) / "adamw.pt"

    model = build()
    # The parameters must be in the same groups and the same order as for MERIT.
    adamw = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
    print(f"AdamW: loss {train(model, adamw, range(20)):.4f} after 20 steps")
    torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, checkpoint)

    saved: dict[str, dict[str, Tensor]] = torch.load(checkpoint, weights_only=True)
    model = build()
    model.load_state_dict(saved["model"])
    merit = MERIT(param_groups(model, weight_decay=0.1), lr=9e-3)
    merit.load_state_dict(saved["optimizer"])
    known = int(merit.state_dict()["state"][0]["step"])
    print(f"MERIT: lr {merit.param_groups[0]['lr']}, moments of {known} steps")
    print(f"MERIT: loss {train(model, merit, range(20, 40)):.4f} after 40 steps")


if __name__ == "__main__":
    main()
