"""The family in float64 NumPy, from its equations alone: one matrix or vector at a time."""

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


def polar(n: Any, coefficients: Any = QUINTIC, safety: float = 1.0) -> Any:
    x = n / max(safety * np.linalg.norm(n), 1e-7)
    if x.shape[0] > x.shape[1]:
        return polar(n.T, coefficients, safety).T
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def size(x: Any, norm: str) -> float:
    return float(np.abs(x).max() if norm == "max" else np.sqrt((x * x).sum()))


def quotient(w: Any, u: Any, norm: str) -> float | None:
    of_w, of_u = size(w, norm), size(u, norm)
    return of_w / of_u if of_w and of_u else None


class Weight:
    """One weight; each choice is a method."""

    def __init__(self, w: Any, lr: float, **options: Any) -> None:
        self.w, self.lr, self.t = np.array(w, np.float64), lr, 0
        self.m, self.v = np.zeros(self.w.shape), np.zeros(self.w.shape)
        self.neurons = np.zeros(self.w.shape[-1:])
        self.options = {"direction": "adam", "ratio": "merit", "hold": "decay", "weight_decay": 0.1} | options
        self.axis = {"matrix": None, "output": 0}[self.option("sphere_of", "matrix")]
        self.radius = np.linalg.norm(self.w, axis=self.axis)

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)

    def step(self, g: Any) -> None:
        g, wd, hold = np.asarray(g, np.float64), self.option("weight_decay"), self.option("hold")
        self.t += 1
        d = getattr(self, self.option("direction"))(g)
        u = d + wd * self.w if hold == "decay" else d
        c = u * self.scale(u)
        if self.option("clip"):
            c = np.clip(c, -self.option("clip"), self.option("clip"))
        if hold == "sphere":
            norm = np.linalg.norm(c, axis=self.axis)
            moved = self.w - self.lr * np.linalg.norm(self.w, axis=self.axis) * c / np.where(
                norm == 0, 1, norm
            )
            self.w = self.radius * moved / np.linalg.norm(moved, axis=self.axis)
            return
        where = {"decay": 0.0, "decoupled": 1.0, "cautious": c * self.w > 0}[hold]
        self.w = self.w - self.lr * (c + wd * self.w * where)

    def adam(self, g: Any) -> Any:
        b1, b2, eps = self.option("b1", 0.9), self.option("b2", 0.95), self.option("eps", 1e-6)
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        m, v = self.m, self.v
        if self.option("bias_correction"):
            m, v = m / (1 - b1**self.t), v / (1 - b2**self.t)
        return m / (np.sqrt(v) + eps)

    def sgd(self, g: Any) -> Any:
        momentum = self.option("momentum", 0.9)
        self.m = momentum * self.m + g
        return g + momentum * self.m if self.option("nesterov", False) else self.m

    def sign(self, g: Any) -> Any:
        return np.sign(self.sgd(g))

    def muon(self, g: Any) -> Any:
        momentum = self.option("momentum", 0.95)
        self.m = momentum * self.m + (1 - momentum) * g
        n = (1 - momentum) * g + momentum * self.m if self.option("nesterov", True) else self.m
        x = polar(n, self.option("coefficients", QUINTIC), self.option("safety", 1.0))
        if (beta := self.option("neuron_beta")) is not None:
            self.neurons = beta * self.neurons + (1 - beta) * (x * x).mean(axis=0)
            equal = x / (np.sqrt(self.neurons) + 1e-10)
            x = equal * np.linalg.norm(x) / (np.linalg.norm(equal) + 1e-10)
        inputs, outputs = g.shape
        return (
            x
            * {
                "rms": np.sqrt(max(g.shape)),
                "match_rms_adamw": 0.2 * np.sqrt(max(g.shape)),
                "original": np.sqrt(max(1, outputs / inputs)),
                "spectral": 1.0,
            }[self.option("scale", "rms")]
        )

    def scale(self, u: Any) -> Any:
        kind, norm = (
            self.option("ratio"),
            self.option("norm", "max" if self.option("ratio") == "merit" else "l2"),
        )
        low, high = self.option("ratio_bounds", (0, np.inf))
        whole = quotient(self.w, u, norm)
        if kind == "none":
            return 1.0
        if kind == "weight" or u.ndim < 2:
            return np.clip(1.0 if whole is None else whole, low, high)
        s = np.ones(u.shape)
        for i, j in np.ndindex(*u.shape):
            row, column = quotient(self.w[i], u[i], norm), quotient(self.w[:, j], u[:, j], norm)
            ratios = {"merit": [row, column, whole], "row": [row], "column": [column]}[kind]
            if None not in ratios:
                s[i, j] = np.clip(max(ratios[: 2 if self.option("weight_bound") is False else 3]), low, high)
        return s
