"""Run directories, and files of kept runs. Only this package reads and writes them."""

from merit_lab import durable
from merit_lab.runs.environment import differences, environment
from merit_lab.runs.journal import Journal, NotWritten, import_wandb
from merit_lab.runs.lock import RunInUse, is_locked, lock
from merit_lab.runs.measurements import Measurements
from merit_lab.runs.metrics import BEGINNING, Mark, MetricsWriter, read_metrics
from merit_lab.runs.run import (
    FORMAT,
    OVER,
    Run,
    Status,
    holds_run,
    outcome_of,
    refuse_run,
    step_path,
)

__all__ = [
    "BEGINNING",
    "FORMAT",
    "OVER",
    "Journal",
    "Mark",
    "Measurements",
    "MetricsWriter",
    "NotWritten",
    "Run",
    "RunInUse",
    "Status",
    "differences",
    "durable",
    "environment",
    "holds_run",
    "import_wandb",
    "is_locked",
    "lock",
    "outcome_of",
    "read_metrics",
    "refuse_run",
    "step_path",
]
