"""`merit bench`: time an optimizer's step on this machine, and compare it with the alternatives.

Gradients and weights are random, with the shapes of GPT-2 and Llama, in float32. Contestants are timed one
after the other in one process, so that all ratios come from one machine in one state. Times are medians, with
the spread beside them. On a GPU ``ms`` is the time between events around a step when the queue is full,
``host`` the CPU time of the call, ``graph`` the time of a CUDA graph's replay. On a CPU ``ms`` is wall-clock
time. ``worst`` is the 95th percentile of the steps, or the slowest of fewer than twenty: about the cost of a
step that occurs once in ten. SOAP improves its bases in cycles of ten steps, and whole cycles are timed. Muon
and SOAP have AdamW for the rest. Optimizers of dion and pytorch_optimizer are timed where these are
installed. A floor is the time to move the necessary bytes at the speed of a copy, and to compute the products
of Newton-Schulz at the speed of a large product in bfloat16; both speeds are measured first.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import merit_optim
from merit_lab.checks import check_at_least, check_choice
from merit_lab.folders import writing_into
from merit_lab.measure.bench import timing
from merit_lab.measure.bench.contestants import BenchContestant, contestants
from merit_lab.measure.bench.model import WEIGHTS, Parameters, floors_of
from merit_lab.measure.checkpoint import run_command


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Time an optimizer's step on this machine, and compare it with the alternatives."""

    models: tuple[str, ...] = ("gpt2-small",)
    """Weights to step over: tiny (not that of `merit train`), gpt2-embedding, gpt2-small, gpt2-medium,
    gpt2-large, llama-7b."""
    only: str = ""
    """Time only contestants whose name contains this."""
    without: str = ""
    """Leave out contestants whose name contains this."""
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    """cpu, cuda or cuda:N."""
    seconds: float = 2.0
    """Seconds for each contestant; at least five steps."""
    out: Path | None = None
    """File to write the results to, as JSON."""

    def __post_init__(self) -> None:
        for model in self.models:
            check_choice("models", model, WEIGHTS)
        check_at_least("seconds", self.seconds, 0.0)


def main(argv: Sequence[str]) -> int:
    """Run `merit bench` and return its exit status."""
    return run_command("bench", Arguments, _time, argv)


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
        median_ms=statistics.median(times),
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
    """The machine, its speeds, and the versions."""
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


def _time(arguments: Arguments) -> None:
    only, without = arguments.only.lower(), arguments.without.lower()
    device = _device(arguments.device)
    known = {one.name.lower(): one for one in contestants(on_gpu=device.type == "cuda")}
    chosen = [one for name, one in known.items() if only in name and not (without and without in name)]
    if not chosen:
        names = "; ".join(contestant.name for contestant in known.values())
        raise ValueError(f"--only and --without leave no contestant; choose from: {names}")
    record: dict[str, Any] = {"environment": {}, "results": [], "left_out": [], "floors": []}
    _write(record, arguments.out)  # before anything is timed
    machine = record["environment"] = environment(device)
    speeds = f"copy {machine['copy_tb_s']:.3f} TB/s, matrix product {machine['matrix_tflop_s']:.3f} TFLOP/s"
    print(f"{machine['device']}, torch {torch.__version__}, {speeds}", flush=True)
    for model in arguments.models:
        _time_model(model, chosen, record, device, arguments.seconds)
        _write(record, arguments.out)


def _time_model(
    model: str,
    chosen: list[BenchContestant],
    record: dict[str, Any],
    device: torch.device,
    seconds: float,
) -> None:
    """Time the contestants with one model, print the results and add them to the record."""
    weights = WEIGHTS[model]
    total = sum(weight.num_elements for weight in weights)
    left_out = {one.name: reason for one in chosen if (reason := one.left_out(weights)) is not None}
    fitting = [contestant for contestant in chosen if contestant.name not in left_out]
    params = Parameters.of(weights if fitting else [], device)
    baseline = 0.0  # of the first that can be timed
    head = f"{'ms':>9} {'ratio':>6} {'worst':>9} {'spread':>19} {'host':>7} {'graph':>7} {'temporary':>10}"
    print(f"\n{model}: {total / 1e6:.1f}M parameters in float32; ratios to the first\n  {'':40} {head}")
    for contestant in fitting:
        try:
            result = measure(contestant, params, model, seconds)
        except Exception as error:  # out of memory, or in another library: time the others anyway
            left_out[contestant.name] = _first_line(error)
        else:
            baseline = baseline or result.median_ms
            print(row(result, baseline), flush=True)
            record["results"].append(asdict(result) | {"num_elements": total})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for floor in floors_of(weights) if baseline else ():
        rates = (record["environment"][rate] for rate in ("copy_tb_s", "matrix_tflop_s"))
        least = floor.milliseconds(*rates)
        record["floors"].append({"model": model, **floor._asdict(), "ms": least})
        print(f"  {f'floor, {floor.what}':40} {least:9.3f} {least / baseline:6.2f}", flush=True)
    for name, reason in left_out.items():
        record["left_out"].append({"model": model, "contestant": name, "reason": reason})
        print(f"  left out, {reason}: {name}", flush=True)


def row(r: StepTiming, baseline: float) -> str:
    """The row of a contestant, with its ratio to the time of the first one."""
    spread = f"{r.fastest_ms:.3f}..{r.slowest_ms:.3f}"
    host, graph = (f"{x:.3f}" if x is not None else "" for x in (r.host_ms, r.graph_ms))
    graph = "refused" if r.graph_refused else graph
    temporary = f"{r.temporary_mib:.1f} MiB" if r.temporary_mib is not None else ""
    times = f"{r.median_ms:9.3f} {r.median_ms / baseline:6.2f} {r.worst_ms:9.3f}"
    return f"  {r.contestant:40} {times} {spread:>19} {host:>7} {graph:>7} {temporary:>10}"


def _first_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _write(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        with writing_into(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")


def _device(text: str) -> torch.device:
    """Return an available device. A CUDA device becomes the current one, whose clock and memory are read."""
    known = ["cpu", "cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    check_choice("device", text, known if torch.cuda.is_available() else ["cpu"])
    device = torch.device(text)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device
