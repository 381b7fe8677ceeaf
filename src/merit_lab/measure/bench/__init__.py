"""Benchmarks of an optimizer's step on this machine, compared with the alternatives."""
