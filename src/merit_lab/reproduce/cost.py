"""What entries cost before they are run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from merit_lab.reproduce.corpus import Corpus
from merit_lab.reproduce.entry import Entry
from merit_lab.reproduce.records import plan
from merit_lab.reproduce.scale import Scale
from merit_lab.study import cost
from merit_lab.study.cost import UTILISATION, Cost, Speed
from merit_lab.train.parallel import Ranks
from merit_lab.train.speed import peak_flops

_REFERENCE_GPU = "H100"


def cost_of(
    entries: Sequence[Entry],
    scale: Scale,
    seeds: int | None,
    *,
    folder: Path | None = None,
    corpus: Corpus | None = None,
) -> Cost:
    """What entries cost together, without what is there.

    What is there can be told only where the data are known, since runs with other data are other runs.

    Args:
        entries: the entries.
        scale: their scale.
        seeds: seeds of every run; None for the scale's own.
        folder: where the runs lie.
        corpus: the data of the runs.
    """
    trials = [trial for own in entries for trial in own.trials(scale, own.num_seeds(scale, seeds))]
    if folder is None or corpus is None:
        return Cost.of((trial.config, 0) for trial in trials)
    return Cost.of_trials(own for _, own in plan(trials, folder, corpus))


def find_speed(scale: Scale) -> Speed:
    """This machine's speed for a scale; for a large one without a GPU, that of a GPU."""
    if scale.is_large and Ranks.join().device.type != "cuda":
        peak = peak_flops(_REFERENCE_GPU)
        assert peak is not None
        words = f"stated: {UTILISATION:.0%} of the peak of one {_REFERENCE_GPU}"
        return Speed(UTILISATION * peak, 1, words)
    return cost.find_speed(scale.trial(scale.gpt2[0], "adamw", 0).config)
