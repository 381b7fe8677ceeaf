"""Every name of torch that is used here though it begins with an underscore, and why.

torch promises nothing about these. They stand in one file so that a new version of torch is read against
it, and ``tests/optim/test_torch_private.py`` says for each what no longer holds.

Two more names are torch's, for methods that our classes define: ``_init_group``, which torch.compile runs as
it is instead of tracing it, and ``_step_supports_amp_scaling``, by which ``GradScaler`` leaves unscaling and
skipping to a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from torch.optim import Optimizer
    from torch.overrides import TorchFunctionMode

# A method that is never compiled. The public torch.compiler.disable imports the compiler at once.
never_compiled = _disable_dynamo

# Turns autograd on in a step for differentiable=True and off otherwise, as in every optimizer of torch.
with_grad_if_differentiable = _use_grad_for_differentiable

# One launch for many tensors. torch's own optimizers are made of these.
foreach_abs = torch._foreach_abs
foreach_abs_ = torch._foreach_abs_
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_neg = torch._foreach_neg
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sub_ = torch._foreach_sub_


def check_graph_capture(optimizer: Optimizer) -> None:
    """Raise where a CUDA graph captures a step that is not ``capturable``, as torch's optimizers do."""
    optimizer._accelerator_graph_capture_health_check()


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack of those that were entered, wherever it stands there.

    Leaving one, as torch has it, takes off the last, whichever that is: so if the mode is not there, another
    that was left has taken it off, and stands there in its place.
    """
    stack = _get_current_function_mode_stack()
    place = stack.index(mode) if mode in stack else len(stack) - 1
    later = [_pop_mode() for _ in stack[place + 1 :]]
    _pop_mode()
    for other in reversed(later):
        _push_mode(other)


def is_flat_of_fsdp1(param: Tensor) -> bool:
    """Whether FSDP1 made the parameter of several, end to end."""
    return bool(getattr(param, "_fsdp_flattened", False))


def shard_kinds() -> tuple[type[Any], ...]:
    """The placements that shard a dimension: FSDP2 with tensor parallelism has a kind of its own."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return Shard, _StridedShard


def num_shards_before(placement: Placement) -> int:
    """How many shards there were already where FSDP2 shards what tensor parallelism has sharded; else 1."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def local_tensor(x: DTensor) -> Tensor:
    """What ``to_local()`` gives without autograd; of a parameter that makes a new object every time."""
    return x._local_tensor


def finished(x: Tensor) -> Tensor:
    """The tensor itself, when the collective that may still be writing to it is done."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x
