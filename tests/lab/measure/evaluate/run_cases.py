"""Run directories with checkpoints, without training."""

from dataclasses import replace
from pathlib import Path

import torch

from merit_lab.models import LanguageModel, ModelConfig, build
from merit_lab.runs import Run
from merit_lab.train import OptimizerConfig, TrainConfig, checkpoint
from merit_lab.train.parallel import Ranks

TINY = ModelConfig(width=16, heads=2, layers=2, context=640, vocab_size=256)
ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


def make_run(
    folder: Path,
    *,
    model: ModelConfig = TINY,
    tokenizer: str = "bytes",
    data: Path = Path("data"),
    fingerprint: str = "",
    steps: tuple[int, ...] = (10,),
) -> Run:
    """A run with a checkpoint of random weights after each of some steps."""
    config = TrainConfig(data=data, model=model, optimizer=OptimizerConfig(lr=1e-3), steps=max(steps))
    about = {"folder": str(data), "tokenizer": tokenizer, "fingerprint": fingerprint}
    run = Run.create(folder, config.to_dict(), {"data": about})
    for step in steps:
        module = random_model(model, seed=step)
        # AdamW's state is in the checkpoint, and must not be asked for.
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).loss.backward()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        checkpoint.save(
            run.checkpoints,
            module,
            optimizer,
            ALONE,
            step=step,
            metrics=(0, ""),
            seconds=1.0,
            config=config.fingerprint,
            keep=9,
        )
    return run


def random_model(config: ModelConfig, seed: int) -> LanguageModel:
    """A model whose logits differ enough to be told apart."""
    torch.manual_seed(seed)
    model = build(replace(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()
