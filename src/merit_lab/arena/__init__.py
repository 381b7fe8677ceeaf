"""Which optimizer is best, if all are tuned alike: searches, seeds, and a leaderboard."""

from merit_lab.arena.plan import Arena
from merit_lab.arena.work import contest

__all__ = ["Arena", "contest"]
