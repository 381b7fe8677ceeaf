"""The command line of a new run, as tyro reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.command_line import rules
from merit_lab.data import Dataset
from merit_lab.models.names import find_model
from merit_lab.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a language model. Under torchrun all processes train together."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run directory to create. None: runs/MODEL-OPTIMIZER-lrRATE-seedSEED."""
    auto_resume: bool = False
    """Resume the run if it exists, otherwise start it: one command that a scheduler can repeat."""


def parse(argv: Sequence[str]) -> tuple[TrainConfig, Path, bool]:
    """Return what to train, the run directory, and whether to resume a run there; the model comes first."""
    name, model = find_model(argv[0])
    arguments = tyro.cli(
        Arguments,
        default=Arguments(config=TrainConfig(data=tyro.MISSING, model=model)),
        args=argv[1:],
        prog=f"merit train {argv[0]}",
        config=(tyro.conf.AvoidSubcommands,),  # the model is already known
        registry=rules(),
    )
    config = arguments.config
    refuse_replaced_vocab(argv, config)
    optimizer = config.optimizer.resolve(model)
    kind = optimizer.name.rpartition(":")[2]  # of MODULE:CLASS, the class
    default = Path("runs") / f"{name}-{kind}-lr{optimizer.lr:g}-seed{config.seed}"
    return config, arguments.out or default, arguments.auto_resume


def typed(argv: Sequence[str], option: str) -> str | None:
    """Return the value of an option as it was typed, or None if it was not.

    Example:
        >>> typed(["--seed", "3", "--model.vocab_size=300"], "--model.vocab-size")
        '300'
    """
    for place, text in enumerate(argv):
        name, equals, value = text.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else " ".join(argv[place + 1 : place + 2])
    return None


def refuse_replaced_vocab(argv: Sequence[str], config: TrainConfig) -> None:
    """Raise if the command line gives a vocabulary that the data's would replace."""
    if typed(argv, "--model.vocab-size") is None:
        return
    given = config.model.vocab_size
    fitted = config.fitted_model(Dataset.open(config.data).vocab_size).vocab_size
    if given != fitted:
        raise ValueError(
            f"--model.vocab-size is {given}, but the vocabulary is sized for the tokenizer of {config.data}, "
            f"to {fitted}; leave the option out, or add --no-fit-vocab to have {given}"
        )
