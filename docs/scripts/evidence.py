"""Writes the tables and pictures of README.md, docs/results.md and docs/results/ from the records.

    python docs/scripts/evidence.py

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`; TABLES has the function of each name.
tests/test_results.py fails where a page or a picture differs from what the records give.
"""

import re
from collections.abc import Callable

import evidence_choosing
import evidence_large as large
import evidence_paper as paper
import evidence_small as small
import evidence_texts as texts
from evidence_runs import ROOT

from merit_lab.tables import Table

PAGES = (
    "README.md",
    "docs/choosing.md",
    "docs/results.md",
    "docs/paper-results.md",
    *sorted(f"docs/results/{path.name}" for path in ROOT.glob("docs/results/*.md")),
)
TABLES: dict[str, Callable[[], Table]] = {
    "choosing": evidence_choosing.choosing,
    "headline": texts.headline,
    "above": texts.above,
    "texts": lambda: texts.tried(200),
    "texts-800": lambda: texts.tried(800),
    "splitting": texts.splitting,
    "tuned": large.tuned,
    "budgets": large.budgets,
    "batches": large.batches,
    "critical": lambda: small.critical("sizes/scale-defaults", 2.4),
    "critical-10m": lambda: small.critical("directions/10m-scale", 4.3),
    "longer": lambda: large.longer("10M"),
    "longer-98m": lambda: large.longer("98M"),
    "zero-shot": large.zero_shot,
    "drift": small.drift,
    "rates": large.rates,
    "rest-grid": large.rest_rates,
    "sizes": small.sizes,
    "entropies": large.entropies,
    "parts": large.parts,
    "bounds": large.bounds,
    "equal-rows": large.equal_rows,
    "decays": small.variants,
    "soap-later": small.soap_later,
    "gpt2-small": lambda: small.comparison("gpt2-small"),
    "papers-batch": lambda: small.comparison("mix/98m-batch1024"),
    **paper.TABLES,
}


def with_tables(text: str) -> str:
    """A page with the tables that the records give."""

    def table(block: re.Match[str]) -> str:
        return f"{block[1]}\n{TABLES[block[2]]().markdown()}\n{block[3]}"

    return re.sub(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- /table -->)", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    texts.draw(ROOT / "docs/images/two-texts.svg")
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
