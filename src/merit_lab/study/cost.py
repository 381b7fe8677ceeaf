"""Estimated cost of runs: tokens, floating-point operations, and time on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from merit_lab.models import build
from merit_lab.models.names import work_per_token
from merit_lab.study.trial import Trial
from merit_lab.text import amount
from merit_lab.train import TrainConfig
from merit_lab.train.parallel import Ranks
from merit_lab.train.reports import peak_flops

UTILISATION = 0.4  # of a GPU's peak; GPT-2 small reaches 0.46 on an H200 (docs/performance.md)
_TOKENS_TO_MEASURE = 4096  # a second on a CPU for a model of 10M parameters
_SECONDS_TO_MEASURE = 1.0
_BESIDES_STEPS = 1.3  # validation, observations, checkpoints, start


@dataclass(frozen=True)
class Speed:
    """Floating-point operations per second of all devices together, and the source of the number."""

    flops: float
    num_gpus: int
    source: str


@dataclass(frozen=True)
class Cost:
    """Remaining work of some runs."""

    num_runs: int
    """All of them, including those that are done."""
    num_left: int
    tokens: int
    """Tokens to train on."""
    flops: float
    """Those of training."""

    @classmethod
    def of(cls, runs: Iterable[tuple[TrainConfig, int]]) -> Cost:
        """The cost of runs, each given with its number of completed steps."""
        left = [(config, (config.steps or 0) - done) for config, done in runs]
        tokens = [config.batch * config.model.context * steps for config, steps in left]
        work = [work_per_token(config.model) * num for (config, _), num in zip(left, tokens, strict=True)]
        return cls(len(left), sum(steps > 0 for _, steps in left), sum(tokens), sum(work))

    def seconds(self, speed: Speed) -> float:
        """Time of the runs, one after the other."""
        return self.flops * _BESIDES_STEPS / speed.flops

    def gpu_hours(self, speed: Speed) -> float:
        """Number of GPUs times hours."""
        return self.seconds(speed) * speed.num_gpus / 3600


def estimate(trials: Sequence[Trial]) -> str:
    """The remaining work of trials and its approximate time here, as text; empty if all are done."""
    runs = [(trial.config, trial.steps_done) for trial in trials]
    cost = Cost.of(runs)
    if not cost.num_left:
        return ""
    speed = find_speed(max((config for config, _ in runs), key=lambda config: work_per_token(config.model)))
    count = "1 run" if cost.num_left == 1 else f"{cost.num_left} runs"
    return f"{count}, {amount(cost.tokens)} tokens in all: about {duration(cost.seconds(speed))} here"


def find_speed(config: TrainConfig) -> Speed:
    """This machine's speed with a model: from the GPU's data sheet, or measured for one second."""
    ranks = Ranks.join()
    if ranks.device.type == "cuda":
        name = torch.cuda.get_device_name(ranks.device)
        if peak := peak_flops(name):
            source = f"stated: {UTILISATION:.0%} of the peak of {ranks.size} x {name}"
            return Speed(UTILISATION * peak * ranks.size, ranks.size, source)
    return _measured(config, ranks)


def duration(seconds: float) -> str:
    """Format a duration: 40 s, 12 min, 3.5 h, 5 days; at least 1 s."""
    if seconds < 90:
        return f"{max(1, seconds):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _measured(config: TrainConfig, ranks: Ranks) -> Speed:
    with torch.random.fork_rng():
        model = build(config.model).to(ranks.device)
        num_sequences = max(1, min(config.batch, _TOKENS_TO_MEASURE // config.model.context))
        shape = (num_sequences, config.model.context + 1)
        tokens = torch.randint(config.model.vocab_size, shape, device=ranks.device)
    best = float("inf")
    begun = time.monotonic()
    while time.monotonic() - begun < _SECONDS_TO_MEASURE:
        before = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - before)
    flops = work_per_token(config.model) * tokens[:, 1:].numel() / best
    return Speed(flops, int(ranks.device.type == "cuda"), "measured here just now")
