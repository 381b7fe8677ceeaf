"""In which precision the parts of a model compute."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """For sums and exponentials: half precision becomes float32, float64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_autocast(x: Tensor) -> Tensor:
    """In autocast's dtype where autocast is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
