"""How long an optimizer step takes, and how much memory it needs, beside the alternatives.

    merit bench step [--models gpt2-small ...] [--device cuda] [--output results.json]

Gradients and weights are random, of GPT-2's and Llama's shapes, in float32. Each contestant is timed in
turn, in one process, so that ratios are of one machine in one state: medians, with the spread beside
them. On a GPU ``ms`` is the time between events around a step when the queue is full, ``host`` what
the call costs the CPU, ``graph`` the time of a CUDA graph's replay. On a CPU ``ms`` is wall-clock time.

``worst`` is the 95th percentile of the steps: about what a step costs that comes once in ten, and of fewer
than twenty steps the slowest. SOAP improves its bases in cycles of ten steps, and whole cycles are timed.
Muon and SOAP treat hidden matrices by themselves and have AdamW for the rest. A floor is the time of the
bytes that must be moved at the speed of a copy, and of Newton-Schulz's products at the speed of a large
product in bfloat16, both measured first. Below it is Newton-Schulz by itself.
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
from merit_lab.bench import timing
from merit_lab.bench.contestants import Contestant, on_cpu, on_cuda
from merit_lab.bench.floor import floors_of
from merit_lab.bench.newton_schulz import NewtonSchulz, measure_newton_schulz
from merit_lab.bench.options import add_options, count
from merit_lab.bench.shapes import WEIGHTS, Parameters, Weight
from merit_optim.optim.engines import eager


@dataclass
class Result:
    """Milliseconds, and the temporary memory of a step in MiB."""

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


def measure(contestant: Contestant, params: Parameters, model: str, seconds: float) -> Result:
    """Time one contestant until the seconds are up, at least five steps and three of its cycles."""
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
    result = Result(
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
            except RuntimeError as error:  # the other times are good all the same
                result.graph_refused = _in_words(error)
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


def show(r: Result, baseline: float) -> None:
    """One contestant's row, with its ratio to the first one's milliseconds."""
    spread = f"{r.fastest_ms:.3f}..{r.slowest_ms:.3f}"
    host, graph = (f"{x:.3f}" if x is not None else "" for x in (r.host_ms, r.graph_ms))
    graph = "refused" if r.graph_refused else graph
    temporary = f"{r.temporary_mib:.1f} MiB" if r.temporary_mib is not None else ""
    times = f"{r.median_ms:9.3f} {r.median_ms / baseline:6.2f} {r.worst_ms:9.3f}"
    print(f"  {r.contestant:40} {times} {spread:>19} {host:>7} {graph:>7} {temporary:>10}", flush=True)


def show_floors(floors: list[dict[str, Any]], baseline: float) -> None:
    for floor in floors:
        what, least = f"floor, {floor['what']}", floor["ms"]
        print(f"  {what:40} {least:9.3f} {least / baseline:6.2f}", flush=True)


def show_newton_schulz(found: NewtonSchulz) -> None:
    print(
        f"  {f'newton-schulz alone, {found.num_matrices} matrices':40} {found.median_ms:9.3f} ms, "
        f"{found.tflop_s:.3g} TFLOP/s, {found.share:.0%} of a large product's",
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
    parser.add_argument("--only", help="contestants whose name holds this")
    parser.add_argument("--without", help="all but those")
    parser.add_argument("--piece", type=count, help="elements in a block of the eager engine on a CPU")
    add_options(parser, seconds=2.0, what="contestant")
    args = parser.parse_args(argv)

    if args.piece:
        eager.PIECE_ELEMENTS_CPU = args.piece
    device: torch.device = args.device
    contestants = on_cuda() if device.type == "cuda" else on_cpu()
    chosen = [own for own in contestants if _is_chosen(own.name, args.only, args.without)]
    if not chosen:
        names = "; ".join(own.name for own in contestants)
        parser.error(f"--only and --without leave no contestant; there are {names}")
    record: dict[str, Any] = {"environment": environment(device)}
    record |= {section: [] for section in ("results", "left_out", "floors", "newton_schulz")}
    found = record["environment"]
    speeds = f"copy {found['copy_tb_s']:.3f} TB/s, bfloat16 product {found['matrix_tflop_s']:.3f} TFLOP/s"
    print(f"{found['device']}, torch {torch.__version__}, {speeds}", flush=True)
    for model in args.models:
        _time_model(model, WEIGHTS[model], chosen, record, args)


def _time_model(
    model: str,
    weights: list[Weight],
    contestants: list[Contestant],
    record: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Time the contestants with one model, show what was found and add it to the record."""
    device: torch.device = args.device
    copy_tb_s, matrix_tflop_s = (record["environment"][rate] for rate in ("copy_tb_s", "matrix_tflop_s"))
    total = sum(own.num_elements for own in weights)
    left_out = {own.name: reason for own in contestants if (reason := own.left_out(weights)) is not None}
    fitting = [own for own in contestants if own.name not in left_out]
    params = Parameters.of(weights if fitting else [], device)
    results: list[Result] = []
    if fitting:
        show_head(model, total)
    for place, contestant in enumerate(fitting, start=1):
        with _saying(f"  {contestant.name} ({place} of {len(fitting)}) ..."):
            try:
                results.append(measure(contestant, params, model, args.seconds))
            except Exception as error:  # too little memory, or another's library: the others are timed anyway
                left_out[contestant.name] = _in_words(error)
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
        print(f"\n{model}: none of the contestants chosen could be timed")
    if any(own.direction == "muon" for own in fitting):
        found = measure_newton_schulz(params, model, args.seconds, matrix_tflop_s)
        record["newton_schulz"].append(asdict(found))
        show_newton_schulz(found)
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name in left_out if left_out[name] == reason]
        print(f"  left out, {reason}: {'; '.join(names)}", flush=True)
    _write(record, args)


@contextlib.contextmanager
def _saying(text: str) -> Iterator[None]:
    """Show a line in a terminal for as long as something takes; to compile one takes a minute."""
    if sys.stdout.isatty():
        print(text, end="", flush=True)
    try:
        yield
    finally:
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)


def _in_words(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _write(record: dict[str, Any], args: argparse.Namespace) -> None:
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def _is_chosen(name: str, only: str | None, without: str | None) -> bool:
    return (only is None or only in name) and (without is None or without not in name)
