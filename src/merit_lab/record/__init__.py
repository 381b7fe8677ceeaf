"""The run directory, read and written here only."""

from merit_lab.record.environment import differences, environment
from merit_lab.record.excerpt import write_excerpt
from merit_lab.record.journal import Journal, import_wandb
from merit_lab.record.lock import RunInUse, is_locked, lock
from merit_lab.record.metrics import MetricsWriter, keep_nan, read_metrics
from merit_lab.record.run import FORMAT, Run, Status, holds_run, outcome_of, refuse_run

__all__ = [
    "FORMAT",
    "Journal",
    "MetricsWriter",
    "Run",
    "RunInUse",
    "Status",
    "differences",
    "environment",
    "holds_run",
    "import_wandb",
    "is_locked",
    "keep_nan",
    "lock",
    "outcome_of",
    "read_metrics",
    "refuse_run",
    "write_excerpt",
]
