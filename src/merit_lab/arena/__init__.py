"""Tune several optimizers with the same budget, and rank them on a leaderboard."""
