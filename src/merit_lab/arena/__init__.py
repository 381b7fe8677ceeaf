"""Tune several optimizers with the same budget, and rank them on a leaderboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from

if TYPE_CHECKING:
    from merit_lab.arena.plan import Arena
    from merit_lab.arena.work import contest

__all__ = ["Arena", "contest"]

__getattr__ = load_from(__name__, {"Arena": "plan", "contest": "work"})
