"""MERIT's ratios on Muon's direction, as a chain of optax's transformations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax import Array

from merit_optim.jax import validate
from merit_optim.jax.algorithm import MatrixAxes, Norm, Scalar, moving_average
from merit_optim.jax.transforms import ScalarOrSchedule, scale_by_merit
from merit_optim.jax.trees import Mask, MatrixDims, check_parameters, in_float32, resolved, spread, widened

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]


def _undivided(steps: tuple[Triple, ...], divisor: float) -> tuple[Triple, ...]:
    """Convert steps that start from N / (divisor*|N|) to steps from N / |N|, where optax starts."""
    (a, b, c), *others = steps
    return (a / divisor, b / divisor**3, c / divisor**5), *others


# (a, b, c) of each step; the last is repeated.
_NS_COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Jordan et al., https://kellerjordan.github.io/posts/muon
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # Amsel et al., https://arxiv.org/abs/2505.16932: for five steps, with a safety factor of 1.02; the digits
    # of polar_express.py in https://github.com/microsoft/dion.
    "polar-express": _undivided(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        divisor=1.02,
    ),
    # newton_schulz_triton.py in https://github.com/microsoft/dion, and optax.
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}

# optax divides by |N| + eps, so that zero stays zero. In float32 this equals |N| from 2e-7 on. It cannot be
# much smaller: the squares of elements below 1e-19 underflow, and |N| with them, but not the elements.
_EPS = 1e-14

# Keeps columns of zeros at zero, as in torch.
_NEURON_EPS = 1e-10

_REST_SHARE = 0.4


def muon_merit(
    learning_rate: ScalarOrSchedule,
    weight_decay: ScalarOrSchedule = 0.1,
    mask: Mask = None,
    *,
    hidden: Mask = None,
    momentum: Scalar = 0.9,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = "quintic",
    neuron_beta: Scalar | None = 0.95,
    clip: Scalar | None = 1.0,
    element_wise: bool = True,
    weight_bound: bool = True,
    norm: Norm = "max",
    ratio_bounds: tuple[Scalar, Scalar] | None = (0.0, 0.1),
    matrix_dims: MatrixDims = None,
    rest_learning_rate: ScalarOrSchedule | None = None,
    rest_b1: Scalar = 0.9,
    rest_b2: Scalar = 0.95,
    rest_eps: Scalar = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """MERIT's ratios on Muon's direction for hidden matrices, AdamW for all other parameters.

    For a hidden matrix:

        M <- momentum*M + (1-momentum)*g        N = momentum*M + (1-momentum)*g  (Nesterov; else M)
        X  = N / |N|                            ns_steps times  X <- a*X + (b*XX' + c*XX'XX') X
        v_j <- neuron_beta*v_j + (1-neuron_beta) * mean(X_.j**2)
        X <- |X| * X' / |X'|                    with X'_.j = X_.j / sqrt(v_j)
        u  = sqrt(max(rows, columns)) * X + weight_decay*w
        s_ij = min(max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|),  0.1)
        w <- w - learning_rate * clamp(s*u, -clip, clip)

    X comes close to an orthogonal matrix, the elements of the first term of u to a root mean square of 1.
    A row or column in which w or u is all zero is not scaled (s = 1).

    Arithmetic and state are in float32 for any dtype of the parameters; the updates have the dtype of the
    gradients. The products in X have the precision of ``jax.default_matmul_precision``. The state of a hidden
    matrix is one buffer, M, and a number for each column.

    Args:
        learning_rate: a number, or a schedule from the step count to one. Relative to the size of the
            weights, like MERIT's.
        weight_decay: added to u as ``weight_decay * w``; for the other parameters AdamW's. A number or a
            schedule.
        mask: which parameters decay: a tree of bools, a prefix of the parameters' tree, or a function
            from the parameters to one. None: all.
        hidden: which parameters are hidden matrices, in the same forms as ``mask``; required. Embeddings and
            the output head are not: their rows or columns belong to tokens.
        momentum: decay of M. Muon's is 0.95 as a rule; with large batches 0.9 ended lower.
        nesterov: look ahead by one more step of momentum.
        ns_steps: number of steps to the orthogonal matrix.
        ns_coefficients: "quintic" (Muon's), "polar-express", "dion", three numbers (a, b, c), or such a
            triple for each step, of which the last is repeated.
        neuron_beta: decay of v, the average square of each column of X, by which columns are given equal
            sizes, as in NorMuon; None leaves them as they are. Columns are the outputs of Flax's kernels.
            Where rows are, as in Equinox, give ``matrix_dims`` as a ``MatrixAxes`` with the two exchanged;
            nothing else depends on which is which.
        clip: bound on each element of ``s*u``; None for none.
        element_wise: use the rows' and columns' ratios; False leaves the whole weight's.
        weight_bound: let the whole weight's ratio bound the element-wise ones from below.
        norm: "max" or "l2", the norm in all ratios.
        ratio_bounds: the smallest and the largest value of s; None for no bounds. Without the largest, a
            weight that is pushed one way grows exponentially, and long runs diverge. Muon, as most run it,
            has 0.2 in place of s. Rows and columns of zeros are not scaled and have no bounds.
        matrix_dims: how many trailing dimensions make one matrix; the ones before them stack matrices, each
            orthogonalized and scaled by itself (2 for scanned layers or experts). None: all, seen as
            (first dimension) x (all the rest). Also a ``MatrixAxes``, a tree, or a function; see ``merit``.
        rest_learning_rate: AdamW's, a number or a schedule. None: 0.4 of ``learning_rate``.
        rest_b1: decay of AdamW's first moment.
        rest_b2: decay of AdamW's second moment.
        rest_eps: added to the square root of AdamW's second moment.

    Under ``optax.inject_hyperparams``, name ``ns_steps`` in ``static_args``, and those of ``hidden``,
    ``mask`` and ``matrix_dims`` that are given as functions or numbers.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from merit_optim.jax import muon_merit
        >>> params = {"embedding": jnp.ones((5, 3)), "kernel": jnp.eye(3), "bias": jnp.ones(3)}
        >>> schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-2, 20, 200)
        >>> hidden = {"embedding": False, "kernel": True, "bias": False}
        >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon_merit(schedule, hidden=hidden))
        >>> state = optimizer.init(params)
        >>> grads = jax.tree.map(jnp.ones_like, params)
        >>> updates, state = jax.jit(optimizer.update)(grads, state, params)
        >>> params = optax.apply_updates(params, updates)

    Reference:
        Luo et al., "MERIT: Maximum-normalized Element-wise Ratio for Language Model Large-batch
        Training", ICML 2025, https://arxiv.org/abs/2508.20577, for the ratios; Jordan et al., "Muon: An
        optimizer for hidden layers in neural networks", 2024, https://kellerjordan.github.io/posts/muon,
        for the direction
    """
    validate.rate("learning_rate", learning_rate)
    validate.rate("weight_decay", weight_decay)
    if rest_learning_rate is None:
        rest_learning_rate = _share(learning_rate)
    validate.rate("rest_learning_rate", rest_learning_rate)
    for name, decay in (("momentum", momentum), ("rest_b1", rest_b1), ("rest_b2", rest_b2)):
        validate.decay(name, decay)
    validate.positive("rest_eps", rest_eps)
    if neuron_beta is not None:
        validate.decay("neuron_beta", neuron_beta, ", or None")
    if hidden is None:
        raise ValueError(
            "hidden is None; it must say which parameters are hidden matrices: a tree of bools, such as "
            "{'embedding': False, 'layers': True, 'head': False}, or a function from the parameters to one. "
            "The arrays alone do not show it"
        )

    def by_kind(*, hidden_matrices: Any, rest: Any) -> optax.GradientTransformationExtraArgs:
        return optax.partition(
            {"hidden": hidden_matrices, "rest": rest}, lambda params: _kinds(hidden, matrix_dims, params)
        )

    inner = in_float32(
        optax.chain(
            by_kind(
                hidden_matrices=optax.chain(
                    optax.scale(1 - momentum),
                    optax.trace(momentum, nesterov=nesterov),
                    _orthogonalized(_coefficients(ns_coefficients, ns_steps), matrix_dims),
                    optax.identity() if neuron_beta is None else _equalized(neuron_beta, matrix_dims),
                    _sized(matrix_dims),
                ),
                rest=optax.scale_by_adam(rest_b1, rest_b2, rest_eps),
            ),
            optax.add_decayed_weights(weight_decay, mask),
            by_kind(
                hidden_matrices=optax.chain(
                    scale_by_merit(
                        clip=clip,
                        element_wise=element_wise,
                        weight_bound=weight_bound,
                        norm=norm,
                        ratio_bounds=ratio_bounds,
                        matrix_dims=matrix_dims,
                    ),
                    optax.scale_by_learning_rate(learning_rate),
                ),
                rest=optax.scale_by_learning_rate(rest_learning_rate),
            ),
        )
    )

    def init(params: Any) -> Any:
        check_parameters(params)
        return inner.init(widened(params))  # optax gives the state the dtypes of the parameters

    return optax.GradientTransformationExtraArgs(init, inner.update)


def _orthogonalized(
    coefficients: tuple[Triple, ...], matrix_dims: MatrixDims
) -> optax.GradientTransformation:
    """X, of each matrix by itself."""

    def dimensions(updates: Any) -> Any:
        return jax.tree.map(
            lambda axes: optax.contrib.MuonDimensionNumbers(axes.rows, axes.columns),
            spread(matrix_dims, updates),
        )

    muon = optax.contrib.scale_by_muon(
        coefficients,
        len(coefficients),
        beta=0.0,
        eps=_EPS,
        nesterov=False,
        weight_dimension_numbers=dimensions,
    )

    def update(updates: Any, params: Any) -> Any:
        del params
        # With beta 0 optax's average is the update itself; its state would be a second buffer per weight.
        orthogonal, _ = muon.update(updates, muon.init(updates))
        return orthogonal

    return optax.stateless(update)


class NeuronState(NamedTuple):
    """The average square of each column."""

    neurons: Any


def _equalized(beta: Scalar, matrix_dims: MatrixDims) -> optax.GradientTransformation:
    """Give the columns of each matrix equal average sizes, and the whole the size that it had."""

    def init(params: Any) -> NeuronState:
        if not jax.tree.leaves(params):  # see _kinds
            return NeuronState(params)

        def zeros(param: Array, axes: MatrixAxes) -> Array:
            shape = [1 if axis in axes.rows else size for axis, size in enumerate(param.shape)]
            return jnp.zeros(shape, param.dtype)

        return NeuronState(jax.tree.map(zeros, params, spread(matrix_dims, params)))

    def update(updates: Any, state: NeuronState, params: Any = None) -> tuple[Any, NeuronState]:
        del params
        axes = spread(matrix_dims, updates)
        mean_sq = jax.tree.map(lambda x, a: jnp.mean(x * x, a.rows, keepdims=True), updates, axes)
        neurons = jax.tree.map(
            lambda average, new: moving_average(average, new, beta), state.neurons, mean_sq
        )

        def equalized(x: Array, mean_sq: Array, average: Array, axes: MatrixAxes) -> Array:
            root = jnp.sqrt(average) + _NEURON_EPS
            # Of the matrix before and after, but for the same factor: the root of the number of rows.
            size = jnp.sqrt(jnp.sum(mean_sq, axes.columns, keepdims=True))
            new_size = jnp.sqrt(jnp.sum(mean_sq / root**2, axes.columns, keepdims=True))
            return x * (size / (new_size + _NEURON_EPS) / root)

        return jax.tree.map(equalized, updates, mean_sq, neurons, axes), NeuronState(neurons)

    return optax.GradientTransformation(init, update)


def _sized(matrix_dims: MatrixDims) -> optax.GradientTransformation:
    """Give the elements of an orthogonal matrix a root mean square of 1."""

    def update(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(
            lambda x, axes: math.sqrt(_longer_side(x, axes)) * x, updates, spread(matrix_dims, updates)
        )

    return optax.stateless(update)


def _longer_side(x: Array, axes: MatrixAxes) -> int:
    return max(math.prod(x.shape[axis] for axis in side) for side in (axes.rows, axes.columns))


def _coefficients(value: Any, num_steps: Any) -> tuple[Triple, ...]:
    """Return (a, b, c) of every step."""
    if not isinstance(num_steps, int | np.integer) or isinstance(num_steps, bool) or num_steps < 1:
        raise ValueError(
            f"ns_steps is {num_steps!r}; it must be an integer of at least 1. Under "
            "optax.inject_hyperparams, name it in static_args."
        )
    known = _NS_COEFFICIENTS.get(value) if isinstance(value, str) else value
    try:
        steps = np.atleast_2d(np.asarray(known, np.float64))
    except (TypeError, ValueError):  # not numbers, or of unequal lengths
        steps = np.empty(0)
    if steps.ndim != 2 or steps.shape[1] != 3 or not len(steps) or not np.isfinite(steps).all():
        raise ValueError(
            f"ns_coefficients is {value!r}; it must be one of {', '.join(map(repr, _NS_COEFFICIENTS))}, or "
            "three finite numbers (a, b, c), or such a triple for each step"
        )
    return tuple(tuple(steps[min(i, len(steps) - 1)].tolist()) for i in range(num_steps))


def _kinds(hidden: Mask, matrix_dims: MatrixDims, params: Any) -> Any:
    """Return the kind of every parameter: "hidden" or "rest"."""
    num_params = len(jax.tree.leaves(params))
    if num_params == 0:  # also the placeholder for all parameters in optax.tree.map_params
        return params
    marks = jax.tree.map(
        lambda mark, part: jax.tree.map(lambda _: mark, part), resolved(hidden, params), params
    )
    jax.tree.map_with_path(_check_mark, marks)
    if not any(jax.tree.leaves(marks)):
        raise ValueError(
            f"hidden marks none of {num_params} parameters; at least one must be a hidden matrix. Change "
            "hidden, or use optax.adamw."
        )
    marked = jax.tree.map(lambda mark, param: param if mark else optax.MaskedNode(), marks, params)
    jax.tree.map_with_path(_check_matrix, marked, spread(matrix_dims, marked))
    return jax.tree.map(lambda mark: "hidden" if mark else "rest", marks)


def _check_mark(path: tuple[Any, ...], mark: Any) -> None:
    if not isinstance(mark, bool | np.bool_):
        raise ValueError(
            f"hidden is {mark!r} for the parameter {jax.tree_util.keystr(path)}; it must be True or False"
        )


def _check_matrix(path: tuple[Any, ...], param: Array, axes: MatrixAxes) -> None:
    if axes.is_vector:
        raise ValueError(
            f"the parameter {jax.tree_util.keystr(path)} is marked hidden, but its shape {param.shape}, seen "
            f"as {axes}, is not that of a matrix; a hidden matrix has rows and columns. Set hidden to False "
            "for it, so that AdamW updates it, or give other matrix_dims."
        )


def _share(learning_rate: ScalarOrSchedule) -> ScalarOrSchedule:
    """Return AdamW's default learning rate."""
    if callable(learning_rate):
        return lambda count: _REST_SHARE * learning_rate(count)
    return _REST_SHARE * learning_rate
