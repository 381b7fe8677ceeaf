"""Directions: what gradients become before any ratio scales them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax import Array
from jax.typing import DTypeLike

from merit_optim.jax import validate
from merit_optim.jax.trees import Scalar, Views, in_float32, map_matrices, unzipped, widened
from merit_optim.jax.view import Matrices, number_of

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]
_STATE_DTYPES = ("float32", "bfloat16", "float64")
"""Squares of ordinary gradients underflow in float16 and smaller."""


def scale_by_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.95,
    eps: Scalar = 1e-6,
    *,
    bias_correction: bool = False,
    state_dtype: DTypeLike = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, d = m / (sqrt(v) + eps).

    Unlike ``optax.scale_by_adam`` with both moments in one dtype and, as in MERIT, without bias correction.
    The state is the same, so a run of ``optax.adamw`` can be continued.

    Args:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the square root of v.
        bias_correction: divide the moments by ``1 - beta**t``.
        state_dtype: dtype of both moments; those of float64 parameters are float64.
    """
    validate.decay("b1", b1)
    validate.decay("b2", b2)
    validate.positive("eps", eps)
    # For NumPy, None is float64.
    validate.one_of("state_dtype", state_dtype and jnp.dtype(state_dtype).name, _STATE_DTYPES)

    def stored(x: Array, dtype_of: Array) -> Array:
        return x.astype(jnp.float64 if dtype_of.dtype == jnp.float64 else state_dtype)

    def init(params: Any) -> optax.ScaleByAdamState:
        # Two trees, not one twice: a jitted step could not donate the same buffer twice.
        mu, nu = (jax.tree.map(lambda w: stored(jnp.zeros_like(w), w), params) for _ in range(2))
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=mu, nu=nu)

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)

        def averages(old: Any, new: Any, beta: Scalar) -> Any:
            return jax.tree.map(lambda m, x: stored(beta * widened(m) + (1 - beta) * x, m), old, new)

        mu = averages(state.mu, grads, b1)
        nu = averages(state.nu, jax.tree.map(jnp.square, grads), b2)

        def direction(m: Array, v: Array) -> Array:
            if not bias_correction:
                return m / (jnp.sqrt(v) + eps)
            # XLA may contract a product and a sum, and turn a/b/c into a/(b*c), in one program and not in
            # another. This avoids both: no two divisions in a row, and no product as the last step, to which
            # the decayed weights, also a product, would be added.
            first, second_sqrt = 1 / _correction(count, b1), 1 / jnp.sqrt(_correction(count, b2))
            return m * first / (jnp.sqrt(v) * second_sqrt + eps)

        # From the state as it is stored, as in torch.
        return jax.tree.map(direction, widened(mu), widened(nu)), optax.ScaleByAdamState(count, mu, nu)

    return in_float32(optax.GradientTransformation(init, update), needs_params=False)


def _correction(count: Array, beta: Scalar) -> Array:
    """1 - beta**count, accurate if beta is near 1."""
    log_beta = math.log(beta) if isinstance(beta, float) and beta > 0 else jnp.log(beta)
    return -jnp.expm1(count * log_beta)


def sgd(momentum: Scalar = 0.9, nesterov: bool = False) -> optax.GradientTransformationExtraArgs:
    """M <- momentum*M + g, as in torch.optim.SGD: ``optax.trace``."""
    validate.decay("momentum", momentum)
    return in_float32(optax.trace(momentum, nesterov=nesterov), needs_params=False)


def sign(momentum: Scalar = 0.9, nesterov: bool = False) -> optax.GradientTransformation:
    """The sign of SGD's direction."""
    return optax.chain(sgd(momentum, nesterov), optax.scale_by_sign())


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

# Keeps outputs of zeros at zero, as in torch.
_NEURON_EPS = 1e-10

_SCALES: dict[str, Callable[[int, int], float]] = {
    "rms": lambda outputs, inputs: math.sqrt(max(outputs, inputs)),
    "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
    "original": lambda outputs, inputs: math.sqrt(max(1, outputs / max(1, inputs))),
    "spectral": lambda *_: 1.0,
}


def scale_by_muon(
    momentum: Scalar = 0.95,
    *,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = "quintic",
    scale: str = "rms",
    neuron_beta: Scalar | None = None,
    view: Views = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction, and with ``neuron_beta`` NorMuon's.

        M <- momentum*M + (1-momentum)*g        N = momentum*M + (1-momentum)*g  (Nesterov; else M)
        X  = N / |N|                            ns_steps times  X <- a*X + (b*XX' + c*XX'XX') X
        v_j <- neuron_beta*v_j + (1-neuron_beta) * mean(X_.j**2)      of each output
        X <- |X| * X' / |X'|                    with X'_.j = X_.j / sqrt(v_j)
        d  = scale * X

    Momentum and orthogonalisation are optax's. Unlike in ``optax.contrib.muon``, and as in torch, N has no
    bias correction. The products have the precision of ``jax.default_matmul_precision``.

    Args:
        momentum: decay of M.
        nesterov: look ahead by one more step of momentum.
        ns_steps: number of steps to the orthogonal matrix.
        ns_coefficients: "quintic" (Muon's), "polar-express", "dion", three numbers (a, b, c), or such a
            triple for each step, of which the last is repeated.
        scale: "rms", sqrt(max(rows, columns)); "match_rms_adamw", 0.2 of it; "original",
            sqrt(max(1, outputs/inputs)); or "spectral", 1.
        neuron_beta: decay of v, by which outputs are given equal sizes; None leaves them as they are.
        view: how arrays are seen as matrices; see ``View``. All must be matrices.
    """
    validate.decay("momentum", momentum)
    validate.one_of("scale", scale, _SCALES)
    coefficients = _coefficients(ns_coefficients, ns_steps)

    def sized(m: Matrices, x: Array) -> Array:
        return _SCALES[scale](number_of(m.outputs, x), number_of(m.inputs, x)) * x

    return in_float32(
        optax.chain(
            optax.scale(1 - momentum),
            optax.trace(momentum, nesterov=nesterov),
            _each(lambda m, n: _orthogonalized(m, n, coefficients), view),
            optax.identity() if neuron_beta is None else _equalized(neuron_beta, view),
            _each(sized, view),
        ),
        needs_params=False,
    )


def _each(function: Callable[[Matrices, Array], Array], view: Views) -> optax.GradientTransformation:
    """Transform each matrix by a function."""

    def init(params: Any) -> optax.EmptyState:
        jax.eval_shape(lambda: map_matrices(function, view, params))  # refuse what is no matrix now
        return optax.EmptyState()

    return optax.GradientTransformation(init, lambda x, state, _: (map_matrices(function, view, x), state))


def _orthogonalized(m: Matrices, n: Array, coefficients: tuple[Triple, ...]) -> Array:
    """X, by optax; with beta 0 its average is the update itself, so that its state need not be kept."""
    if m.is_vector:
        raise ValueError(
            f"a parameter of shape {n.shape} is seen as a vector, and Muon's direction needs rows and "
            "columns; set hidden to False for it, so that AdamW updates it, or give another view"
        )
    axes = optax.contrib.MuonDimensionNumbers(m.rows, m.columns)
    muon = optax.contrib.scale_by_muon(
        coefficients,
        len(coefficients),
        beta=0.0,
        eps=_EPS,
        nesterov=False,
        weight_dimension_numbers=axes,
    )
    x: Array = muon.update(n, muon.init(n))[0]
    return x


class NeuronState(NamedTuple):
    """The average square of each output of an orthogonal matrix."""

    neurons: Any


def _equalized(beta: Scalar, view: Views) -> optax.GradientTransformation:
    """Give the outputs of each matrix equal average sizes, and the whole the size that it had."""
    validate.decay("neuron_beta", beta, ", or None")

    def zeros(m: Matrices, w: Array) -> Array:
        return jnp.zeros_like(jnp.sum(w, m.inputs, keepdims=True))

    def equalized(m: Matrices, x: Array, average: Array) -> tuple[Array, Array]:
        mean_sq = jnp.mean(x * x, m.inputs, keepdims=True)
        average = beta * average + (1 - beta) * mean_sq
        root = jnp.sqrt(average) + _NEURON_EPS
        # Of the matrix before and after, but for the same factor: the root of the number of inputs.
        size = jnp.sqrt(jnp.sum(mean_sq, m.outputs, keepdims=True))
        new_size = jnp.sqrt(jnp.sum(mean_sq / root**2, m.outputs, keepdims=True))
        return x * (size / (new_size + _NEURON_EPS) / root), average

    def update(updates: Any, state: NeuronState, params: Any = None) -> tuple[Any, NeuronState]:
        del params
        equal, neurons = unzipped(map_matrices(equalized, view, updates, state.neurons), updates)
        return equal, NeuronState(neurons)

    return optax.GradientTransformation(lambda params: NeuronState(map_matrices(zeros, view, params)), update)


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


DIRECTIONS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": scale_by_adam,
    "sgd": sgd,
    "sign": sign,
    "muon": scale_by_muon,
    "normuon": partial(scale_by_muon, neuron_beta=0.95),
}
"""By the names of ``compose``."""
