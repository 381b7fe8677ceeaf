"""Parameters and gradients of many shapes, sizes and patterns of zeros."""

from typing import Any

import numpy as np

Tree = dict[str, np.ndarray[Any, np.dtype[Any]]]

SHAPES = {
    "matrix": (13, 7),
    "column": (11, 1),
    "vector": (9,),
    "scalar": (),
    "experts": (3, 5, 4),
    "zero": (5, 4),
    "empty": (0, 4),
}


def parameters(seed: int = 0) -> Tree:
    """The matrix has a row and a column of zeros, and rows that differ in size by powers of ten."""
    generator = np.random.default_rng(seed)
    params = {name: 0.1 * generator.standard_normal(shape) for name, shape in SHAPES.items()}
    params["matrix"] *= 10.0 ** generator.integers(-3, 2, (13, 1))
    params["matrix"][2] = 0
    params["matrix"][:, 5] = 0
    params["zero"][:] = 0
    return _float32(params)


def gradients(seed: int) -> Tree:
    """One row and one column of the matrix are not used."""
    generator = np.random.default_rng([7, seed])
    grads = {name: 0.01 * generator.standard_normal(shape) for name, shape in SHAPES.items()}
    grads["matrix"][1] = 0
    grads["matrix"][:, 3] = 0
    return _float32(grads)


def _float32(tree: dict[str, Any]) -> Tree:
    return {name: np.asarray(leaf, np.float32) for name, leaf in tree.items()}
