"""Choose how many sequences a rank passes through the model at a time."""

from __future__ import annotations

import torch

from merit_lab.models import Model
from merit_lab.train.config import TrainConfig
from merit_lab.train.parallel import Ranks

_CPU_TOKENS = 16384  # larger micro-batches are no faster on a CPU
_SHARE_OF_MEMORY = 0.9
_COPIES_TO_COME = 3  # copies of the weights that are allocated later: two moments, and the buffers of DDP


def choose_micro_batch(config: TrainConfig, model: Model, ranks: Ranks, *, bf16: bool) -> int:
    """Return the configured size, or the largest power of two that fits; the same on every rank.

    Call this before the model is wrapped for several ranks: until then a rank that runs out of memory does
    not leave others waiting.
    """
    begin, end = ranks.rows(config.batch)
    rows = end - begin
    if config.micro_batch is not None:
        return min(config.micro_batch, rows)
    if ranks.device.type == "cpu":
        return max(1, min(rows, _CPU_TOKENS // config.model.context))
    size = 1 << (rows.bit_length() - 1)
    while size > 1 and not _fits(model, size, ranks.device, bf16=bf16):
        size //= 2
    return -ranks.maximum(-size)[0]


def _fits(model: Model, size: int, device: torch.device, *, bf16: bool) -> bool:
    """Whether a forward and backward pass leave room; tried uncompiled, which needs more than compiled."""
    model.to(device)
    tokens = torch.zeros(size, model.config.context, dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(tokens, tokens).loss
        assert loss is not None
        loss.backward()
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        peak = torch.cuda.max_memory_allocated(device)
        model.zero_grad()
        torch.cuda.empty_cache()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total = torch.cuda.get_device_properties(device).total_memory
    share = torch.cuda.get_per_process_memory_fraction(device)  # below 1 where workers share the GPU
    return peak + _COPIES_TO_COME * weights < _SHARE_OF_MEMORY * share * total
