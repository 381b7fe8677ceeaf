"""What a command line says itself: an option that cannot be honoured is refused, also at its default."""

from __future__ import annotations

from collections.abc import Sequence

from merit_lab.data import Dataset
from merit_lab.train.config import TrainConfig


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
    given, fitted = (
        config.model.vocab_size,
        config.fitted_model(Dataset.open(config.data).vocab_size).vocab_size,
    )
    if given != fitted:
        raise ValueError(
            f"--model.vocab-size is {given}, but the vocabulary is sized for the tokenizer of {config.data}, "
            f"to {fitted}; leave the option out, or add --no-fit-vocab to have {given}"
        )
