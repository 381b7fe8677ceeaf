"""Studies: questions that training runs answer, and the code that trains those runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from

if TYPE_CHECKING:
    from merit_lab.study.search import carry_out
    from merit_lab.study.trial import Trial

__all__ = ["Trial", "carry_out"]

__getattr__ = load_from(__name__, {"Trial": "trial", "carry_out": "search"})
