"""MERIT: max-norm trust ratios for each weight, row and column, element by element, and a clip."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim.algorithm import Norm, Rule
from merit_optim.optim.directions import Adam
from merit_optim.optim.options import EngineOptions
from merit_optim.optim.trust import TrustRatioOptimizer


class MERIT(TrustRatioOptimizer):
    """Large-batch optimizer that keeps attention logits under control.

        m <- beta1*m + (1-beta1)*g        v <- beta2*v + (1-beta2)*g*g
        u  = m / (sqrt(v) + eps) + weight_decay*w
        s_ij = max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|)
        w <- w - lr * clamp(s*u, -clip, clip)

    A row or column in which w or u is all zero is not scaled (s = 1); vectors and scalars have only
    the last of the three ratios. Arithmetic is in float32 whatever the parameters' dtype. The state has
    AdamW's keys, so a run started with ``torch.optim.AdamW`` can continue here, and vice versa
    (torch's ``load_state_dict`` also loads the checkpoint's options: set AdamW's again afterwards).

    Args:
        params: parameters, named parameters, or parameter groups (see ``param_groups``).
        lr: learning rate, a number or a one-element tensor. Unlike AdamW's, it is relative to the size of
            the weights (the paper uses 9e-3 for GPT-2 small and medium, 6e-3 for large).
        betas: decay of the two moments.
        eps: added to the square root of v.
        weight_decay: added to u as ``weight_decay * w``, so it is scaled and clipped too.
        clip: bound on each element of ``s*u``; None for no clip.
        element_wise: use the ratios of rows and columns; False uses only the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        norm: "max" or "l2", the norm in all ratios; "none" for ratios of 1.
        bias_correction: divide the moments by ``1 - beta**t`` as Adam does.
        options: how a weight is viewed as matrices and how the step is computed, for the whole family:

            - ``matrix_dims``: number of trailing dimensions that form one matrix; the dimensions before them
              stack matrices, each with its own ratios (2 for experts stacked as (experts, rows, columns)).
              None: all dimensions, viewed as (first dimension) x (all others).
            - ``split``: number of matrices of equal size that are concatenated in the weight, or the size of
              each, such as (768, 256, 256); each has its own ratios. They are rows of the weight with
              ``split_dim=0``, columns with 1, and outputs with None: rows, unless it is ``transposed``.
            - ``transposed``: whether a weight is stored as (inputs, outputs), as in Hugging Face's Conv1D, so
              that columns are outputs. ``param_groups`` recognizes such layers. MERIT's ratios do not
              depend on it; ``split`` and some options of Muon's direction do.
            - ``state_dtype``: dtype of the state: float32, bfloat16 or float64. The state of float64 weights
              is always float64.
            - ``nonfinite``: what to do with a step whose gradients contain NaN or infinity. "propagate" takes
              the step, as AdamW does; "skip" changes nothing and counts it in ``num_skipped_steps``, without
              a host sync; "raise" raises an error that names the parameter.
            - ``max_grad_norm``: clip gradients as ``clip_grad_norm_`` before the step would, without changing
              ``.grad``; the norm is stored in ``grad_norm``.
            - ``maximize``: ascend instead of descend.
            - ``foreach``: True, or None, processes many weights per launch, at the cost of larger
              temporaries; False takes one at a time. On CPUs False only keeps small weights from being copied
              into one.
            - ``fused``: True requires the fused engine; None uses it where it can run.
            - ``capturable``: keep the step count on the device, for CUDA graphs and ``GradScaler`` without
              sync.
            - ``differentiable``: let autograd record the step.

    Examples:
        >>> import torch
        >>> from merit_optim import MERIT, param_groups
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = MERIT(param_groups(model, weight_decay=0.1), lr=9e-3, max_grad_norm=1.0)
        >>> loss = model(torch.randn(4, 8)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    Reference:
        Luo et al., "MERIT: Maximum-normalized Element-wise Ratio for Language Model Large-batch
        Training", ICML 2025, https://arxiv.org/abs/2508.20577
    """

    ALGORITHM: ClassVar[str] = "merit"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 9e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-6,
        weight_decay: float = 0.1,
        *,
        clip: float | None = 1.0,
        element_wise: bool = True,
        weight_bound: bool = True,
        norm: Norm = "max",
        bias_correction: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=Adam(betas=betas, eps=eps, bias_correction=bias_correction),
            rule=Rule(clip, element_wise, weight_bound, norm),
            **options,
        )
