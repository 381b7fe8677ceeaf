"""Run directories, and files of kept runs. Only this package reads and writes them."""

from merit_lab.runs.environment import differences, environment
from merit_lab.runs.find import archive_of
from merit_lab.runs.journal import Journal, NotWritten, import_wandb
from merit_lab.runs.kept import folders_left_out, nested_run_folders, run_folders
from merit_lab.runs.lock import RunInUse, is_locked, lock
from merit_lab.runs.measurements import Measurements
from merit_lab.runs.metrics import MetricsWriter, as_json, keep_nan, read_metrics
from merit_lab.runs.run import (
    FORMAT,
    OVER,
    Run,
    Status,
    has_all_steps,
    holds_run,
    outcome_of,
    refuse_run,
    step_path,
)

__all__ = [
    "FORMAT",
    "OVER",
    "Journal",
    "Measurements",
    "MetricsWriter",
    "NotWritten",
    "Run",
    "RunInUse",
    "Status",
    "archive_of",
    "as_json",
    "differences",
    "environment",
    "folders_left_out",
    "has_all_steps",
    "holds_run",
    "import_wandb",
    "is_locked",
    "keep_nan",
    "lock",
    "nested_run_folders",
    "outcome_of",
    "read_metrics",
    "refuse_run",
    "run_folders",
    "step_path",
]
