"""MuonMERIT in float64 NumPy, from its equations alone, one matrix at a time."""

from typing import Any

import numpy as np

QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5
# https://arxiv.org/abs/2505.16932, with the digits and the 1.02 of microsoft/dion's polar_express.py
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
# newton_schulz_triton.py of microsoft/dion
DION = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def orthogonalized(n: Any, coefficients: Any = QUINTIC, safety: float = 1.0) -> Any:
    x = n / max(safety * np.sqrt((n * n).sum()), 1e-7)
    if x.shape[0] > x.shape[1]:
        return orthogonalized(n.T, coefficients, safety).T
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def size(x: Any, norm: str) -> float:
    return float(np.abs(x).max() if norm == "max" else np.sqrt((x * x).sum()))


def scaled(w: Any, u: Any, norm: str = "max", bounds: tuple[float, float] = (0, np.inf)) -> Any:
    """s*u."""

    def ratio(w: Any, u: Any) -> float | None:
        of_w, of_u = size(w, norm), size(u, norm)
        return of_w / of_u if of_w and of_u else None

    rows, columns = list(map(ratio, w, u)), list(map(ratio, w.T, u.T))
    whole, result = ratio(w, u), u.copy()
    for i, j in np.ndindex(*u.shape):
        if rows[i] is not None and columns[j] is not None:
            result[i, j] *= np.clip(max(rows[i], columns[j], whole), *bounds)
    return result


class Muon:
    """One hidden matrix."""

    def __init__(
        self,
        w: Any,
        lr: float,
        wd: float = 0.1,
        mu: float = 0.9,
        nesterov: bool = True,
        coefficients: Any = QUINTIC,
        safety: float = 1.0,
        norm: str = "max",
        clip: float | None = 1.0,
        bounds: tuple[float, float] = (0, np.inf),
        neuron_beta: float | None = None,
    ) -> None:
        self.w, self.momentum = np.array(w, np.float64), np.zeros(w.shape)
        self.neurons, self.neuron_beta = np.zeros(w.shape[1]), neuron_beta
        self.lr, self.wd, self.mu, self.nesterov = lr, wd, mu, nesterov
        self.coefficients, self.safety = coefficients, safety
        self.norm, self.clip, self.bounds = norm, clip, bounds

    def step(self, g: Any) -> None:
        g = np.asarray(g, np.float64)
        self.momentum = self.mu * self.momentum + (1 - self.mu) * g
        n = (1 - self.mu) * g + self.mu * self.momentum if self.nesterov else self.momentum
        x = orthogonalized(n, self.coefficients, self.safety)
        if self.neuron_beta is not None:
            x = self.with_equal_columns(x)
        d = np.sqrt(max(g.shape)) * x
        change = scaled(self.w, d + self.wd * self.w, self.norm, self.bounds)
        self.w = self.w - self.lr * (change if self.clip is None else np.clip(change, -self.clip, self.clip))

    def with_equal_columns(self, x: Any) -> Any:
        b, mean_sq = self.neuron_beta, (x * x).mean(axis=0)
        self.neurons = b * self.neurons + (1 - b) * mean_sq
        equal = x / (np.sqrt(self.neurons) + 1e-10)
        return equal * np.sqrt((x * x).sum()) / (np.sqrt((equal * equal).sum()) + 1e-10)


class AdamW:
    """Any other parameter."""

    def __init__(
        self, w: Any, lr: float, wd: float = 0.1, betas: Any = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        self.w, self.m, self.v, self.t = np.array(w, np.float64), 0.0, 0.0, 0
        self.lr, self.wd, self.betas, self.eps = lr, wd, betas, eps

    def step(self, g: Any) -> None:
        g, self.t = np.asarray(g, np.float64), self.t + 1
        b1, b2 = self.betas
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        self.w = self.w - self.lr * self.wd * self.w - self.lr * m / (np.sqrt(v) + self.eps)
