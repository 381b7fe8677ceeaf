"""Direction, ratio and hold for JAX, as optax transformations. Needs jax and optax, but not torch."""

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # type: ignore[import-untyped]  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"merit_optim.jax needs jax and optax, but {error.name} is missing: pip install 'merit-optim[jax]'",
        name=error.name,
    ) from error

from merit_optim.jax.compose import compose
from merit_optim.jax.directions import scale_by_adam, scale_by_muon
from merit_optim.jax.holds import Hold, add_cautious_decay, hold_sphere
from merit_optim.jax.presets import (
    lamb,
    lamb_uncorrected,
    maxlamb,
    merit,
    muon,
    muon_merit,
    muon_sphere,
    normuon,
    normuon_sphere,
)
from merit_optim.jax.ratios import scale_by_ratio
from merit_optim.jax.view import View

__all__ = [
    "Hold",
    "View",
    "add_cautious_decay",
    "compose",
    "hold_sphere",
    "lamb",
    "lamb_uncorrected",
    "maxlamb",
    "merit",
    "muon",
    "muon_merit",
    "muon_sphere",
    "normuon",
    "normuon_sphere",
    "scale_by_adam",
    "scale_by_muon",
    "scale_by_ratio",
]
