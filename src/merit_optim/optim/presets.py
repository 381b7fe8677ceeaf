"""The optimizers of the family, each a row: its choices on three axes, its defaults, equation and reference.

The constructors' arguments are the options of the choices, with the values given here.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from merit_optim.optim.axes.directions import Adam, Direction, Sign, Soap, SoapMuon
from merit_optim.optim.axes.directions import Muon as MuonDirection
from merit_optim.optim.axes.holds import Hold, Rows, Sphere
from merit_optim.optim.axes.ratios import Merit, Ratio, Weight
from merit_optim.optim.composition import HIDDEN, Composition
from merit_optim.optim.family import Family


class MERIT(Family):
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
        weight_decay: added to u as ``weight_decay * w``, so it is scaled and clipped too.
        betas: decay of the two moments.
        eps: added to the square root of v.
        bias_correction: divide the moments by ``1 - beta**t`` as Adam does.
        clip: bound on each element of ``s*u``; None for no clip.
        norm: "max" or "l2", the norm in all ratios.
        ratio_bounds: the smallest and the largest value of s; None for no bounds.
        element_wise: use the ratios of rows and columns; False uses only the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        options: for the whole family:

            - ``direction``, ``ratio``, ``hold``: other choices, by name or as objects; see ``compose``.
            - ``kinds``: options for a kind of weight, as ``param_groups`` knows it. ``{"embedding":
              {"rate_scale": 20, "weight_decay": 0.0}}`` gives tables 20 times ``lr``; it stays so when ``lr``
              changes. A group may also set its ``rate_scale`` itself.
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

    COMPOSITION = Composition(name="merit", direction=Adam(), ratio=Merit(), lr=9e-3)


class LAMB(Family):
    """Layer-wise adaptive moments: AdamW's update scaled to the Euclidean size of each weight.

        u  = m' / (sqrt(v') + eps) + weight_decay*w
        w <- w - lr * |w| / |u| * u

    with bias-corrected moments m' and v', and ratio 1 where either norm is zero. The MERIT paper's equation
    for LAMB has no bias correction: ``create("lamb-uncorrected", ...)``. Arguments as ``MERIT``'s.

    Examples:
        >>> import torch
        >>> from merit_optim import LAMB
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = LAMB(model.parameters(), lr=1e-2, weight_decay=0.1)

    Reference:
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR
        2020, https://arxiv.org/abs/1904.00962
    """

    COMPOSITION = Composition(
        name="lamb",
        direction=Adam(betas=(0.9, 0.999), bias_correction=True),
        ratio=Weight(norm="l2"),
        lr=1e-3,
        weight_decay=0.01,
    )


class MaxLAMB(Family):
    """LAMB with the largest magnitude in place of the Euclidean norm.

        u  = m / (sqrt(v) + eps) + weight_decay*w
        w <- w - lr * max|w| / max|u| * u

    Halfway from LAMB to MERIT: without the element-wise ratios and the clip (table 3 of the MERIT
    paper). Arguments as ``MERIT``'s.

    Examples:
        >>> import torch
        >>> from merit_optim import MaxLAMB
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = MaxLAMB(model.parameters(), lr=1e-2)

    Reference:
        Luo et al., https://arxiv.org/abs/2508.20577, section 5.4
    """

    COMPOSITION = Composition(name="maxlamb", direction=Adam(), ratio=Weight(norm="max"), lr=1e-2)


class MuonMERIT(Family):
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
            that set their ``kind``, or their ``direction`` ("muon" or "adam").
        lr: learning rate of the hidden matrices, relative to their size as for ``MERIT``. The default is for
            thousands of steps; with few take more, 4e-2 for 200. The other weights take 0.4 of it:
            ``kinds={"embedding": {"rate_scale": 1.6}}`` changes that.
        weight_decay: added to u as ``weight_decay * w``; decoupled, as AdamW's, for the rest.
        momentum: decay of the average gradient. Muon's is 0.95 as a rule; with large batches 0.9 ended lower.
        nesterov: look one step ahead, as in the equation; False takes polar(M).
        ns_steps: number of Newton-Schulz passes.
        ns_coefficients: "quintic", as in torch.optim.Muon, "polar-express", "dion", (a, b, c), or one such
            triple per pass.
        ns_dtype: dtype of the matrix products: "bfloat16", "float16" or "float32".
        scale: "rms", sqrt(max(rows, columns)); "match_rms_adamw", 0.2 of it; "original",
            sqrt(max(1, outputs/inputs)); or "spectral", 1. With ratios it is only the weight of decay.
        neuron_beta: decay of v, the average square of each row of O; None for d without v, as Muon's. Rows
            are outputs, unless a group is ``transposed``; see ``MERIT``.
        ratio_bounds: the smallest and the largest value of s; None for no bounds. Without the largest, a
            weight that is pushed one way grows exponentially, and long runs diverge. Muon, as most run it,
            has 0.2 in place of s. Rows and columns of zeros are not scaled and have no bounds.
        options: see ``MERIT``. Set ``split`` in the group of weights that hold several matrices (3 for query,
            key and value in one layer); each has its own direction and ratios.

    Examples:
        >>> import torch
        >>> from merit_optim import MuonMERIT, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = MuonMERIT(param_groups(model, weight_decay=0.1), lr=2e-2, max_grad_norm=1.0)
        >>> model(torch.randn(5, 3, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> [(group["kind"], group["direction"], group["rate_scale"]) for group in optimizer.param_groups]
        [('hidden', 'muon', 1.0), ('vector', 'adam', 0.4)]

    Reference:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
        https://kellerjordan.github.io/posts/muon; Luo et al., https://arxiv.org/abs/2508.20577, for the
        ratios.
    """

    COMPOSITION = Composition(
        name="muon-merit",
        direction=MuonDirection(momentum=0.9, neuron_beta=0.95),
        ratio=Merit(ratio_bounds=(0.0, 0.1)),
        lr=1e-2,
        kinds=HIDDEN,
        adamw={"rate_scale": 0.4},
    )


class Muon(Family):
    """Momentum orthogonalised by Newton-Schulz for hidden matrices, AdamW for the rest.

        M <- momentum*M + (1-momentum)*g
        d  = scale * polar(momentum*M + (1-momentum)*g)
        w <- w - lr * (d + weight_decay*w)

    ``torch.optim.Muon`` and AdamW in one optimizer, computed by this family's engines. It can load the
    momentum of ``torch.optim.Muon``. Arguments as ``MuonMERIT``'s. With the default scale ``lr`` is of the
    order of AdamW's; with large batches four to eight times AdamW's best were best.

    Examples:
        >>> import torch
        >>> from merit_optim import Muon, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = Muon(param_groups(model), lr=1e-3)

    Reference:
        Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM
        Training", 2025, https://arxiv.org/abs/2502.16982, for the scale.
    """

    COMPOSITION = Composition(
        name="muon", direction=MuonDirection(scale="match_rms_adamw"), lr=1e-3, kinds=HIDDEN
    )


class NorMuon(Family):
    """Muon with every row of the update normalized to the same average size.

        O  = polar(momentum*M + (1-momentum)*g)
        v_i <- neuron_beta*v_i + (1-neuron_beta) * mean(O_i.**2)
        d  = scale * |O| * O' / |O'|          with O'_i. = O_i. / sqrt(v_i)
        w <- w - lr * (d + weight_decay*w)

    Rows are outputs; where a group is ``transposed``, columns take their place. Arguments as ``MuonMERIT``'s;
    the authors' code has the scale "original".

    Examples:
        >>> import torch
        >>> from merit_optim import NorMuon, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = NorMuon(param_groups(model), lr=1e-3)

    Reference:
        Li et al., "NorMuon: Making Muon more efficient and scalable", 2025, https://arxiv.org/abs/2510.05491
    """

    COMPOSITION = Composition(
        name="normuon",
        direction=MuonDirection(scale="match_rms_adamw", neuron_beta=0.95),
        lr=1e-3,
        kinds=HIDDEN,
    )


class MuonSphere(Family):
    """Muon's direction on spheres: hidden matrices keep the norm of their start, AdamW for the rest.

        d  = polar(momentum*M + (1-momentum)*g)
        w1 = w - lr * R * d/|d|
        w <- R * w1/|w1|                      with R = |w| before the first step

    Others call it MuonH, or Muon with Hyperball. ``lr`` is the angle of a step, about sqrt(lr * weight_decay)
    of the decayed Muon's; weight decay has no meaning here, and is 0 for these matrices. The start matters:
    see ``init_hidden``, and ``gain``, which names R. Arguments as ``MuonMERIT``'s.

    Examples:
        >>> import torch
        >>> from merit_optim import MuonSphere, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = MuonSphere(param_groups(model), lr=1e-2)
    """

    COMPOSITION = Composition(
        name="muon-sphere",
        direction=MuonDirection(momentum=0.9),
        hold=Sphere(),
        lr=1e-2,
        kinds=HIDDEN,
    )


class NorMuonSphere(Family):
    """``MuonSphere`` with the rows of the update normalized to the same average size, as in ``NorMuon``.

    Examples:
        >>> import torch
        >>> from merit_optim import NorMuonSphere, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = NorMuonSphere(param_groups(model), lr=1e-2)
    """

    COMPOSITION = Composition(
        name="normuon-sphere",
        direction=MuonDirection(momentum=0.9, neuron_beta=0.95),
        hold=Sphere(),
        lr=1e-2,
        kinds=HIDDEN,
    )


class OrScale(Family):
    """Muon with one ratio of Euclidean norms for each weight, relative to its first one.

        u  = scale * polar(momentum*M + (1-momentum)*g) + weight_decay*w
        r  = |w| / |u|
        w <- w - lr * clamp(r / r_first, 0.1, 5) * u

    The form for language models, OrScale-LM, as its paper's abstract describes it; no public implementation
    was found to compare with. r_first is the first ratio of nonzero sizes; until then a weight is not scaled.
    ``calibrated=False`` leaves out the division by it. Weights of which the first gradient is zero need that,
    unless their weight decay is 0: their first ratio would be that of the weight decay alone. Other arguments
    as ``MuonMERIT``'s.

    Examples:
        >>> import torch
        >>> from merit_optim import OrScale, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = OrScale(param_groups(model), lr=1e-3)

    Reference:
        Lou and You, "OrScale: Orthogonalised Optimization with Layer-Wise Trust-Ratio Scaling", 2026,
        https://arxiv.org/abs/2605.07815
    """

    COMPOSITION = Composition(
        name="orscale",
        direction=MuonDirection(scale="match_rms_adamw"),
        ratio=Weight(norm="l2", ratio_bounds=(0.1, 5.0), calibrated=True),
        lr=1e-3,
        kinds=HIDDEN,
    )


class SOAPMERIT(Family):
    """MERIT's ratios on SOAP's direction for hidden matrices, AdamW for the rest.

        d  = Adam's direction, formed in the eigenbasis of the averages of g g' and g' g
        u  = d + weight_decay*w
        s_ij = max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|)
        w <- w - lr * clamp(s*u, -clip, clip)

    Args:
        params: parameter groups from ``param_groups(model)``; see ``MuonMERIT``.
        lr: learning rate of the hidden matrices, relative to their size; see ``MuonMERIT``.
        weight_decay: added to u as ``weight_decay * w``; decoupled, as AdamW's, for the rest.
        betas: decay of the two moments, both in the eigenbasis.
        eps: added to the square root of the second moment.
        shampoo_beta: decay of the averages of g g' and g' g; None for the second of ``betas``.
        precondition_frequency: number of steps between improvements of a matrix's eigenbasis.
        max_precond_dim: a side longer than this is not rotated.
        refresh_phase: None improves the eigenbases in turns, so that all steps but the first cost about the
            same; 0, or another step of the cycle, improves all of them in that step.
        options: see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import SOAPMERIT, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = SOAPMERIT(param_groups(model), lr=2e-2)

    Reference:
        Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", ICLR 2025,
        https://arxiv.org/abs/2409.11321; Luo et al., https://arxiv.org/abs/2508.20577 for the ratios.
    """

    COMPOSITION = Composition(
        name="soap-merit",
        direction=Soap(),
        ratio=Merit(),
        lr=1e-2,
        kinds=HIDDEN,
        adamw={"rate_scale": 0.4},
    )


class SOAP(Family):
    """Adam in the eigenbasis of Shampoo's preconditioner, for all matrices; AdamW for vectors.

        G = QL' g QR
        m <- beta1*m + (1-beta1)*G        v <- beta2*v + (1-beta2)*G*G
        w <- w - lr * (QL (m' / (sqrt(v') + eps)) QR' + weight_decay*w)

    QL and QR are eigenvectors of the averages of g g' and g' g. They are computed in the first step, which is
    slow and changes no weight, and improved every few steps. Arguments as ``SOAPMERIT``'s; vectors take the
    same betas and eps.

    Examples:
        >>> import torch
        >>> from merit_optim import SOAP, param_groups
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = SOAP(param_groups(model), lr=3e-3)

    Reference:
        Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", ICLR 2025,
        https://arxiv.org/abs/2409.11321
    """

    COMPOSITION = Composition(
        name="soap",
        direction=Soap(),
        lr=3e-3,
        weight_decay=0.01,
        kinds=(*HIDDEN, "embedding", "head"),
        shared=("betas", "eps"),
    )


class SOAPMuon(Family):
    """SOAP's direction, orthogonalised, for hidden matrices; AdamW for the rest.

        d  = scale * polar(SOAP's direction)
        w <- w - lr * (d + weight_decay*w)

    Arguments as ``SOAPMERIT``'s and ``Muon``'s.

    Examples:
        >>> import torch
        >>> from merit_optim import SOAPMuon, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = SOAPMuon(param_groups(model), lr=1e-3)
    """

    COMPOSITION = Composition(
        name="soap-muon", direction=SoapMuon(scale="match_rms_adamw"), lr=1e-3, kinds=HIDDEN
    )


class Muown(Family):
    """Muon with every row as a magnitude times a direction, which learn apart; AdamW for the rest.

        w_i = magnitude_i * v_i / |v_i|        v by Muon's direction, magnitudes by Adam

    See ``merit_optim.optim.axes.holds.rows`` for the equations. Arguments as ``MuonMERIT``'s;
    ``angular=True`` keeps v on the unit sphere.

    Examples:
        >>> import torch
        >>> from merit_optim import Muown, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = Muown(param_groups(model), lr=1e-3)

    Reference:
        "Muown: Row-Norm Control for Muon Optimization", 2026, https://arxiv.org/abs/2605.10797
    """

    COMPOSITION = Composition(
        name="muown",
        direction=MuonDirection(scale="match_rms_adamw", nesterov=False),
        hold=Rows(),
        lr=1e-3,
        kinds=HIDDEN,
    )


class Lion(Family):
    """Evolved sign momentum, one state tensor for each parameter.

        w <- w - lr * (sign(beta1*m + (1-beta1)*g) + weight_decay*w)
        m <- beta2*m + (1-beta2)*g

    ``lr`` is 3 to 10 times smaller than AdamW's. Arguments as ``MERIT``'s.

    Examples:
        >>> import torch
        >>> from merit_optim import Lion
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=0.1)

    Reference:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023,
        https://arxiv.org/abs/2302.06675
    """

    COMPOSITION = Composition(name="lion", direction=Sign(), lr=1e-4, weight_decay=0.0)


class Composed(Family):
    """An optimizer that ``compose`` made."""

    COMPOSITION = Composition(name="composed", direction=Adam(), lr=1e-3)


def compose(
    params: ParamsT,
    *,
    direction: str | Direction = "adam",
    ratio: str | Ratio = "none",
    hold: str | Hold = "decay",
    lr: Any,
    weight_decay: float = 0.1,
    **options: Any,
) -> Family:
    """An optimizer of any direction, ratio and hold.

    Directions that need matrices are for hidden matrices alone, and other weights take AdamW, as in
    ``MuonMERIT``; others are for all weights. What cannot be is refused, with the reason.

    Args:
        params: parameters, or groups from ``param_groups(model)``.
        direction: "adam", "muon", "soap", "sgd", ..., one of your own by its name (see ``register``), or an
            object with its options.
        ratio: "none", "merit", "weight", "row", "column", "floor", ...
        hold: "decay", "decoupled", "cautious", "corrected", "sphere", "ball", ...
        lr: learning rate.
        weight_decay: weight decay.
        options: options of the choices, and those of the whole family; see ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import compose, param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = compose(param_groups(model), direction="muon", ratio="row", hold="cautious", lr=0.02)
    """
    return Composed(
        params, lr=lr, weight_decay=weight_decay, direction=direction, ratio=ratio, hold=hold, **options
    )
