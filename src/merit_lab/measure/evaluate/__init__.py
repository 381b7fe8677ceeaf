"""Zero-shot evaluation of a run's checkpoint with lm-eval, and its export to Hugging Face's format."""
