"""How the gradients of a step are scaled and clipped before an engine uses them, and whether it is skipped.

This is decided on the device, so that the host does not wait for it. A step that only makes state is
recognized on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from merit_optim.optim.engines.gradients import all_finite, total_norm
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Control, Controls, Work, by_device, is_true, items_of, moved
from merit_optim.optim.torch_private import is_fake

Log = dict[str, Tensor]
"""The "grad_norm" of the last step, and "num_skipped", counted over all steps."""


def controls_of(
    works: list[Work],
    sharding: Sharding | None,
    options: dict[str, Any],
    log: Log,
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    clips_norm: bool,
) -> Controls | None:
    """Decide how the gradients of each device are scaled, and whether the step is skipped.

    Ranks that share parameters decide together. ``None`` means that the host already knows that the step
    is skipped. ``grad_scale`` and ``found_inf`` come from a ``GradScaler``.
    """
    policy, max_norm = options["nonfinite"], options["max_grad_norm"] if clips_norm else None
    if found_inf is not None and sharding is not None:
        # The scaler asks the ranks that share its first gradient, which may not be all.
        found_inf = sharding.any(found_inf > 0)
    # The scaler expects overflows: the step is skipped below, without an error.
    if policy == "raise" and not (found_inf is not None and found_inf.item()):
        _raise_on_nonfinite(works, sharding)

    on_devices = by_device(works)
    if policy != "skip" and max_norm is None and grad_scale is None and found_inf is None:
        return dict.fromkeys(on_devices, Control())
    grads = {
        device: [g for work in on_device for g in work.grads] for device, on_device in on_devices.items()
    }
    # A rank may have no gradients if parameters are sharded.
    first = next(iter(grads)) if sharding is None or grads else sharding.device

    scale = None if grad_scale is None else grad_scale.to(first).double().reciprocal().float()
    if max_norm is not None:
        norm = total_norm(grads) if sharding is None else sharding.total_norm(works, first)
        norm = norm if scale is None else norm * scale
        log["grad_norm"] = norm.detach()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = factor if scale is None else factor * scale

    skip = None if found_inf is None else found_inf.to(first) > 0
    if policy == "skip":
        bad = ~all_finite(grads, first)
        bad = bad if sharding is None else sharding.any(bad)
        skip = bad if skip is None else skip | bad
    if skip is not None:
        if "num_skipped" not in log:
            log["num_skipped"] = torch.zeros((), dtype=torch.int64, device=first)
        # In place, so that a replayed CUDA graph keeps counting.
        log["num_skipped"].add_(skip.to(log["num_skipped"].device))
        on_host = first.type == "cpu" and len(grads) <= 1
        if not torch.compiler.is_compiling() and (on_host or is_fake(skip)):
            if is_true(skip, if_fake=False):
                return None
            skip = None
    return {
        device: Control(
            None if scale is None else moved(scale, device),
            None if skip is None else moved(skip, device),
        )
        for device in grads
    }


def only_makes_state(
    works: list[Work], sharding: Sharding | None, groups: list[dict[str, Any]], *, is_first: bool
) -> bool:
    """Whether this is the dummy first step by which torch.distributed.checkpoint initializes state.

    Its gradients and learning rates are zero. If it were counted and nothing were loaded afterwards, SOAP
    would take its bases and OrScale its first ratios from it.

    All ranks ask each other, even those for which it is not the first step: a rank that had no gradients
    has no state yet.
    """
    if sharding is None and not is_first:
        return False
    rates = [group["lr"] for group in groups]
    if torch.compiler.is_compiling() or any(isinstance(lr, Tensor) and not lr.is_cpu for lr in rates):
        return False  # values cannot be read without a sync
    grads = [grad for work in works for grad in work.grads]
    if any(rates) or (any(grad.is_cuda for grad in grads) and torch.cuda.is_current_stream_capturing()):
        return False
    is_real = not is_first or any(is_true(grad.any(), if_fake=True) for grad in grads)
    return not (is_real if sharding is None else sharding.any_rank(is_real))


def _is_finite(grad: Tensor) -> bool:
    return is_true(all_finite({grad.device: [grad]}, grad.device), if_fake=True)


def _raise_on_nonfinite(works: list[Work], sharding: Sharding | None) -> None:
    bad = [item for item in items_of(works) if not _is_finite(item.grad)]
    if bad:
        item = bad[0]
        count = int((~item.grad.isfinite()).sum())
        message = (
            f"the gradient of {item.name} (shape {tuple(item.param.shape)}) has {count} NaN or "
            f"infinite values out of {item.grad.numel()}"
        )
    else:
        message = "a gradient on another rank has NaN or infinite values"
    # All ranks raise together, or the others would wait for this one.
    if bad if sharding is None else sharding.any_rank(bool(bad)):
        raise FloatingPointError(
            f"{message}; nothing was changed. Use nonfinite='skip' to skip such steps, or "
            "nonfinite='propagate' to take them."
        )
