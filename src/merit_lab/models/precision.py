"""The precision of the parts of a model."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32, for sums and exponentials; keep float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_autocast(x: Tensor) -> Tensor:
    """Convert to autocast's dtype if autocast is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
