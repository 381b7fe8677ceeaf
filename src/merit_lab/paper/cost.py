"""Estimate what entries cost before they are run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from merit_lab.paper.corpus import CorpusIdentity
from merit_lab.paper.entry import PaperEntry
from merit_lab.paper.records import plan
from merit_lab.paper.setups import Scale
from merit_lab.study import cost
from merit_lab.study.cost import UTILISATION, Cost, Speed
from merit_lab.train.parallel import Ranks
from merit_lab.train.speed import peak_flops

_REFERENCE_GPU = "H100"


def cost_of(
    entries: Sequence[PaperEntry],
    scale: Scale,
    seeds: int | None,
    *,
    folder: Path | None = None,
    corpus: CorpusIdentity | None = None,
) -> Cost:
    """The cost of several entries, less the training already done.

    That is deducted only if the data are known, because runs on other data are different runs.

    Args:
        entries: the entries.
        scale: their scale.
        seeds: seeds of every entry; None for the scale's default.
        folder: the folder of the runs.
        corpus: the data of the runs.
    """
    wanted = (trial for entry in entries for trial in entry.trials(scale, entry.num_seeds(scale, seeds)))
    trials = list({trial.config.fingerprint: trial for trial in wanted}.values())  # entries share runs
    if folder is None or corpus is None:
        return Cost.of((trial.config, 0) for trial in trials)
    return Cost.of_trials(trial for _, trial in plan(trials, folder, corpus))


def find_speed(scale: Scale) -> Speed:
    """This machine's speed at a scale; for a large scale on a machine without a GPU, that of a GPU."""
    if scale.is_large and Ranks.join().device.type != "cuda":
        peak = peak_flops(_REFERENCE_GPU)
        assert peak is not None
        source = f"stated: {UTILISATION:.0%} of the peak of one {_REFERENCE_GPU}"
        return Speed(UTILISATION * peak, 1, source)
    return cost.find_speed(scale.trial(scale.gpt2[0], "adamw", 0).config)
