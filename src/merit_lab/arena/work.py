"""Carry out an arena, from its plan to its page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from merit_lab.arena.page import make_page
from merit_lab.arena.plan import Arena
from merit_lab.study import Conclusion, Round, run_study
from merit_lab.study.page import Page


@dataclass(frozen=True)
class Contest:
    """An arena as a study."""

    arena: Arena

    @property
    def folder(self) -> Path:
        return self.arena.folder

    def next(self) -> Round | None:
        return self.arena.next()

    def findings(self) -> Page:
        return make_page(self.arena)


def contest(arena: Arena, jobs: int = 1) -> Conclusion | None:
    """Tune and train all contestants, print the standings, and write the page into ``folder``/report."""
    return run_study(Contest(arena), jobs)
