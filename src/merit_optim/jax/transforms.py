"""MERIT and MaxLAMB as optax gradient transformations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array
from jax.typing import DTypeLike

from merit_optim.jax import algorithm, validate
from merit_optim.jax.algorithm import NORMS, Norm, Rule, Scalar
from merit_optim.jax.trees import Mask, MatrixDims, check_parameters, in_float32, spread, widened

ScalarOrSchedule = Scalar | Callable[[Array], Scalar]


def merit(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.95,
    eps: Scalar = 1e-6,
    weight_decay: ScalarOrSchedule = 0.1,
    mask: Mask = None,
    *,
    clip: Scalar | None = 1.0,
    element_wise: bool = True,
    weight_bound: bool = True,
    norm: Norm = "max",
    bias_correction: bool = False,
    matrix_dims: MatrixDims = None,
    state_dtype: DTypeLike = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Large-batch optimizer that keeps attention logits under control.

        m <- b1*m + (1-b1)*g              v <- b2*v + (1-b2)*g*g
        u  = m / (sqrt(v) + eps) + weight_decay*w
        s_ij = max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|)
        w <- w - learning_rate * clamp(s*u, -clip, clip)

    A row or column in which w or u is all zero is not scaled (s = 1); vectors and scalars have only the
    last of the three ratios. Arithmetic is in float32 for any dtype of the parameters; the updates have the
    dtype of the gradients, as in optax. With the max norm, parameters sharded over a mesh get the same bits
    as on one device.

    LAMB is ``optax.lamb``, or ``merit(..., norm="l2", element_wise=False, clip=None)`` for the MERIT
    paper's form of it, without bias correction.

    Args:
        learning_rate: a number, or a schedule from the step count to one. Not AdamW's: the ratios make
            it relative to the size of the weights.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the square root of v.
        weight_decay: added to u as ``weight_decay * w``, so it is scaled and clipped with it; a number or
            a schedule.
        mask: which parameters decay: a tree of bools, a prefix of the parameters' tree, or a function
            from the parameters to one. None: all.
        clip: bound on each element of ``s*u``; None for none.
        element_wise: use the rows' and columns' ratios; False leaves the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        norm: "max" or "l2", the norm in all ratios.
        bias_correction: divide the moments by ``1 - beta**t`` as Adam does.
        matrix_dims: how many trailing dimensions make one matrix; the ones before them stack matrices,
            each with its own ratios (2 for scanned layers or experts stacked as (experts, rows,
            columns)). None: all, seen as (first dimension) x (all the rest). A ``MatrixAxes`` names
            any axes. Like ``mask``, also a tree of these, or a function to one.
        state_dtype: dtype of both moments; those of float64 parameters are float64.

    Under ``optax.inject_hyperparams``, name in ``static_args`` those of ``mask``, ``matrix_dims`` and
    ``state_dtype`` that are given as functions, dtypes such as ``jnp.bfloat16``, or numbers.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from merit_optim.jax import merit
        >>> params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
        >>> schedule = optax.warmup_cosine_decay_schedule(0.0, 9e-3, 10, 100)
        >>> decays = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), merit(schedule, mask=decays))
        >>> state = optimizer.init(params)
        >>> grads = jax.tree.map(jnp.ones_like, params)
        >>> updates, state = jax.jit(optimizer.update)(grads, state, params)
        >>> params = optax.apply_updates(params, updates)

    Reference:
        Luo et al., "MERIT: Maximum-normalized Element-wise Ratio for Language Model Large-batch
        Training", ICML 2025, https://arxiv.org/abs/2508.20577
    """
    validate.rate("learning_rate", learning_rate)
    validate.rate("weight_decay", weight_decay)
    return in_float32(
        optax.chain(
            _scale_by_moments(b1, b2, eps, bias_correction=bias_correction, state_dtype=state_dtype),
            optax.add_decayed_weights(weight_decay, mask),
            scale_by_merit(
                clip=clip,
                element_wise=element_wise,
                weight_bound=weight_bound,
                norm=norm,
                matrix_dims=matrix_dims,
            ),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def max_lamb(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.95,
    eps: Scalar = 1e-6,
    weight_decay: ScalarOrSchedule = 0.1,
    mask: Mask = None,
    *,
    clip: Scalar | None = None,
    bias_correction: bool = False,
    matrix_dims: MatrixDims = None,
    state_dtype: DTypeLike = "float32",
) -> optax.GradientTransformationExtraArgs:
    """LAMB with the largest magnitude in place of the Euclidean norm.

        u  = m / (sqrt(v) + eps) + weight_decay*w
        w <- w - learning_rate * max|w| / max|u| * u

    Halfway from LAMB to MERIT, without the element-wise ratios and the clip.

    Args:
        learning_rate: a number or a schedule, relative to the size of the weights.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the square root of v.
        weight_decay: added to u as ``weight_decay * w``; a number or a schedule.
        mask: which parameters decay; see ``merit``.
        clip: bound on each element of the scaled update; None for none.
        bias_correction: divide the moments by ``1 - beta**t``.
        matrix_dims: which axes make one weight and which stack weights; see ``merit``.
        state_dtype: dtype of both moments.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from merit_optim.jax import max_lamb
        >>> params = jnp.array([[3.0, 4.0]])
        >>> optimizer = max_lamb(learning_rate=1e-2, weight_decay=0.0)
        >>> grads = jnp.array([[1.0, -1.0]])
        >>> updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
        >>> print(updates.round(4))  # the learning rate times the largest weight
        [[-0.04  0.04]]

    Reference:
        Luo et al., https://arxiv.org/abs/2508.20577, section 5.4
    """
    return merit(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay,
        mask,
        clip=clip,
        element_wise=False,
        bias_correction=bias_correction,
        matrix_dims=matrix_dims,
        state_dtype=state_dtype,
    )


def scale_by_merit(
    *,
    clip: Scalar | None = 1.0,
    element_wise: bool = True,
    weight_bound: bool = True,
    norm: Norm = "max",
    ratio_bounds: tuple[Scalar, Scalar] | None = None,
    matrix_dims: MatrixDims = None,
) -> optax.GradientTransformationExtraArgs:
    """MERIT's ratios and clip for any updates, like ``optax.scale_by_trust_ratio`` for LAMB.

        s_ij = max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|)
        u <- clamp(s*u, -clip, clip)

    It has no state. In a chain it comes after the moments and weight decay, and before the learning rate.

    Args:
        clip: bound on each element of ``s*u``; None for none.
        element_wise: use the rows' and columns' ratios; False leaves the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        norm: "max" or "l2", the norm in all ratios.
        ratio_bounds: the smallest and the largest value of s; None for no bounds.
        matrix_dims: which axes make one matrix; see ``merit``.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from merit_optim.jax import scale_by_merit
        >>> optimizer = optax.chain(
        ...     optax.scale_by_lion(),
        ...     optax.add_decayed_weights(0.1),
        ...     scale_by_merit(),
        ...     optax.scale_by_learning_rate(1e-3),
        ... )
        >>> params = jnp.eye(2)
        >>> updates, _ = jax.jit(optimizer.update)(jnp.ones((2, 2)), optimizer.init(params), params)

    Reference:
        Luo et al., https://arxiv.org/abs/2508.20577
    """
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; it must be one of {', '.join(map(repr, NORMS))}")
    if clip is not None:
        validate.number("clip", clip, "a number greater than 0, or None for no clip", lambda value: value > 0)
    if isinstance(matrix_dims, Real | Array):
        algorithm.matrix_axes(2, matrix_dims)  # refuse a wrong number now, not in the first update
    validate.bounds("ratio_bounds", ratio_bounds)
    rule = Rule(clip, element_wise, weight_bound, norm, ratio_bounds)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        axes = spread(matrix_dims, params)
        return jax.tree.map(lambda u, w, a: algorithm.scaled(w, u, a, rule), updates, params, axes), state

    return in_float32(optax.GradientTransformation(optax.init_empty_state, update))


def _scale_by_moments(
    b1: Scalar, b2: Scalar, eps: Scalar, *, bias_correction: bool, state_dtype: DTypeLike
) -> optax.GradientTransformation:
    """Adam's direction; unlike ``optax.scale_by_adam``, with both moments in one dtype, and uncorrected."""
    validate.decay("b1", b1)
    validate.decay("b2", b2)
    validate.positive("eps", eps)
    validate.state_dtype(state_dtype)

    def init(params: Any) -> optax.ScaleByAdamState:
        check_parameters(params)
        # Two trees, not one twice: a jitted step could not donate the same buffer twice.
        mu, nu = (
            jax.tree.map(lambda w: jnp.zeros_like(w, _stored_dtype(w, state_dtype)), params) for _ in range(2)
        )
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=mu, nu=nu)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)

        def averaged(old: Array, new: Array, beta: Scalar) -> Array:
            average = algorithm.moving_average(algorithm.widened(old), new, beta)
            return average.astype(_stored_dtype(old, state_dtype))

        mu = jax.tree.map(lambda m, g: averaged(m, g, b1), state.mu, updates)
        nu = jax.tree.map(lambda v, g: averaged(v, g * g, b2), state.nu, updates)
        direction = partial(
            algorithm.adam_direction, count=count, b1=b1, b2=b2, eps=eps, corrected=bias_correction
        )
        # From the state as it is stored, as in torch.
        direction_of_stored = jax.tree.map(direction, widened(mu), widened(nu))
        return direction_of_stored, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _stored_dtype(x: Array, state_dtype: DTypeLike) -> DTypeLike:
    """Return the dtype of the moments of a parameter, or of existing moments."""
    return jnp.float64 if jnp.result_type(x) == jnp.float64 else state_dtype
