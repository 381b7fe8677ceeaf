"""MuonMERIT with Accelerate, with a checkpoint that a later run continues.

    python examples/accelerate_train.py                # or: accelerate launch
    python examples/accelerate_train.py --steps 40     # continues where the first one stopped
    python examples/accelerate_train.py --optimizer MERIT --folder runs/accelerate-merit

These optimizers need weights in their original shapes: they refuse the flattened ones of DeepSpeed ZeRO and
FSDP1. FSDP2 keeps the shapes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from merit_optim import optimizer_class, param_groups
from merit_optim.monitor import AttentionMonitor, update_scalars

VOCABULARY, CONTEXT, BATCH = 64, 32, 32


def sequences(count: int) -> Tensor:
    """Return sequences with a rule to learn: each token is 5 times the one before, plus 3."""
    tokens = [torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))]
    for _ in range(CONTEXT - 1):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with Accelerate.")
    parser.add_argument("--optimizer", default="MuonMERIT", help="or MERIT, LAMB, Muon, SOAPMERIT, ...")
    parser.add_argument("--steps", type=int, default=20, help="total, including earlier runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/accelerate"), help="folder of the checkpoint"
    )
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    # Before prepare, which may replace whole weights by sharded ones. Each optimizer has a default learning
    # rate; set lr=... to change it.
    optimizer = optimizer_class(arguments.optimizer)(param_groups(model, weight_decay=0.1))
    loader = DataLoader(TensorDataset(sequences(4096)), batch_size=BATCH)
    monitor = AttentionMonitor(model, every=10)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    if (arguments.folder / "steps.txt").exists():
        accelerator.load_state(str(arguments.folder))
        step = int((arguments.folder / "steps.txt").read_text())
    if step >= arguments.steps:
        accelerator.print(f"{step} steps are done; use --steps for more")
        return

    while step < arguments.steps:  # an epoch, or the rest of one
        for (tokens,) in accelerator.skip_first_batches(loader, step % len(loader)):
            with monitor:
                loss = prepared(tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            with optimizer.recording() as statistics:
                wrapped.step()
            wrapped.zero_grad()
            step += 1
            if reading := monitor.read():
                numbers = reading.scalars(per_layer=False) | update_scalars(statistics, per_parameter=False)
                rounded = {name: round(number, 3) for name, number in numbers.items()}
                accelerator.print(f"step {step}: loss {loss.item():.6f}", rounded)  # of the first process
            if step == arguments.steps:
                break
    accelerator.print(f"step {step}: loss {loss.item():.6f}")

    accelerator.save_state(str(arguments.folder))
    if accelerator.is_main_process:
        (arguments.folder / "steps.txt").write_text(str(step))


if __name__ == "__main__":
    main()
