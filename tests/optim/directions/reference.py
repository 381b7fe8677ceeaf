"""The family in float64 NumPy, written from its equations. It shares no code with the package.

One weight:

    d, state <- direction(g, state)
    u = d + wd*w
    s = the ratios of w and u, 1 with norm="none"
    w <- w - lr * clamp(s*u, -clip, clip)

A direction and a ``Scaling`` belong to one matrix. ``Weight`` cuts an array into matrices, and gives each its
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Triple = tuple[float, float, float]


# --- the polar factor -------------------------------------------------------------------------------------


class Passes(NamedTuple):
    """(a, b, c) of each Newton-Schulz pass, and the factor of the norm that divides the input."""

    triples: Sequence[Triple]
    margin: float = 1.0


PASSES: dict[str, Passes] = {
    # Keller Jordan's, also in torch.optim.Muon and optax.
    "quintic": Passes([(3.4445, -4.7750, 2.0315)]),
    # microsoft/dion, dion/polar_express.py; arXiv 2505.16932.
    "polar-express": Passes(
        [
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ],
        margin=1.02,
    ),
    # optax/contrib/_muon.py, "dion"; microsoft/dion, dion/newton_schulz_triton.py.
    "dion": Passes(
        [
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ]
    ),
}


def passes_of(coefficients: str | Sequence[Any], num: int) -> tuple[list[Triple], float]:
    """The triple of each of ``num`` passes, the last one repeated, and the margin."""
    if isinstance(coefficients, str):
        triples, margin = list(PASSES[coefficients].triples), PASSES[coefficients].margin
    else:
        triples, margin = [tuple(t) for t in np.atleast_2d(np.array(coefficients, np.float64)).tolist()], 1.0
    return [triples[min(i, len(triples) - 1)] for i in range(num)], margin


def polar(n: Array, coefficients: str | Sequence[Any] = "quintic", num: int = 5, eps: float = 1e-7) -> Array:
    """The polar factor of one matrix by ``num`` Newton-Schulz passes."""
    if n.shape[0] > n.shape[1]:
        return polar(n.T, coefficients, num, eps).T
    triples, margin = passes_of(coefficients, num)
    x = n / max(np.sqrt(np.sum(n * n)) * margin, eps)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def on_singular_value(x: Array, coefficients: str | Sequence[Any] = "quintic", num: int = 5) -> Array:
    """The result of the passes for singular values x of a matrix divided by its norm."""
    triples, margin = passes_of(coefficients, num)
    x = x / margin
    for a, b, c in triples:
        x = a * x + b * x**3 + c * x**5
    return x


# --- directions -------------------------------------------------------------------------------------------


def as_it_is(x: Array) -> Array:
    return x


class Adam:
    """m / (sqrt(v) + eps) of a matrix or a vector. ``stored`` rounds state to its dtype."""

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-6,
        bias_correction: bool = False,
        stored: Callable[[Array], Array] = as_it_is,
    ) -> None:
        self.betas, self.eps, self.bias_correction, self.stored = betas, eps, bias_correction, stored
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.t = 0

    def __call__(self, g: Array) -> Array:
        b1, b2 = self.betas
        self.t += 1
        self.m = self.stored(b1 * self.m + (1 - b1) * g)
        self.v = self.stored(b2 * self.v + (1 - b2) * g * g)
        m, v = self.m, self.v
        if self.bias_correction:
            m, v = m / (1 - b1**self.t), v / (1 - b2**self.t)
        return m / (np.sqrt(v) + self.eps)

    @property
    def state(self) -> dict[str, Array]:
        return {"exp_avg": self.m, "exp_avg_sq": self.v}


def adamw() -> Adam:
    """The default direction of the rest of the weights."""
    return Adam(betas=(0.9, 0.95), eps=1e-8, bias_correction=True)


def scale_of(name: str, rows: int, columns: int) -> float:
    return {
        "rms": max(rows, columns) ** 0.5,
        "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
        "original": max(1.0, rows / columns) ** 0.5,
        "spectral": 1.0,
    }[name]


class Muon:
    """scale * polar(N) of one matrix; with ``neuron_beta``, NorMuon's."""

    def __init__(
        self,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: str | Sequence[Any] = "quintic",
        ns_eps: float = 1e-7,
        scale: str = "rms",
        neuron_beta: float | None = None,
        stored: Callable[[Array], Array] = as_it_is,
    ) -> None:
        self.momentum, self.nesterov, self.scale, self.neuron_beta = momentum, nesterov, scale, neuron_beta
        self.ns_steps, self.ns_coefficients, self.ns_eps, self.stored = (
            ns_steps,
            ns_coefficients,
            ns_eps,
            stored,
        )
        self.average: Any = 0.0
        self.neurons: Any = 0.0

    def __call__(self, g: Array) -> Array:
        mu = self.momentum
        self.average = self.stored(mu * self.average + (1 - mu) * g)
        n = mu * self.average + (1 - mu) * g if self.nesterov else self.average
        x = polar(n, self.ns_coefficients, self.ns_steps, self.ns_eps)
        if self.neuron_beta is not None:
            x = self.normalized(x)
        return scale_of(self.scale, *g.shape) * x

    def normalized(self, x: Array) -> Array:
        """NorMuon: rows of equal average size, and the same norm of the whole."""
        b = self.neuron_beta
        assert b is not None
        self.neurons = self.stored(b * self.neurons + (1 - b) * np.mean(x * x, axis=1, keepdims=True))
        rows = x / (np.sqrt(self.neurons) + 1e-10)
        return rows * np.linalg.norm(x) / (np.linalg.norm(rows) + 1e-10)

    @property
    def state(self) -> dict[str, Array]:
        state = {"momentum_buffer": self.average}
        return state if self.neuron_beta is None else {**state, "second_momentum_buffer": self.neurons}


class Soap:
    """Adam in the eigenbasis of the averages of g g' and g' g of one matrix.

    The signs of eigenvectors are arbitrary, and so is the basis for equal eigenvalues. If a test needs the
    same ones, ``first_bases`` sets them in the first step, after ``check_eigenvectors``.
    """

    def __init__(
        self,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        bias_correction: bool = True,
        shampoo_beta: float | None = None,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        refresh_phase: int = 0,
    ) -> None:
        self.betas, self.eps, self.bias_correction = betas, eps, bias_correction
        self.shampoo_beta = betas[1] if shampoo_beta is None else shampoo_beta
        self.frequency, self.max_dim, self.phase = precondition_frequency, max_precond_dim, refresh_phase
        self.averages: list[Any] = [0.0, 0.0]
        self.bases: list[Array | None] = [None, None]
        self.first_bases: list[Array | None] | None = None
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.t = -1

    def __call__(self, g: Array) -> Array | None:
        b, (b1, b2) = self.shampoo_beta, self.betas
        self.t += 1
        d = None
        if self.t:
            rotated = self.into_basis(g)
            self.m = b1 * self.m + (1 - b1) * rotated
            self.v = b2 * self.v + (1 - b2) * rotated * rotated
            d = self.out_of_basis(self.m / (np.sqrt(self.v) + self.eps))
            if self.bias_correction:  # eps is not corrected, as in the authors' code
                d = d * np.sqrt(1 - b2**self.t) / (1 - b1**self.t)
        products = g @ g.T, g.T @ g
        self.averages = [b * old + (1 - b) * new for old, new in zip(self.averages, products, strict=True)]
        if self.t == 0:
            self.m, self.v = np.zeros_like(g), np.zeros_like(g)
            self.find_bases(g.shape)
        elif (self.t - self.phase) % self.frequency == 0:
            self.improve_bases()
        return d

    def find_bases(self, shape: tuple[int, ...]) -> None:
        for i, side in enumerate(shape):
            if side > self.max_dim:
                continue
            if self.first_bases is None:
                self.bases[i] = np.linalg.eigh(self.averages[i])[1][:, ::-1]
            else:
                self.bases[i] = self.first_bases[i]
                check_eigenvectors(self.averages[i], self.bases[i])

    def improve_bases(self) -> None:
        m = self.out_of_basis(self.m)
        for i, basis in enumerate(self.bases):
            if basis is not None:
                order = np.argsort(-np.diag(basis.T @ self.averages[i] @ basis), kind="stable")
                self.v = np.take(self.v, order, axis=i)
                self.bases[i] = np.linalg.qr(self.averages[i] @ basis[:, order])[0]
        self.m = self.into_basis(m)

    def into_basis(self, x: Array) -> Array:
        rows, columns = self.bases
        x = x if rows is None else rows.T @ x
        return x if columns is None else x @ columns

    def out_of_basis(self, x: Array) -> Array:
        rows, columns = self.bases
        x = x if rows is None else rows @ x
        return x if columns is None else x @ columns.T

    @property
    def state(self) -> dict[str, Array]:
        """The state that does not depend on the signs of eigenvectors."""
        return {"exp_avg": np.abs(self.m), "exp_avg_sq": self.v}


def check_eigenvectors(matrix: Array, vectors: Array) -> None:
    """Fail if these are not the eigenvectors of a symmetric matrix, the largest eigenvalue's first."""
    side = len(matrix)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(side), atol=1e-12)
    values = np.diag(vectors.T @ matrix @ vectors)
    np.testing.assert_allclose(matrix @ vectors, vectors * values, atol=1e-12 * max(values[0], 1e-300))
    assert np.all(np.diff(values) <= 1e-12 * values[0])


Direction = Adam | Muon | Soap


# --- ratios and clip --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How u is scaled and clipped."""

    clip: float | None = 1.0
    element_wise: bool = True
    weight_bound: bool = True
    norm: str = "max"
    ratio_bounds: tuple[float, float] | None = None
    calibrated: bool = False


UNSCALED = Rule(norm="none", clip=None)


def size(x: Array, norm: str) -> float:
    return float(np.max(np.abs(x)) if norm == "max" else np.sqrt(np.sum(x * x)))


def ratio(w: Array, u: Array, norm: str) -> float:
    """|w| / |u|; NaN if one of them is zero."""
    of_w, of_u = size(w, norm), size(u, norm)
    return of_w / of_u if of_w > 0 and of_u > 0 else np.nan


class Scaling:
    """s*u of one matrix, or of a vector, by a rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.first: float | None = None
        """The first defined ratio, the divisor of a calibrated ratio."""

    def __call__(self, w: Array, u: Array) -> Array:
        rule = self.rule
        if rule.norm == "none":
            return u
        s = np.array(ratio(w, u, rule.norm))
        if w.ndim == 2 and rule.element_wise:
            rows = [ratio(*row, rule.norm) for row in zip(w, u, strict=True)]
            columns = [ratio(*column, rule.norm) for column in zip(w.T, u.T, strict=True)]
            of_elements = np.maximum.outer(rows, columns)  # NaN where one of the two is
            s = np.maximum(of_elements, s) if rule.weight_bound else of_elements
        if rule.calibrated:
            if self.first is None and not np.isnan(s):
                self.first = s.item()
            s = np.array(1.0 if np.isnan(s) else s / self.first)
        if rule.ratio_bounds is not None:
            s = np.clip(s, *rule.ratio_bounds)
        return u * np.where(np.isnan(s), 1.0, s)


# --- a whole weight ---------------------------------------------------------------------------------------


def cut(x: Array, matrix_dims: int | None, split: Any, split_dim: int) -> list[Array]:
    """The matrices of an array, as views: for each stacked matrix, its splits in order.

    The last ``matrix_dims`` dimensions form one matrix, the first of them its rows. Vectors stay vectors.
    """
    num_stacked = 0 if matrix_dims is None else max(0, x.ndim - matrix_dims)
    stacked = [x[(*index, ...)] for index in np.ndindex(x.shape[:num_stacked])]  # views, of a scalar too
    if x.ndim - num_stacked < 2:
        return stacked
    matrices = [each.reshape(each.shape[0], -1) for each in stacked]
    if split is None:
        return matrices
    length = matrices[0].shape[split_dim]
    sizes = [length // split] * split if isinstance(split, int) else list(split)
    return [part for each in matrices for part in np.split(each, np.cumsum(sizes)[:-1], axis=split_dim)]


class Weight:
    """A weight and its state. Each of its matrices has its own direction, ratios and state."""

    def __init__(
        self,
        w: Array,
        direction: Callable[[], Direction],
        rule: Rule,
        *,
        lr: float,
        weight_decay: float,
        matrix_dims: int | None = None,
        split: Any = None,
        split_dim: int = 0,
        maximize: bool = False,
    ) -> None:
        self.w, self.clip, self.lr, self.weight_decay = w.copy(), rule.clip, lr, weight_decay
        self.view, self.sign = (matrix_dims, split, split_dim), -1.0 if maximize else 1.0
        self.directions = [direction() for _ in self.cut(self.w)]
        self.scalings = [Scaling(rule) for _ in self.directions]

    def cut(self, x: Array) -> list[Array]:
        return cut(x, *self.view)

    def step(self, g: Array, gradient_scale: float = 1.0) -> None:
        grads = self.cut(self.sign * gradient_scale * g)
        parts = zip(self.cut(self.w), grads, self.directions, self.scalings, strict=True)
        for w, grad, direction, scaling in parts:
            d = direction(grad)
            if d is None:  # a step that does not change the weight
                continue
            change = scaling(w, d + self.weight_decay * w)
            if self.clip is not None:
                change = np.clip(change, -self.clip, self.clip)
            w[...] = w - self.lr * change

    def joined(self, parts: Sequence[Array]) -> Array:
        """Join arrays, one of each matrix's shape, into one of the weight's shape."""
        whole = np.empty_like(self.w)
        for place, part in zip(self.cut(whole), parts, strict=True):
            place[...] = part
        return whole

    def state(self, key: str) -> Array:
        """A state tensor of the weight's shape."""
        return self.joined([direction.state[key] for direction in self.directions])


def gradient_scale(grads: Sequence[Array], max_norm: float | None) -> float:
    """What ``clip_grad_norm_`` multiplies all gradients by."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (np.sqrt(sum(np.sum(g * g) for g in grads)) + 1e-6))
