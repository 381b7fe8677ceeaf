"""Run after run in one process, on one compiled model: a later run costs what its steps cost."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

from merit_lab.runs import Run
from merit_lab.train.config import TrainConfig
from merit_lab.train.kept import Kept, can_be_reused
from merit_lab.train.loop import train
from merit_lab.train.parallel import Ranks
from merit_lab.train.signals import Interrupted
from merit_lab.train.start import Resume


class Pool:
    """Trains runs one after the other, each with the bits of a run alone on a CPU.

    Runs of one shape share the model, its compiled code, its micro-batch and the tokens on the device. To
    observe attention takes another graph, so it is observed only if a run asks for it: where a configuration
    leaves the intervals of attention and entropy open, they are 0.

    Example:
        pool = Pool()
        for seed in range(5):
            pool.train(replace(config, seed=seed), folder / f"seed{seed}")
    """

    def __init__(self) -> None:
        self._kept = Kept(tokens_on_device=True)
        self._has_told = False

    def train(self, config: TrainConfig, folder: Path | str, *, resume: Resume = "auto") -> Run:
        """Train a run, or resume it; see :func:`merit_lab.train.train`."""
        config = as_in_pool(config)
        if not (self._has_told or can_be_reused(config, ranks := Ranks.join())):
            self._has_told = True
            if ranks.is_first:
                why = "models of transformers" if ranks.size == 1 else "models on several ranks"
                print(f"{why} are built anew for every run: they cannot be reused", file=sys.stderr)
        try:
            return train(config, folder, resume=resume, kept=self._kept)
        except Interrupted:
            raise
        except BaseException:  # nobody knows the state of what a failed run has used
            self._kept = Kept(tokens_on_device=True)
            raise
        finally:
            gc.collect()  # the memory of this run's optimizer is for that of the next


def as_in_pool(config: TrainConfig) -> TrainConfig:
    """Return a configuration that observes attention only where it was asked to."""
    measure = config.measure
    every: Any = {name: 0 for name in ("attention_every", "entropy_every") if getattr(measure, name) is None}
    return dataclasses.replace(config, measure=dataclasses.replace(measure, **every))
