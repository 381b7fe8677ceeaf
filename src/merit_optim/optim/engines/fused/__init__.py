"""The fused engine: the whole model in two launches on a CUDA GPU. Needs Triton."""
