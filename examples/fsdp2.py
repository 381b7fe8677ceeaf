"""MuonMERIT on sharded parameters: FSDP2, with a checkpoint that any number of ranks can continue.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 4 examples/fsdp2.py --steps 80    # continues where the first one stopped
    torchrun --nproc-per-node 2 examples/fsdp2.py --optimizer MERIT --checkpoints runs/fsdp2-merit

Runs on CUDA GPUs, or on CPUs if there are none. Nothing here is special to these optimizers: they accept
sharded parameters directly.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from merit_optim import optimizer_class, param_groups

VOCABULARY, WIDTH, CONTEXT, BATCH = 64, 128, 32, 16


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


def batch(step: int, rank: int, device: torch.device) -> Tensor:
    """Return sequences with a rule to learn: each token is 5 times the one before, plus 3."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(CONTEXT):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, 1).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with FSDP2.")
    parser.add_argument("--optimizer", default="MuonMERIT", help="or MERIT, LAMB, Muon, NorMuon, ...")
    parser.add_argument("--steps", type=int, default=40, help="total, including earlier runs")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs/fsdp2"), help="read if it exists, and written"
    )
    arguments = parser.parse_args()
    chosen = optimizer_class(arguments.optimizer)

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = Model().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # After sharding, so that the optimizer gets the sharded parameters. Each optimizer has a default learning
    # rate; set lr=... to change it.
    optimizer = chosen(param_groups(model, weight_decay=0.1), max_grad_norm=1.0)

    def state(step: int) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": step}

    step = 0
    # torch writes .metadata last: a checkpoint without it is not complete.
    if complete := sorted(arguments.checkpoints.glob("step-*/.metadata")):
        saved = state(step)
        dcp.load(saved, checkpoint_id=complete[-1].parent)  # type: ignore[attr-defined]  # missing in torch
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        step = saved["step"]

    first = step
    while step < arguments.steps:
        loss = model(batch(step, dist.get_rank(), device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    if step > first:
        folder = arguments.checkpoints / f"step-{step:06}"
        dcp.save(state(step), checkpoint_id=folder)  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
