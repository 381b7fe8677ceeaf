"""Train one configuration with several optimizers and seeds, and report."""
