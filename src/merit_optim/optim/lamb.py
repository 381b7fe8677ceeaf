"""LAMB and its max-norm variant: one trust ratio for each weight."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim.algorithm import Rule
from merit_optim.optim.directions import Adam
from merit_optim.optim.options import EngineOptions
from merit_optim.optim.trust import TrustRatioOptimizer


class LAMB(TrustRatioOptimizer):
    """Layer-wise adaptive moments: AdamW's update scaled to the Euclidean size of each weight.

        u  = m' / (sqrt(v') + eps) + weight_decay*w
        w <- w - lr * |w| / |u| * u

    with bias-corrected moments m' and v', and ratio 1 where either norm is zero. The MERIT paper's equation
    for LAMB has no bias correction; use ``merit_optim.create("lamb", ...)`` for that form.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, relative to the size of the weights.
        betas: decay of the two moments.
        eps: added to the square root of v.
        weight_decay: added to u as ``weight_decay * w``.
        bias_correction: divide the moments by ``1 - beta**t``.
        clip: bound on each element of the scaled update; None for no clip.
        options: how the step is computed; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import LAMB
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = LAMB(model.parameters(), lr=1e-2, weight_decay=0.1)

    Reference:
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR
        2020, https://arxiv.org/abs/1904.00962
    """

    ALGORITHM: ClassVar[str] = "lamb"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        clip: float | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=Adam(betas=betas, eps=eps, bias_correction=bias_correction),
            rule=Rule(clip, element_wise=False, norm="l2"),
            **options,
        )


class MaxLAMB(TrustRatioOptimizer):
    """LAMB with the largest magnitude in place of the Euclidean norm.

        u  = m / (sqrt(v) + eps) + weight_decay*w
        w <- w - lr * max|w| / max|u| * u

    Halfway from LAMB to MERIT: without the element-wise ratios and the clip (table 3 of the MERIT
    paper).

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, relative to the size of the weights.
        betas: decay of the two moments.
        eps: added to the square root of v.
        weight_decay: added to u as ``weight_decay * w``.
        bias_correction: divide the moments by ``1 - beta**t``.
        clip: bound on each element of the scaled update; None for no clip.
        options: how the step is computed; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import MaxLAMB
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = MaxLAMB(model.parameters(), lr=1e-2)

    Reference:
        Luo et al., https://arxiv.org/abs/2508.20577, section 5.4
    """

    ALGORITHM: ClassVar[str] = "maxlamb"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-6,
        weight_decay: float = 0.1,
        *,
        bias_correction: bool = False,
        clip: float | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=Adam(betas=betas, eps=eps, bias_correction=bias_correction),
            rule=Rule(clip, element_wise=False, norm="max"),
            **options,
        )
