"""All private names of torch that this package uses, and why.

torch makes no promises about these. They are in one file so that a new version of torch can be compared with
it; ``tests/optim/test_torch_private.py`` shows which no longer work.

Two more names that our classes define have a meaning for torch: ``_init_group``, which torch.compile runs
instead of tracing it, and ``_step_supports_amp_scaling``, which makes ``GradScaler`` leave unscaling and
skipping to the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.overrides import TorchFunctionMode

# A method that is never compiled. The public torch.compiler.disable imports the compiler at once.
never_compiled = _disable_dynamo

# Whether a tensor is made of others, as a DTensor is, so that it has no memory of its own.
is_wrapper = is_traceable_wrapper_subclass

# Whether two tensors share memory. Unlike an address, FakeTensorMode knows it.
share_memory = torch._C._is_alias_of  # type: ignore[attr-defined]

# A context in which operations on real tensors give their values, also inside of FakeTensorMode.
with_values = unset_fake_temporarily

# Turns autograd on in a step for differentiable=True and off otherwise, as in every optimizer of torch.
with_grad_if_differentiable = _use_grad_for_differentiable

# One launch for many tensors, as in torch's optimizers.
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


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no values: on the meta device, or of FakeTensorMode, which estimates memory."""
    return x.is_meta or isinstance(x, FakeTensor)


def check_graph_capture(optimizer: Optimizer) -> None:
    """Raise if a CUDA graph captures a step that is not ``capturable``, as torch's optimizers do."""
    optimizer._accelerator_graph_capture_health_check()


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Remove a mode from the stack of function modes, wherever it is.

    Leaving a mode in torch pops the last one, whichever that is. So if the mode is not on the stack, leaving
    another mode has popped it, and that one is still there: pop the last one instead.
    """
    stack = _get_current_function_mode_stack()
    place = stack.index(mode) if mode in stack else len(stack) - 1
    later = [_pop_mode() for _ in stack[place + 1 :]]
    _pop_mode()
    for other in reversed(later):
        _push_mode(other)


def is_compiled_in_place(module: Module) -> bool:
    """Whether ``module.compile()`` was called: hooks that are added later would not run, or be compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place."""
    return tensor._version


def compile_or_fail(versions: int = 1024) -> None:
    """Let torch.compile make at least this many versions of a function, and raise an error beyond.

    By default it makes eight, and then runs new ones uncompiled with a warning only, many times slower.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(versions, config.recompile_limit)
    config.accumulated_recompile_limit = max(versions, config.accumulated_recompile_limit)
    config.fail_on_recompile_limit_hit = True


def is_flat_of_fsdp1(param: Tensor) -> bool:
    """Whether FSDP1 made the parameter by concatenating several flat ones."""
    return bool(getattr(param, "_fsdp_flattened", False))


def shard_kinds() -> tuple[type[Any], ...]:
    """The placements that shard a dimension; FSDP2 with tensor parallelism has a separate one."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return Shard, _StridedShard


def num_shards_before(placement: Placement) -> int:
    """Number of tensor-parallel shards that FSDP2 shards further; 1 without tensor parallelism."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def local_tensor(x: DTensor) -> Tensor:
    """``to_local()`` without autograd, which would make a new object on every call for a parameter."""
    return x._local_tensor


def finished(x: Tensor) -> Tensor:
    """The tensor, after waiting for a collective that may still be writing to it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x
