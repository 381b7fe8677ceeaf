"""Optimizers with Muon's direction: MuonMERIT, with MERIT's ratios, and Muon, NorMuon and OrScale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim.algorithm import UNSCALED, Norm, Rule
from merit_optim.optim.directions import Muon as MuonDirection
from merit_optim.optim.directions.muon import ProductDtype, Scale
from merit_optim.optim.directions.newton_schulz import NSCoefficients
from merit_optim.optim.hidden import HiddenMatrixOptimizer
from merit_optim.optim.options import EngineOptions


class MuonMERIT(HiddenMatrixOptimizer):
    """MERIT's ratios on Muon's direction for hidden matrices, AdamW for the rest.

        M <- momentum*M + (1-momentum)*g
        O  = polar(momentum*M + (1-momentum)*g)
        v_i <- neuron_beta*v_i + (1-neuron_beta) * mean(O_i.**2)
        d  = sqrt(max(rows, columns)) * |O| * O' / |O'|       with O'_i. = O_i. / sqrt(v_i)
        u  = d + weight_decay*w
        s_ij = min(max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|),  0.1)
        w <- w - lr * clamp(s*u, -clip, clip)

    polar is U V' of a matrix's singular value decomposition U S V', approximated by Newton-Schulz. v gives
    all rows the same average size, as in ``NorMuon``. The state of a hidden matrix is one momentum, half the
    size of Adam's, and one number for each row.

    Args:
        params: parameter groups from ``param_groups(model)``, which knows the kind of each weight; or groups
            that set ``direction="muon"`` or ``direction="adam"``.
        lr: learning rate of the hidden matrices, relative to their size as for ``MERIT``. The default is for
            thousands of steps; with few take more, 4e-2 for 200.
        weight_decay: added to u as ``weight_decay * w``; decoupled, as AdamW's, for the rest.
        momentum: decay of the average gradient. Muon's is 0.95 as a rule; with large batches 0.9 ended lower.
        nesterov: look one step ahead, as in the equation; False takes polar(M).
        ns_steps: number of Newton-Schulz passes.
        ns_coefficients: "quintic", as in torch.optim.Muon, "polar-express", "dion", (a, b, c), or one such
            triple per pass.
        ns_dtype: dtype of the matrix products: "bfloat16", "float16" or "float32".
        neuron_beta: decay of v, the average square of each row of O; None for d without v, as Muon's. Rows
            are outputs, unless a group is ``transposed``; see ``MERIT``.
        clip: bound on each element of ``s*u``; None for no clip.
        element_wise: use the ratios of rows and columns; False uses only the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        norm: "max" or "l2", the norm in all ratios; "none" for s = 1, without bounds.
        ratio_bounds: the smallest and the largest value of s; None for no bounds. Without the largest, a
            weight that is pushed one way grows exponentially, and long runs diverge. Muon, as most run it,
            has 0.2 in place of s. Rows and columns of zeros are not scaled and have no bounds.
        rest_lr: learning rate of the rest (embeddings, head and vectors); None for 0.4 of ``lr``.
        rest: other options for the rest, such as ``{"betas": (0.9, 0.99)}``, or ``{"norm": "max",
            "element_wise": True, "weight_bound": True, "clip": 1.0}`` for MERIT.
        options: how the step is computed; see ``MERIT``. Set ``split`` in the group of weights that hold
            several matrices (3 for query, key and value in one layer); each has its own direction and ratios.

    Examples:
        >>> import torch
        >>> from merit_optim import MuonMERIT, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = MuonMERIT(param_groups(model, weight_decay=0.1), lr=2e-2, max_grad_norm=1.0)
        >>> model(torch.randn(5, 3, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> [(group["direction"], group["lr"]) for group in optimizer.param_groups]
        [('muon', 0.02), ('adam', 0.008)]

    Reference:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
        https://kellerjordan.github.io/posts/muon; Luo et al., https://arxiv.org/abs/2508.20577, for the
        ratios.
    """

    ALGORITHM: ClassVar[str] = "muon-merit"
    REST_SHARE: ClassVar[float] = 0.4

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.9,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: NSCoefficients = "quintic",
        ns_dtype: ProductDtype = "bfloat16",
        neuron_beta: float | None = 0.95,
        clip: float | None = 1.0,
        element_wise: bool = True,
        weight_bound: bool = True,
        norm: Norm = "max",
        ratio_bounds: tuple[float, float] | None = (0.0, 0.1),
        rest_lr: float | Tensor | None = None,
        rest: Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=MuonDirection(
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                ns_coefficients=ns_coefficients,
                ns_dtype=ns_dtype,
                neuron_beta=neuron_beta,
            ),
            rule=Rule(clip, element_wise, weight_bound, norm, ratio_bounds),
            rest_lr=rest_lr,
            rest=rest,
            **options,
        )


class Muon(HiddenMatrixOptimizer):
    """Momentum orthogonalised by Newton-Schulz for hidden matrices, AdamW for the rest.

        M <- momentum*M + (1-momentum)*g
        d  = scale * polar(momentum*M + (1-momentum)*g)
        w <- w - lr * (d + weight_decay*w)

    ``torch.optim.Muon`` and AdamW in one optimizer, computed by this family's engines. It can load the
    momentum of ``torch.optim.Muon``.

    Args:
        params: parameter groups from ``param_groups(model)``; see ``MuonMERIT``.
        lr: learning rate of the hidden matrices. With the default scale it is of the order of AdamW's; with
            large batches four to eight times AdamW's best were best.
        weight_decay: decoupled weight decay.
        momentum: decay of the average gradient.
        nesterov: look one step ahead; False takes polar(M).
        ns_steps: number of Newton-Schulz passes.
        ns_coefficients: see ``MuonMERIT``.
        ns_dtype: see ``MuonMERIT``.
        scale: "match_rms_adamw", 0.2*sqrt(max(rows, columns)); "original", sqrt(max(1, outputs/inputs));
            "rms", sqrt(max(rows, columns)); or "spectral", 1. Outputs are rows, unless a
            group is ``transposed``; see ``MERIT``.
        rest_lr: learning rate of the rest (embeddings, head and vectors); None for ``lr``.
        rest: other options for the rest.
        options: how the step is computed; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import Muon, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = Muon(param_groups(model), lr=1e-3)

    Reference:
        Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM
        Training", 2025, https://arxiv.org/abs/2502.16982, for the scale.
    """

    ALGORITHM: ClassVar[str] = "muon"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: NSCoefficients = "quintic",
        ns_dtype: ProductDtype = "bfloat16",
        scale: Scale = "match_rms_adamw",
        rest_lr: float | Tensor | None = None,
        rest: Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=MuonDirection(
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                ns_coefficients=ns_coefficients,
                ns_dtype=ns_dtype,
                scale=scale,
            ),
            rule=UNSCALED,
            rest_lr=rest_lr,
            rest=rest,
            **options,
        )


class NorMuon(HiddenMatrixOptimizer):
    """Muon with every row of the update normalized to the same average size.

        O  = polar(momentum*M + (1-momentum)*g)
        v_i <- neuron_beta*v_i + (1-neuron_beta) * mean(O_i.**2)
        d  = scale * |O| * O' / |O'|          with O'_i. = O_i. / sqrt(v_i)
        w <- w - lr * (d + weight_decay*w)

    Rows are outputs; where a group is ``transposed`` (see ``MERIT``), columns take their place.

    Args:
        params: parameter groups from ``param_groups(model)``; see ``MuonMERIT``.
        lr: learning rate of the hidden matrices.
        weight_decay: decoupled weight decay.
        momentum: decay of the average gradient.
        neuron_beta: decay of the average square of each row.
        nesterov: look one step ahead; False takes polar(M).
        ns_steps: number of Newton-Schulz passes.
        ns_coefficients: see ``MuonMERIT``.
        ns_dtype: see ``MuonMERIT``.
        scale: see ``Muon``; the authors' code uses "original".
        rest_lr: learning rate of the rest (embeddings, head and vectors); None for ``lr``.
        rest: other options for the rest.
        options: how the step is computed; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import NorMuon, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = NorMuon(param_groups(model), lr=1e-3)

    Reference:
        Li et al., "NorMuon: Making Muon more efficient and scalable", 2025, https://arxiv.org/abs/2510.05491
    """

    ALGORITHM: ClassVar[str] = "normuon"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        neuron_beta: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: NSCoefficients = "quintic",
        ns_dtype: ProductDtype = "bfloat16",
        scale: Scale = "match_rms_adamw",
        rest_lr: float | Tensor | None = None,
        rest: Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=MuonDirection(
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                ns_coefficients=ns_coefficients,
                ns_dtype=ns_dtype,
                scale=scale,
                neuron_beta=neuron_beta,
            ),
            rule=UNSCALED,
            rest_lr=rest_lr,
            rest=rest,
            **options,
        )


class OrScale(HiddenMatrixOptimizer):
    """Muon with one ratio of Euclidean norms for each weight, relative to its first one.

        u  = scale * polar(momentum*M + (1-momentum)*g) + weight_decay*w
        r  = |w| / |u|
        w <- w - lr * clamp(r / r_first, 0.1, 5) * u

    The form for language models, OrScale-LM, as its paper's abstract describes it; no public implementation
    was found to compare with. r_first is the first ratio of nonzero sizes; until then a weight is not scaled.
    ``calibrated=False`` leaves out the division by it. Weights of which the first gradient is zero need that,
    unless their weight decay is 0: their first ratio would be that of the weight decay alone.

    Args:
        params: parameter groups from ``param_groups(model)``; see ``MuonMERIT``.
        lr: learning rate of the hidden matrices, as for ``Muon``.
        weight_decay: added to u as ``weight_decay * w``; decoupled for the rest.
        momentum: decay of the average gradient.
        ns_dtype: see ``MuonMERIT``.
        scale: see ``Muon``.
        ratio_bounds: the smallest and the largest ratio.
        calibrated: divide the ratio by the first one.
        rest_lr: learning rate of the rest (embeddings, head and vectors); None for ``lr``.
        rest: other options for the rest.
        options: how the step is computed; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import OrScale, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = OrScale(param_groups(model), lr=1e-3)

    Reference:
        Lou and You, "OrScale: Orthogonalised Optimization with Layer-Wise Trust-Ratio Scaling", 2026,
        https://arxiv.org/abs/2605.07815
    """

    ALGORITHM: ClassVar[str] = "orscale"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        ns_dtype: ProductDtype = "bfloat16",
        scale: Scale = "match_rms_adamw",
        ratio_bounds: tuple[float, float] | None = (0.1, 5.0),
        calibrated: bool = True,
        rest_lr: float | Tensor | None = None,
        rest: Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            direction=MuonDirection(momentum=momentum, ns_dtype=ns_dtype, scale=scale),
            rule=Rule(
                clip=None,
                element_wise=False,
                norm="l2",
                ratio_bounds=ratio_bounds,
                calibrated=calibrated,
            ),
            rest_lr=rest_lr,
            rest=rest,
            **options,
        )
