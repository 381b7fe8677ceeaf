"""`merit curvature`: measure the Hessian of the training loss at a checkpoint of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.command_line import rules
from merit_lab.measure.curvature.measure import Curvature, CurvatureConfig, measure_curvature
from merit_lab.tables import Table, print_table
from merit_lab.train.signals import Interrupted


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure the curvature of the training loss at a checkpoint of a run: the largest eigenvalues of its
    Hessian, its trace and, optionally, its spectral density. The results go into the run directory;
    existing ones are not measured again."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    config: Annotated[CurvatureConfig, tyro.conf.arg(name="")]
    checkpoint: int | None = None
    """Step of the checkpoint. None: the newest."""
    data: Path | None = None
    """The folder of the run's data, if it has moved."""
    micro_batch: int | None = None
    """Sequences in one pass. None: found by trial on CUDA, 16384 tokens on a CPU."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""
    try:
        arguments = tyro.cli(
            Arguments,
            default=Arguments(run=tyro.MISSING, config=CurvatureConfig()),
            args=list(argv),
            prog="merit curvature",
            registry=rules(),
        )
        curvature = measure_curvature(
            arguments.run,
            arguments.config,
            step=arguments.checkpoint,
            data=arguments.data,
            micro_batch=arguments.micro_batch,
        )
    except Interrupted as interrupted:
        print(f"merit curvature: {interrupted}. Run the same command again to continue.", file=sys.stderr)
        return 128 + interrupted.signum
    except (OSError, ValueError, ArithmeticError, RuntimeError, ModuleNotFoundError) as error:
        print(f"merit curvature: {error}", file=sys.stderr)
        return 1
    print_curvature(curvature)
    print(f"\nThe results are in {curvature.path}")
    return 0


def print_curvature(curvature: Curvature) -> None:
    """Print a table of the measurements."""
    parts = curvature.parts
    rows = [("loss", f"{parts['loss']['value']:.4f}", "")]
    if "eigenvalues" in parts:
        pairs = zip(parts["eigenvalues"]["values"], parts["eigenvalues"]["residuals"], strict=True)
        for place, (value, residual) in enumerate(pairs, start=1):
            rows.append((f"eigenvalue {place}", f"{value:.5g}", f"{residual:.2g}"))
    if "trace" in parts:
        trace = parts["trace"]
        rows.append(("trace", f"{trace['value']:.5g}", f"{trace['standard_error']:.2g}"))
    if "density" in parts:
        nodes = [node for probe in parts["density"]["nodes"] for node in probe]
        rows.append(("smallest eigenvalue seen", f"{min(nodes):.5g}", ""))
        rows.append(("weight below zero", f"{_share_below_zero(parts['density']):.1%}", ""))
    print_table(Table((f"Step {curvature.step}", "Value", "Error"), tuple(rows)))


def _share_below_zero(density: dict[str, list[list[float]]]) -> float:
    """Return the negative share of the spectrum, by the density's quadrature."""
    pairs = [
        pair
        for probe in zip(density["nodes"], density["weights"], strict=True)
        for pair in zip(*probe, strict=True)
    ]
    return sum(weight for node, weight in pairs if node < 0) / len(density["nodes"])
