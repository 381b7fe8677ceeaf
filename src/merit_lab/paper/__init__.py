"""Reproduce figures and tables of the paper, each with one command and a computed verdict."""
