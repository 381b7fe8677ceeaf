"""MERIT for JAX, as optax gradient transformations. Needs jax and optax, but not torch."""

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # type: ignore[import-untyped]  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"merit_optim.jax needs jax and optax, but {error.name} is missing: pip install 'merit-optim[jax]'",
        name=error.name,
    ) from error

from merit_optim.jax.algorithm import MatrixAxes
from merit_optim.jax.muon import muon_merit
from merit_optim.jax.transforms import max_lamb, merit, scale_by_merit

__all__ = ["MatrixAxes", "max_lamb", "merit", "muon_merit", "scale_by_merit"]
