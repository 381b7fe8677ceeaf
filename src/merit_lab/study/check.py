"""Refuse trials that cannot be trained before the first one is, by the checks of training itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cache

from merit_lab.data import Dataset
from merit_lab.study.state import is_done
from merit_lab.study.trial import Trial
from merit_lab.train.parallel import Ranks
from merit_lab.train.start import check_run


def check_trials(trials: Iterable[Trial], ranks: Ranks) -> None:
    """Raise ValueError, with its name, if a trial that is not done cannot be trained on these ranks."""
    dataset_in = cache(Dataset.open)  # whose files are read once for all trials
    checked = set()
    for trial in trials:
        config = dataclasses.replace(trial.config, seed=0)  # a seed changes nothing here
        if config in checked or is_done(trial.folder):
            continue
        try:
            check_run(config, dataset_in(config.data), ranks)
        except ValueError as error:
            raise ValueError(f"the run {trial.folder.name} cannot be trained: {error}") from error
        checked.add(config)
