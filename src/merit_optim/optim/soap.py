"""Optimizers with SOAP's direction: SOAPMERIT, with MERIT's ratios, and SOAP, without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim.algorithm import UNSCALED, Norm, Rule
from merit_optim.optim.directions import Soap
from merit_optim.optim.hidden import HiddenMatrixOptimizer
from merit_optim.optim.kinds import Kind
from merit_optim.optim.options import EngineOptions


class SOAPMERIT(HiddenMatrixOptimizer):
    """MERIT's ratios on SOAP's direction for hidden matrices, AdamW for the rest.

        d  = Adam's direction, formed in the eigenbasis of the averages of g g' and g' g
        u  = d + weight_decay*w
        s_ij = max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|)
        w <- w - lr * clamp(s*u, -clip, clip)

    Args:
        params: parameter groups from ``param_groups(model)``; see ``MuonMERIT``.
        lr: learning rate of the hidden matrices, relative to their size as for ``MERIT``.
        betas: decay of the two moments, both in the eigenbasis.
        eps: added to the square root of the second moment.
        weight_decay: added to u as ``weight_decay * w``; decoupled, as AdamW's, for the rest.
        shampoo_beta: decay of the averages of g g' and g' g; None for the second of ``betas``.
        precondition_frequency: number of steps between improvements of a matrix's eigenbasis.
        max_precond_dim: a side longer than this is not rotated.
        refresh_phase: None improves the eigenbases in turns, so that all steps but the first cost about the
            same; 0, or another step of the cycle, improves all of them in that step.
        clip: bound on each element of ``s*u``; None for no clip.
        element_wise: use the ratios of rows and columns; False uses only the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        norm: "max" or "l2", the norm in all ratios; "none" for s = 1, without bounds.
        ratio_bounds: the smallest and the largest value of s; None for no bounds.
        rest_lr: learning rate of the rest (embeddings, head and vectors); None for 0.4 of ``lr``.
        rest: other options for the rest; see ``MuonMERIT``.
        options: how the step is computed; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import SOAPMERIT, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = SOAPMERIT(param_groups(model), lr=2e-2)

    Reference:
        Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", ICLR 2025,
        https://arxiv.org/abs/2409.11321; Luo et al., https://arxiv.org/abs/2508.20577 for the ratios.
    """

    ALGORITHM: ClassVar[str] = "soap-merit"
    REST_SHARE: ClassVar[float] = 0.4

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        shampoo_beta: float | None = None,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        refresh_phase: int | None = None,
        clip: float | None = 1.0,
        element_wise: bool = True,
        weight_bound: bool = True,
        norm: Norm = "max",
        ratio_bounds: tuple[float, float] | None = None,
        rest_lr: float | Tensor | None = None,
        rest: Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=Soap(
                betas=betas,
                eps=eps,
                shampoo_beta=shampoo_beta,
                precondition_frequency=precondition_frequency,
                max_precond_dim=max_precond_dim,
                refresh_phase=refresh_phase,
            ),
            rule=Rule(clip, element_wise, weight_bound, norm, ratio_bounds),
            rest_lr=rest_lr,
            rest=rest,
            **options,
        )


class SOAP(HiddenMatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner, for all matrices; AdamW for vectors.

        G = QL' g QR
        m <- beta1*m + (1-beta1)*G        v <- beta2*v + (1-beta2)*G*G
        w <- w - lr * (QL (m' / (sqrt(v') + eps)) QR' + weight_decay*w)

    QL and QR are eigenvectors of the averages of g g' and g' g. They are computed in the first step, which is
    slow and changes no weight, and improved every few steps.

    Args:
        params: parameter groups from ``param_groups(model)``; see ``MuonMERIT``.
        lr: learning rate.
        betas: decay of the two moments, both in the eigenbasis.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay.
        shampoo_beta: decay of the averages of g g' and g' g; None for the second of ``betas``.
        precondition_frequency: number of steps between improvements of a matrix's eigenbasis.
        max_precond_dim: a side longer than this, such as an embedding's, is not rotated.
        refresh_phase: None improves the eigenbases in turns, so that all steps but the first cost about the
            same; 0 improves all of them in one step, as the authors' code does.
        rest_lr: learning rate of the rest (vectors); None for ``lr``.
        rest: other options for the rest; None for AdamW with the same betas and eps.
        options: how the step is computed; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import SOAP, param_groups
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = SOAP(param_groups(model), lr=3e-3)

    Reference:
        Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", ICLR 2025,
        https://arxiv.org/abs/2409.11321
    """

    ALGORITHM: ClassVar[str] = "soap"
    DIRECTED_KINDS: ClassVar[tuple[Kind, ...]] = ("hidden", "experts", "embedding", "head")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        shampoo_beta: float | None = None,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        refresh_phase: int | None = None,
        rest_lr: float | Tensor | None = None,
        rest: Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=Soap(
                betas=betas,
                eps=eps,
                shampoo_beta=shampoo_beta,
                precondition_frequency=precondition_frequency,
                max_precond_dim=max_precond_dim,
                refresh_phase=refresh_phase,
            ),
            rule=UNSCALED,
            rest_lr=rest_lr,
            rest={"betas": betas, "eps": eps, **(rest or {})},
            **options,
        )
