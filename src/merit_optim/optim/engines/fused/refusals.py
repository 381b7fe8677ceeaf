"""What cannot be fused, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from merit_optim.optim.axes.ratios import Unscaled
from merit_optim.optim.engines.fused.known import is_muon, is_sphere, unknown_choice
from merit_optim.optim.engines.fused.launch import TRITON
from merit_optim.optim.spec import Spec

# Offsets within a tile have 32 bits, and within a matrix that is multiplied.
MAX_COLUMNS = 2**24
MAX_MATRIX = 2**31 - 1


def refusal(spec: Spec, param: Tensor) -> str | None:
    """Why a parameter cannot be fused, or None."""
    if param.dtype not in TRITON:
        return f"it has dtype {param.dtype}, not one of {', '.join(map(str, TRITON))}"
    if not param.is_contiguous():
        return "it is not contiguous"
    if param.is_neg():
        return "it is a view that torch negates when it is read"
    matrices = spec.view.matrices(param.shape)
    if is_muon(spec.direction) and matrices.rows * matrices.columns > MAX_MATRIX:
        return "it has a matrix of 2**31 elements or more"
    if matrices.columns > MAX_COLUMNS and not matrices.is_vector:
        return f"its rows have more than {MAX_COLUMNS} elements"
    return refused_options(spec)


def refused_options(spec: Spec) -> str | None:
    """Why no parameter with these options can be fused, or None."""
    view, ratio, direction, hold = spec.view, spec.ratio, spec.direction, spec.hold
    if unknown := unknown_choice(spec):
        return f"the kernels do not support {unknown}"
    if view.split is not None and view.split_dim:
        return f"the kernels do not support split={view.split!r} of columns"
    if is_muon(direction) and direction.ns_dtype != "bfloat16":
        return f"the kernels do not support ns_dtype={direction.ns_dtype!r}"
    if is_sphere(hold):
        if hold.sphere_of != "matrix":
            return f"the kernels do not support sphere_of={hold.sphere_of!r}"
        if not is_muon(direction) or not isinstance(ratio, Unscaled) or ratio.clip is not None:
            return "the kernels do not support hold='sphere' with a ratio, a clip or direction='adam'"
    if ratio.measures == "l2" and ratio.has_rows:
        return "norm='l2' with element_wise=True needs a sum for every row and column, which the kernels lack"
    return None


def can_be_formed(spec: Spec, n_NRC: Tensor) -> bool:
    """Whether the kernels can form the direction of a gathered matrix."""
    return refused_options(spec) is None and n_NRC.numel() <= MAX_MATRIX


def can_be_fused(
    spec: Spec,
    original: Tensor,
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    radius: Tensor | None = None,
) -> bool:
    """Whether the tensors of a parameter are what the kernels assume. State may come from anywhere."""
    if not param.numel() or refusal(spec, param) is not None:
        return False
    if any(x.device != param.device for x in (grad, first, second, step)):
        return False
    if not all(_is_plain(x) and x.dtype in TRITON for x in (grad, first, second)):
        return False
    if first.dtype != second.dtype or step.dtype != torch.float32:
        return False
    num, direction, view = param.numel(), spec.direction, spec.view
    num_second = num
    if is_muon(direction) and direction.neuron_beta is not None:
        num_outputs = view.matrices(original.shape).shape[direction.output_dim]  # of whole matrices
        num_second = view.matrices(param.shape).num * num_outputs
    if radius is not None:
        whole = view.matrices(original.shape)
        num_lines = view.matrices(param.shape).num * whole.rows
        is_other = radius.dtype != first.dtype or radius.device != param.device
        if is_other or not _is_plain(radius) or radius.numel() != num_lines:
            return False
    return (grad.numel(), first.numel(), second.numel()) == (num, num, num_second)


def _is_plain(x: Tensor) -> bool:
    """Whether memory has its elements in order, as they are. Gradients may be negated when they are read."""
    return x.is_contiguous() and not x.is_neg()
