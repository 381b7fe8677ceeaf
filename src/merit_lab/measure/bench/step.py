"""Time and memory of an optimizer step, compared with the alternatives.

    merit bench step [--models gpt2-small ...] [--device cuda] [--out results.json]

Gradients and weights are random, with the shapes of GPT-2 and Llama, in float32. Contestants are timed one
after the other in one process, so that all ratios come from one machine in one state. Times are medians, with
the spread beside them. On a GPU ``ms`` is the time between events around a step when the queue is full,
``host`` the CPU time of the call, ``graph`` the time of a CUDA graph's replay. On a CPU ``ms`` is wall-clock
time.

``worst`` is the 95th percentile of the steps, or the slowest of fewer than twenty: about the cost of a step
that occurs once in ten. SOAP improves its bases in cycles of ten steps, and whole cycles are timed. Muon and
SOAP have AdamW for the rest. A floor is the time to move the necessary bytes at the speed of a copy, and to
compute the products of Newton-Schulz at the speed of a large product in bfloat16; both speeds are measured
first. Below the floors is the time of Newton-Schulz alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import merit_optim
from merit_lab.measure.bench import timing
from merit_lab.measure.bench.contestants import BenchContestant, on_cpu, on_cuda
from merit_lab.measure.bench.floor import floors_of
from merit_lab.measure.bench.newton_schulz import NewtonSchulz, measure_newton_schulz
from merit_lab.measure.bench.options import add_options, count
from merit_lab.measure.bench.shapes import WEIGHTS, Parameters, WeightSpec
from merit_optim.optim.engines.eager import limits


@dataclass
class StepTiming:
    """The times of a contestant's step in milliseconds, and its temporary memory in MiB."""

    model: str
    contestant: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    worst_ms: float
    num_steps: int
    temporary_mib: float | None = None
    host_ms: float | None = None
    graph_ms: float | None = None
    graph_refused: str | None = None
    """Why the step could not be captured."""


def measure(contestant: BenchContestant, params: Parameters, model: str, seconds: float) -> StepTiming:
    """Time one contestant for ``seconds``, at least five steps and three of its cycles."""
    device = params.all[0].device
    optimizer = contestant.make(params)
    step: Callable[[], object] = torch.compile(optimizer.step) if contestant.compiled else optimizer.step

    def run() -> None:
        if contestant.clip:
            clip_grad_norm_(params.all, 1.0, foreach=True)
        step()

    for _ in range(3):
        run()
    times = timing.step_times(run, seconds, device, contestant.cycle)
    result = StepTiming(
        model,
        contestant.name,
        median_ms=timing.median(times),
        fastest_ms=times[0],
        slowest_ms=times[-1],
        worst_ms=timing.worst(times),
        num_steps=len(times),
    )
    if device.type == "cuda":
        result.host_ms = timing.host_time(run)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        result.temporary_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        if contestant.graph:
            try:
                result.graph_ms = timing.graph_time(optimizer, seconds, device)
            except RuntimeError as error:  # the other times are still valid
                result.graph_refused = _first_line(error)
    else:
        result.temporary_mib = timing.peak_growth(run)
    return result


def environment(device: torch.device) -> dict[str, Any]:
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    )
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "merit_optim": merit_optim.__version__,
        "python": platform.python_version(),
        "copy_tb_s": timing.copy_bandwidth(device),
        "matrix_tflop_s": timing.matrix_rate(device),
    }


def show_head(model: str, total: int) -> None:
    head = f"{'ms':>9} {'ratio':>6} {'worst':>9} {'spread':>19} {'host':>7} {'graph':>7} {'temporary':>10}"
    print(
        f"\n{model}: {total / 1e6:.1f}M parameters in float32; ratios to the first\n  {'':40} {head}",
        flush=True,
    )


def show(r: StepTiming, baseline: float) -> None:
    """Print the row of a contestant, with its ratio to the time of the first one."""
    spread = f"{r.fastest_ms:.3f}..{r.slowest_ms:.3f}"
    host, graph = (f"{x:.3f}" if x is not None else "" for x in (r.host_ms, r.graph_ms))
    graph = "refused" if r.graph_refused else graph
    temporary = f"{r.temporary_mib:.1f} MiB" if r.temporary_mib is not None else ""
    times = f"{r.median_ms:9.3f} {r.median_ms / baseline:6.2f} {r.worst_ms:9.3f}"
    print(f"  {r.contestant:40} {times} {spread:>19} {host:>7} {graph:>7} {temporary:>10}", flush=True)


def show_floors(floors: list[dict[str, Any]], baseline: float) -> None:
    for floor in floors:
        name, least = f"floor, {floor['what']}", floor["ms"]
        print(f"  {name:40} {least:9.3f} {least / baseline:6.2f}", flush=True)


def show_newton_schulz(measured: NewtonSchulz) -> None:
    print(
        f"  {f'newton-schulz alone, {measured.num_matrices} matrices':40} {measured.median_ms:9.3f} ms, "
        f"{measured.tflop_s:.3g} TFLOP/s, {measured.share:.0%} of a large product's",
        flush=True,
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="merit bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=WEIGHTS,
        default=["gpt2-small"],
        metavar="MODEL",
        help=f"of {', '.join(WEIGHTS)} (gpt2-small); tiny is not the tiny of `merit train`",
    )
    parser.add_argument("--only", help="time only contestants whose name contains this")
    parser.add_argument("--without", help="leave out contestants whose name contains this")
    parser.add_argument("--piece", type=count, help="elements in a block of the eager engine on a CPU")
    add_options(parser, seconds=2.0, unit="contestant")
    args = parser.parse_args(argv)

    if args.piece:
        limits.PIECE_ELEMENTS_CPU = args.piece
    device: torch.device = args.device
    contestants = on_cuda() if device.type == "cuda" else on_cpu()
    chosen = [
        contestant for contestant in contestants if _is_chosen(contestant.name, args.only, args.without)
    ]
    if not chosen:
        names = "; ".join(contestant.name for contestant in contestants)
        parser.error(f"--only and --without leave no contestant; choose from: {names}")
    record: dict[str, Any] = {"environment": environment(device)}
    record |= {section: [] for section in ("results", "left_out", "floors", "newton_schulz")}
    machine = record["environment"]
    speeds = f"copy {machine['copy_tb_s']:.3f} TB/s, matrix product {machine['matrix_tflop_s']:.3f} TFLOP/s"
    print(f"{machine['device']}, torch {torch.__version__}, {speeds}", flush=True)
    for model in args.models:
        _time_model(model, WEIGHTS[model], chosen, record, args)


def _time_model(
    model: str,
    weights: list[WeightSpec],
    contestants: list[BenchContestant],
    record: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Time the contestants with one model, print the results and add them to the record."""
    device: torch.device = args.device
    copy_tb_s, matrix_tflop_s = (record["environment"][rate] for rate in ("copy_tb_s", "matrix_tflop_s"))
    total = sum(weight.num_elements for weight in weights)
    left_out = {one.name: reason for one in contestants if (reason := one.left_out(weights)) is not None}
    fitting = [contestant for contestant in contestants if contestant.name not in left_out]
    params = Parameters.of(weights if fitting else [], device)
    results: list[StepTiming] = []
    if fitting:
        show_head(model, total)
    for place, contestant in enumerate(fitting, start=1):
        with _saying(f"  {contestant.name} ({place} of {len(fitting)}) ..."):
            try:
                results.append(measure(contestant, params, model, args.seconds))
            except Exception as error:  # out of memory, or in another library: time the others anyway
                left_out[contestant.name] = _first_line(error)
        if contestant.name not in left_out:
            show(results[-1], results[0].median_ms)
            record["results"].append(asdict(results[-1]) | {"num_elements": total})
            _write(record, args)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    record["left_out"] += [
        {"model": model, "contestant": name, "reason": reason} for name, reason in left_out.items()
    ]
    if results:
        floors = [
            {"model": model, **asdict(floor), "ms": floor.milliseconds(copy_tb_s, matrix_tflop_s)}
            for floor in floors_of(weights)
        ]
        record["floors"] += floors
        show_floors(floors, results[0].median_ms)
    else:
        print(f"\n{model}: none of the chosen contestants could be timed")
    if any(contestant.direction == "muon" for contestant in fitting):
        newton_schulz = measure_newton_schulz(params, model, args.seconds, matrix_tflop_s)
        record["newton_schulz"].append(asdict(newton_schulz))
        show_newton_schulz(newton_schulz)
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name in left_out if left_out[name] == reason]
        print(f"  left out, {reason}: {'; '.join(names)}", flush=True)
    _write(record, args)


@contextlib.contextmanager
def _saying(text: str) -> Iterator[None]:
    """Show a line in a terminal while something runs; compilation may take a minute."""
    if sys.stdout.isatty():
        print(text, end="", flush=True)
    try:
        yield
    finally:
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)


def _first_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _write(record: dict[str, Any], args: argparse.Namespace) -> None:
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def _is_chosen(name: str, only: str | None, without: str | None) -> bool:
    name = name.lower()
    return (only is None or only.lower() in name) and (without is None or without.lower() not in name)
