"""The curvature of the loss at a checkpoint: the Hessian's eigenvalues, trace and spectral density."""

from merit_lab.curvature.density import Spectrum, spectral_density
from merit_lab.curvature.eigenvalues import Eigenvalues, top_eigenvalues
from merit_lab.curvature.hessian import Hessian, hessian_vector_product
from merit_lab.curvature.measure import Curvature, CurvatureConfig, measure_curvature
from merit_lab.curvature.trace import Trace, hutchinson_trace

__all__ = [
    "Curvature",
    "CurvatureConfig",
    "Eigenvalues",
    "Hessian",
    "Spectrum",
    "Trace",
    "hessian_vector_product",
    "hutchinson_trace",
    "measure_curvature",
    "spectral_density",
    "top_eigenvalues",
]
