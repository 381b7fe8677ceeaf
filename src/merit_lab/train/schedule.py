"""Learning-rate schedules: linear warm-up, then cosine decay or a linear decay in the last steps."""

from __future__ import annotations

import math


def warmup_steps(warmup: float, steps: int) -> int:
    """The number of steps that warm up: at least one if the share is above 0."""
    return max(1, round(warmup * steps)) if warmup > 0 else 0


def learning_rate(
    step: int, *, steps: int, peak: float, warmup: float, final: float, decay: float | None = None
) -> float:
    """Return the learning rate of a step, counted from 0.

    Args:
        step: which step, from 0 to ``steps - 1``.
        steps: length of the run.
        peak: highest rate, reached by the last step of the warm-up.
        warmup: share of the steps that warm up; at least one step if it is above 0.
        final: share of the peak at the last step.
        decay: share of the steps with linear decay; None for a cosine.

    Example:
        >>> [round(learning_rate(s, steps=5, peak=1.0, warmup=0.2, final=0.1), 3) for s in range(5)]
        [1.0, 0.868, 0.55, 0.232, 0.1]
        >>> [round(learning_rate(s, steps=5, peak=1.0, warmup=0, final=0.1, decay=0.4), 3) for s in range(5)]
        [1.0, 1.0, 1.0, 0.55, 0.1]
    """
    warming = warmup_steps(warmup, steps)
    if step < warming:
        return peak * (step + 1) / warming
    # The last step before the decay has the peak; without a warm-up, the first step has it.
    last_at_peak = max(warming - 1, 0)
    if decay is not None:
        last_at_peak = max(last_at_peak, steps - 1 - round(decay * steps))
    progress = max(0, step - last_at_peak) / max(1, steps - 1 - last_at_peak)
    left = 1 - progress if decay is not None else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (final + (1 - final) * left)
