"""Default settings of the optimizers by name, from the MERIT paper if it has them. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an optimizer, from section 5.1 and table 4 of arXiv 2508.20577 if they include it.

    ``learning_rates`` are the peak learning rates for GPT-2 small, medium and large; empty if the paper gives
    none.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    learning_rates: Mapping[str, float] = field(default_factory=dict)


PAPERS_MODELS = ("gpt2-small", "gpt2-medium", "gpt2-large")


def _gpt2(*rates: float) -> dict[str, float]:
    return dict(zip(PAPERS_MODELS, rates, strict=True))


_PAPERS_ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.1}

SETTINGS: Mapping[str, Settings] = {
    "adamw": Settings(options=_PAPERS_ADAM, learning_rates=_gpt2(1e-3, 4e-3, 2e-3)),
    "lion": Settings(
        options={"betas": (0.95, 0.98), "weight_decay": 0.1}, learning_rates=_gpt2(1e-4, 8e-5, 8e-5)
    ),
    "sophiag": Settings(
        options={"betas": (0.92, 0.99), "weight_decay": 0.1, "hessian_interval": 10},
        learning_rates=_gpt2(1e-4, 1e-4, 2e-4),
    ),
    # The paper's equation for LAMB has no bias correction; "lamb" is LAMB's own.
    "lamb-uncorrected": Settings(
        options={**_PAPERS_ADAM, "bias_correction": False}, learning_rates=_gpt2(1e-2, 1e-2, 8e-3)
    ),
    "maxlamb": Settings(options=_PAPERS_ADAM),
    "merit": Settings(options=_PAPERS_ADAM, learning_rates=_gpt2(9e-3, 9e-3, 6e-3)),
    # Not in the paper.
    "lamb": Settings(),
    "muon": Settings(),
    "normuon": Settings(),
    "orscale": Settings(),
    "soap": Settings(),
    "muon-merit": Settings(),
    "muon-sphere": Settings(),
    "normuon-sphere": Settings(),
    "muown": Settings(),
    "soap-muon": Settings(),
    "soap-merit": Settings(),
}
