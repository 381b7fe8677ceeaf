"""Optimizers for large-batch language-model training: MERIT's ratios on directions of Adam, Muon and SOAP.

The public names are loaded on first use: `import merit_optim` alone does not import torch, so the command
line starts fast and `merit_optim.jax` works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merit_optim.optim import (
        LAMB,
        MERIT,
        OPTIMIZERS,
        SOAP,
        SOAPMERIT,
        Direction,
        Hold,
        Lion,
        MatrixDirection,
        MaxLAMB,
        Muon,
        MuonMERIT,
        MuonSphere,
        Muown,
        NorMuon,
        NorMuonSphere,
        OrScale,
        Preset,
        Ratio,
        SOAPMuon,
        SophiaG,
        UpdateStatistics,
        compose,
        create,
        describe_groups,
        init_hidden,
        optimizer_class,
        param_groups,
        register,
        sampled_label_loss,
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "LAMB",
    "MERIT",
    "OPTIMIZERS",
    "SOAP",
    "SOAPMERIT",
    "Direction",
    "Hold",
    "Lion",
    "MatrixDirection",
    "MaxLAMB",
    "Muon",
    "MuonMERIT",
    "MuonSphere",
    "Muown",
    "NorMuon",
    "NorMuonSphere",
    "OrScale",
    "Preset",
    "Ratio",
    "SOAPMuon",
    "SophiaG",
    "UpdateStatistics",
    "compose",
    "create",
    "describe_groups",
    "init_hidden",
    "optimizer_class",
    "param_groups",
    "register",
    "sampled_label_loss",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("merit_optim.optim"), name)
    globals()[name] = value  # the next access is a plain lookup
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
