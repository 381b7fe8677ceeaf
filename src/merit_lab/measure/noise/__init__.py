"""The gradient noise scale: up to which batch size a larger batch saves steps."""
