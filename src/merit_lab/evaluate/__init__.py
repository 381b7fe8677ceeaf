"""Zero-shot evaluation of a run's checkpoint with lm-eval, and its export to Hugging Face's format."""

from merit_lab.evaluate.evaluation import evaluate
from merit_lab.evaluate.export import export
from merit_lab.evaluate.sets import PAPER_SETS, SETS

__all__ = ["PAPER_SETS", "SETS", "evaluate", "export"]
