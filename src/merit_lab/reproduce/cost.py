"""What entries cost before they are run: runs, tokens, operations, and time on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from merit_lab.models import build
from merit_lab.models.source import work_per_token
from merit_lab.reproduce.corpus import Corpus
from merit_lab.reproduce.entry import Entry
from merit_lab.reproduce.records import plan
from merit_lab.reproduce.scale import Scale
from merit_lab.study.trial import Trial
from merit_lab.study.workers import is_done, last_step
from merit_lab.train import TrainConfig
from merit_lab.train.parallel import Ranks
from merit_lab.train.speed import peak_flops

_UTILISATION = 0.4  # of a GPU's peak; GPT-2 small reaches 0.46 on an H200 (docs/performance.md)
_REFERENCE_GPU = "H100"
_TOKENS_TO_MEASURE = 4096  # a second on a CPU for a model of 10M parameters
_BESIDES_STEPS = 1.3  # validation, observations, checkpoints, start


@dataclass(frozen=True)
class Speed:
    """Floating-point operations a second, of all devices together, and where the number comes from."""

    flops: float
    num_gpus: int
    source: str


@dataclass(frozen=True)
class Cost:
    """What is left to do of some runs, each counted once."""

    num_runs: int
    """All of them, also those that are done."""
    num_left: int
    tokens: int
    flops: float

    @classmethod
    def of(cls, runs: Iterable[tuple[TrainConfig, int]]) -> Cost:
        """The cost of runs, each with the number of its steps that are done already."""
        distinct = {config.fingerprint: (config, done) for config, done in runs}.values()
        steps = [(config, (config.steps or 0) - done) for config, done in distinct]
        tokens = [(config, config.batch * config.model.context * left) for config, left in steps]
        return cls(
            num_runs=len(steps),
            num_left=sum(left > 0 for _, left in steps),
            tokens=sum(count for _, count in tokens),
            flops=float(sum(work_per_token(config.model) * count for config, count in tokens)),
        )

    def seconds(self, speed: Speed) -> float:
        """How long the runs take, one after the other."""
        return self.flops * _BESIDES_STEPS / speed.flops

    def gpu_hours(self, speed: Speed) -> float:
        """GPUs times hours."""
        return self.seconds(speed) * speed.num_gpus / 3600


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
    return Cost.of((own.config, _steps_done(own)) for _, own in plan(trials, folder, corpus))


def _steps_done(run: Trial) -> int:
    """A run that diverged will not be repeated, so it is done as well."""
    return (run.config.steps or 0) if is_done(run.folder) else last_step(run)[0]


def find_speed(scale: Scale) -> Speed:
    """This machine's speed for a scale: from a GPU's data sheet, or a second's work on a CPU."""
    ranks = Ranks.join()
    if ranks.device.type == "cuda":
        name = torch.cuda.get_device_name(ranks.device)
        if peak := peak_flops(name):
            words = f"stated: {_UTILISATION:.0%} of the peak of {ranks.size} x {name}"
            return Speed(_UTILISATION * peak * ranks.size, ranks.size, words)
    if scale.is_large:
        peak = peak_flops(_REFERENCE_GPU)
        assert peak is not None
        words = f"stated: {_UTILISATION:.0%} of the peak of one {_REFERENCE_GPU}"
        return Speed(_UTILISATION * peak, 1, words)
    return _measured(scale, ranks)


def _measured(scale: Scale, ranks: Ranks) -> Speed:
    setting = scale.gpt2[0]
    with torch.random.fork_rng():
        model = build(setting.model).to(ranks.device)
        num_sequences = max(1, min(setting.batch, _TOKENS_TO_MEASURE // setting.model.context))
        shape = (num_sequences, setting.model.context + 1)
        tokens = torch.randint(setting.model.vocab_size, shape, device=ranks.device)
    best = float("inf")
    begun = time.monotonic()
    while time.monotonic() - begun < 1.0:
        before = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - before)
    flops = work_per_token(setting.model) * tokens[:, 1:].numel() / best
    return Speed(flops, int(ranks.device.type == "cuda"), "measured here just now")
