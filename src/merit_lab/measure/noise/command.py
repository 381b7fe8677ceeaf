"""`merit batch-size`: estimate from the gradient noise scale which batch size is still worthwhile."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.command_line import rules
from merit_lab.measure.noise.measure import MeasuredScale, NoiseConfig, measure_noise_scale
from merit_lab.measure.noise.scale import relative_steps, relative_tokens
from merit_lab.runs import Run, RunInUse
from merit_lab.tables import Table, print_table
from merit_lab.train.checkpoint_files import steps_of
from merit_lab.train.signals import Interrupted

_AROUND = 3  # doublings of the batch shown on either side of the noise scale


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure the gradient noise scale at a checkpoint of a run, and print what batch sizes around it cost.
    The scale grows as the loss falls, so a late checkpoint allows larger batches than an early one."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    config: Annotated[NoiseConfig, tyro.conf.arg(name="")]
    checkpoint: int | None = None
    """Step of the checkpoint. None: the newest."""
    along: bool = False
    """Measure at every checkpoint of the run, to see how the scale grew during training."""
    data: Path | None = None
    """Current folder of the run's data, if they have moved."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""
    try:
        arguments = tyro.cli(
            Arguments,
            default=Arguments(run=tyro.MISSING, config=NoiseConfig()),
            args=list(argv),
            prog="merit batch-size",
            registry=rules(),
        )
        steps = _steps(arguments)
        measurements = [
            measure_noise_scale(arguments.run, arguments.config, step=step, data=arguments.data)
            for step in steps
        ]
    except Interrupted as interrupted:
        print(f"merit batch-size: {interrupted}", file=sys.stderr)
        return 128 + interrupted.signum
    except (OSError, ValueError, ArithmeticError, RunInUse) as error:
        print(f"merit batch-size: {error}", file=sys.stderr)
        return 1
    if arguments.along:
        print_growth(measurements)
        print()
    print(f"{describe(measurements[-1])}\n")
    print_batches(measurements[-1])
    print(f"\nThe results: {measurements[-1].path.parent if arguments.along else measurements[-1].path}")
    return 0


def _steps(arguments: Arguments) -> list[int | None]:
    if not arguments.along:
        return [arguments.checkpoint]
    if arguments.checkpoint is not None:
        raise ValueError(
            f"--checkpoint {arguments.checkpoint} selects one checkpoint and --along all of them; give one "
            "of the two"
        )
    run = Run.open(arguments.run)
    steps: list[int | None] = [*steps_of(run.checkpoints)]
    return steps or [None]  # None raises the error about missing checkpoints


def describe(measured: MeasuredScale) -> str:
    """Describe what the scale means for the batch size, in a few sentences."""
    low, high = measured.scale.interval
    value = measured.scale.value
    if math.isinf(value):
        lower = f"it is above {_count(low)} sequences" if low < math.inf else "nothing can be said about it"
        return (
            f"After step {measured.step} no signal can be seen in the gradients, so the noise scale is not "
            f"determined; {lower}. Measure with more batches, or larger ones."
        )
    between = f"{_count(low)} to {_count(high)}" if high < math.inf else f"above {_count(low)}"
    steps = relative_steps(measured.batch, value) / relative_steps(2 * measured.batch, value)
    tokens = relative_tokens(2 * measured.batch, value) / relative_tokens(measured.batch, value)
    return (
        f"After step {measured.step} the noise scale is {_count(value)} sequences ({between} with two "
        f"standard errors), or {_count(value * measured.context)} tokens. Twice the run's batch of "
        f"{measured.batch} would save {1 - 1 / steps:.0%} of the steps and cost {tokens - 1:.0%} more tokens."
    )


def print_growth(measurements: Sequence[MeasuredScale]) -> None:
    """Print the scale at each checkpoint, with the range of two standard errors."""
    rows = []
    for measured in measurements:
        value = measured.scale.value
        limits = [_count(limit) for limit in measured.scale.interval]
        rows.append((f"{measured.step:,}", _count(value), *limits, _count(value * measured.context)))
    print_table(Table(("Step", "Noise scale", "from", "to", "in tokens"), tuple(rows), num_text=0))


def print_batches(measured: MeasuredScale) -> None:
    """Print the cost of batch sizes around the scale, with the uncertainty from the scale's error."""
    low, high = measured.scale.interval
    centre = measured.scale.value if math.isfinite(measured.scale.value) else low
    if math.isinf(centre):
        return
    rows = []
    nearest = max(0, round(math.log2(centre)))
    for power in range(max(0, nearest - _AROUND), nearest + _AROUND + 1):
        batch = 2**power
        steps = _range(relative_steps(batch, low), relative_steps(batch, high))
        tokens = _range(relative_tokens(batch, high), relative_tokens(batch, low))
        rows.append((f"{batch:,}", f"{batch * measured.context:,}", steps, tokens))
    head = ("Batch", "Tokens per batch", "Steps / fewest", "Tokens / fewest")
    print_table(Table(head, tuple(rows), num_text=0))


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"above {low:.2f}"
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _count(value: float) -> str:
    """Round to three significant digits."""
    if math.isinf(value):
        return "infinity"
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{round(value, digits):,.{max(0, digits)}f}"
