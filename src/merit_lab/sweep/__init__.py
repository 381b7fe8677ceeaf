"""Train on grids of learning rates and other settings, and find the best values."""
