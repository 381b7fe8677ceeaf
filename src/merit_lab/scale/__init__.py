"""Steps to a target loss against the batch size, and a fit of the critical batch."""
