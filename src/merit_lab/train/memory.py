"""Refuse runs that cannot fit into memory before any is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from merit_lab.models import num_parameters
from merit_lab.train.config import TrainConfig
from merit_lab.train.parallel import Ranks

_BYTES_OF_A_WEIGHT = 4
_BYTES_OF_A_TOKEN = 16  # input and target
_LIMIT_OF_A_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def check_memory(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ValueError if a run needs more memory than there is.

    This counts weights, gradients and the tokens of a step. Moments and activations come on top, so a run
    that passes may still run out of memory.
    """
    parameters = num_parameters(config.model)
    weights = parameters * _BYTES_OF_A_WEIGHT
    tokens = config.batch // ranks.size * config.model.context * _BYTES_OF_A_TOKEN
    holders = ranks.size if config.parallel == "fsdp2" else 1
    trained = 2 * weights // holders + tokens
    on_host = _host_memory()
    if ranks.device.type == "cuda":
        on_device = torch.cuda.get_device_properties(ranks.device).total_memory
        places = [(weights, on_host, "this machine"), (trained, on_device, "the GPU")]
    else:
        places = [(max(weights, trained), on_host, "this machine")]
    for needed, available, place in places:
        if needed > available:
            raise ValueError(
                f"{parameters / 1e6:.1f}M parameters and batches of {config.batch} sequences of "
                f"{config.model.context} tokens need at least {_gib(needed)}, but {place} has "
                f"{_gib(available)}; choose a smaller --batch or model (--model.layers, --model.width, "
                "--model.context)"
            )


def _host_memory() -> int:
    """Return the memory of this machine in bytes, or the limit of its container."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(_LIMIT_OF_A_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or its limit is "max"
        return installed


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
