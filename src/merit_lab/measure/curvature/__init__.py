"""The curvature of the loss at a checkpoint: the Hessian's eigenvalues, trace and spectral density."""
