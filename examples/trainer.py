"""MuonMERIT with the Hugging Face Trainer, with a checkpoint that a later run continues.

    python examples/trainer.py
    python examples/trainer.py --steps 40    # continues where the first one stopped
    python examples/trainer.py --optimizer MERIT --folder runs/trainer-merit

The optimizer can be passed as an object (``optimizers=``), or as a factory that the Trainer calls with the
wrapped model (``optimizer_cls_and_kwargs=``): ``--by-factory``. FSDP needs the factory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from merit_optim import optimizer_class, param_groups
from merit_optim.integrations.huggingface import MeritCallback

VOCABULARY, CONTEXT = 64, 32


def examples(count: int) -> list[dict[str, Tensor]]:
    """Return sequences with a rule to learn: each token is 5 times the one before, plus 3."""
    tokens = [torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))]
    for _ in range(CONTEXT - 1):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return [{"input_ids": row, "labels": row} for row in torch.stack(tokens, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with the Trainer.")
    parser.add_argument("--optimizer", default="MuonMERIT", help="or MERIT, LAMB, Muon, SOAPMERIT, ...")
    parser.add_argument("--steps", type=int, default=20, help="total, including earlier runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/trainer"), help="folder of the checkpoints")
    parser.add_argument("--by-factory", action="store_true", help="let the Trainer create the optimizer")
    arguments = parser.parse_args()
    chosen = optimizer_class(arguments.optimizer)

    def build(model: nn.Module) -> Optimizer:
        # Each optimizer has a default learning rate; set lr=... to change it. That of TrainingArguments is
        # not used.
        return chosen(param_groups(model, weight_decay=0.1))

    arguments.folder.mkdir(parents=True, exist_ok=True)
    newest = get_last_checkpoint(str(arguments.folder))
    if newest is not None:
        # The Trainer would take one more step before it notices that it is done.
        done = TrainerState.load_from_json(str(Path(newest, "trainer_state.json"))).global_step
        if done >= arguments.steps:
            print(f"{done} steps are done; use --steps for more")
            return

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    options: dict[str, Any] = {}
    if arguments.by_factory:
        options["optimizer_cls_and_kwargs"] = (lambda: build, {})  # the Trainer calls it, and then build
    else:
        options["optimizers"] = (build(model), None)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(arguments.folder),
            max_steps=arguments.steps,
            per_device_train_batch_size=32,
            lr_scheduler_type="constant_with_warmup",  # relative to the optimizer's learning rates
            warmup_steps=5,
            max_grad_norm=1.0,
            logging_steps=10,
            save_steps=10,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],  # "tensorboard", "wandb" and others receive the callback's numbers too
            disable_tqdm=True,
        ),
        train_dataset=examples(1024),
        **options,
    )
    trainer.add_callback(MeritCallback(trainer))
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
