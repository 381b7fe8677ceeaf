"""An arena from its plan to its findings."""

from __future__ import annotations

from merit_lab.arena.plan import Arena
from merit_lab.arena.write import Findings, write_findings
from merit_lab.report import print_table
from merit_lab.study import conduct
from merit_lab.train.parallel import Ranks


def hold(arena: Arena, jobs: int = 1) -> Findings | None:
    """Tune and train all contestants, print the standings, and write the findings into ``folder``/report.

    What is done stays done: the same call goes on after an interruption. Under torchrun only the first rank
    reports; the others return None.
    """
    ranks = Ranks.join()
    ranks.first(arena.check)
    conduct(arena, ranks, jobs)
    if not ranks.is_first:
        return None
    findings = write_findings(arena, arena.folder / "report")
    for table in findings.tables:
        print_table(table)
    return findings
