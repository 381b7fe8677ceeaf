"""Parameters and gradients of many shapes, sizes and patterns of zeros."""

from typing import Any

import numpy as np

Tree = dict[str, np.ndarray[Any, np.dtype[Any]]]

SHAPES = {
    "matrix": (13, 7),
    "row": (1, 11),
    "column": (11, 1),
    "vector": (9,),
    "scalar": (),
    "convolution": (4, 3, 2, 2),
    "experts": (3, 5, 4),
    "zero": (5, 4),
    "zero_lines": (6, 8),
    "unused_lines": (6, 8),
    "empty": (0, 4),
}


def parameters(seed: int = 0) -> Tree:
    """Rows of a matrix differ in size by powers of ten."""
    generator = np.random.default_rng(seed)
    params = {name: 0.1 * generator.standard_normal(shape) for name, shape in SHAPES.items()}
    params["matrix"] *= 10.0 ** generator.integers(-3, 2, (13, 1))
    params["zero"][:] = 0
    params["zero_lines"][2] = 0
    params["zero_lines"][:, 5] = 0
    return _float32(params)


def gradients(seed: int) -> Tree:
    """Those of the ``unused_lines`` are zero in one row and one column."""
    generator = np.random.default_rng([7, seed])
    grads = {name: 0.01 * generator.standard_normal(shape) for name, shape in SHAPES.items()}
    grads["unused_lines"][1] = 0
    grads["unused_lines"][:, 3] = 0
    return _float32(grads)


def _float32(tree: dict[str, Any]) -> Tree:
    return {name: np.asarray(leaf, np.float32) for name, leaf in tree.items()}
