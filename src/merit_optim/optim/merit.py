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
    the last of the three ratios. Arithmetic is in float32 whatever the parameters' dtype. State has
    AdamW's keys, so a run begun with ``torch.optim.AdamW`` can go on here, and back
    (torch's ``load_state_dict`` then takes the options of the checkpoint: set AdamW's own afterwards).

    Args:
        params: parameters, named parameters, or parameter groups (see ``param_groups``).
        lr: learning rate, a number or a one-element tensor. Not AdamW's: the ratios make it relative
            to the size of the weights (the paper uses 9e-3 for GPT-2 small and medium, 6e-3 for large).
        betas: decay of the two moments.
        eps: added to the square root of v.
        weight_decay: added to u as ``weight_decay * w``, so it is scaled and clipped with it.
        clip: bound on each element of ``s*u``; None for none.
        element_wise: use the rows' and columns' ratios; False leaves the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        norm: "max" or "l2", the norm in all ratios.
        bias_correction: divide the moments by ``1 - beta**t`` as Adam does.
        options: how a weight is seen, and how the step is computed, the same for the whole family:

            - ``matrix_dims``: how many trailing dimensions make one matrix; the ones before them stack
              matrices, each with its own ratios (2 for experts stacked as (experts, rows, columns)). None:
              all, seen as (first dimension) x (all the rest).
            - ``split``: how many matrices of one size stand below each other in the weight, or the size of
              each, as (768, 256, 256); each has its own ratios. With ``split_dim=1`` they stand side by side.
            - ``state_dtype``: dtype of the state: float32, bfloat16 or float64; float64 weights have float64.
            - ``nonfinite``: what to do with a step whose gradients hold NaN or infinity. "propagate" takes
              it, as AdamW does; "skip" changes nothing and counts it in ``num_skipped_steps``, without a host
              sync; "raise" names the parameter.
            - ``max_grad_norm``: take the step that ``clip_grad_norm_`` before it would make, without changing
              ``.grad``; the norm is left in ``grad_norm``.
            - ``maximize``: ascend instead of descend.
            - ``foreach``: True puts many weights into each launch, at the price of larger temporaries; None
              does so except on CPUs.
            - ``fused``: True demands the fused engine; None takes it where it can run.
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
