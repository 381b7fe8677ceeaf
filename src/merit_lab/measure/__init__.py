"""Measurements of trained runs: columns added to the table of runs."""
