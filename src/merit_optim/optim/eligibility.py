"""Which parameters an optimizer of the family can update, and which the fused engine can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.parameter import is_lazy

from merit_optim.optim.axes.directions import MatrixDirection
from merit_optim.optim.engines import interpreting
from merit_optim.optim.engines.ranks import placements
from merit_optim.optim.engines.ranks.placements import is_sharded, refuse_inexact
from merit_optim.optim.spec import Spec
from merit_optim.optim.torch_private import is_fake, is_flat_of_fsdp1

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def check(owner: str, name: str, param: Tensor, spec: Spec, *, is_new_vector: bool, sorts: bool) -> None:
    """Raise if a parameter cannot be updated as the spec says.

    ``is_new_vector``: it has one dimension, and a size that the user gave to no parameter. ``sorts``: the
    optimizer has other choices for hidden matrices, which may be in a flat buffer.
    """
    if is_lazy(param):
        raise TypeError(
            f"{name} has no shape yet; its rows and columns are known after one forward pass of the model. "
            "Create the optimizer after that."
        )
    is_element_wise = spec.is_element_wise and not sorts
    if is_new_vector and not is_element_wise:
        raise TypeError(
            f"a parameter was replaced by a flat buffer of {param.numel()} elements, a shape that {owner} "
            "was not given. DeepSpeed ZeRO and Megatron's distributed optimizer do this: without rows and "
            "columns there are no trust ratios. Use FSDP2 or DDP, or, if the parameter is yours, "
            "add_param_group."
        )
    if is_flat_of_fsdp1(param) and not is_element_wise:
        raise TypeError(
            f"{name} is a flat parameter of FSDP1: without rows and columns there are no trust ratios. Use "
            "FSDP2 (torch.distributed.fsdp.fully_shard), or an optimizer outside this family."
        )
    if not is_element_wise:
        refuse_inexact(name, param)
    reasons = [spec.view.refusal(param.shape)]
    reasons += [choice.refusal(spec.view, param.shape) for choice in spec.choices]
    if not (is_sharded(param) or param.is_meta or is_fake(param)):
        reasons.append(spec.hold.blank(param))
    if reason := next(filter(None, reasons), None):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} cannot be optimized with these options: {reason}"
        )
    if is_sharded(param):
        _check_sharded(name, param, spec)


def _check_sharded(name: str, param: DTensor, spec: Spec) -> None:
    """Raise if a sharded parameter cannot be updated as the spec says."""
    has_products = spec.hold.line_dim(spec.view) is not None
    if isinstance(spec.direction, MatrixDirection) or spec.view.split is not None or has_products:
        placements.local_region(name, param)
    if reason := placements.refusal(param, spec, has_stacked_state=bool(spec.stacked_keys)):
        raise ValueError(f"{name} of shape {tuple(param.shape)} cannot be sharded like this: {reason}")
    if spec.differentiable:
        raise TypeError(
            f"{name} is sharded, and a differentiable step does not communicate with other ranks. Use "
            "differentiable=False, or unsharded parameters."
        )


def check_fused(name: str, param: Tensor, spec: Spec) -> None:
    """Raise if the fused engine, which was required, cannot update a parameter."""
    from merit_optim.optim.engines.fused.refusals import refusal

    reason = refusal(spec, param)
    if param.device.type != "cuda" and not interpreting():
        reason = f"it is on {param.device}, and the fused engine runs on CUDA devices"
    if reason:
        raise ValueError(
            f"fused=True, but {name} of shape {tuple(param.shape)} cannot be fused: {reason}. Move or change "
            "it, or use fused=None for the fastest engine that each parameter allows."
        )
