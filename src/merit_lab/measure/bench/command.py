"""`merit bench`: time an optimizer's step on this machine.

    merit bench step [--models gpt2-small ...] [--device cuda] [--out results.json]
    merit bench growth [--device cuda] [--out results.json]

step: time and memory of an optimizer step, compared with the alternatives. Gradients and weights are
random, with the shapes of GPT-2 and Llama, in float32. Contestants are timed one after the other in one
process, so that all ratios come from one machine in one state. Times are medians, with the spread beside
them. On a GPU ``ms`` is the time between events around a step when the queue is full, ``host`` the CPU time
of the call, ``graph`` the time of a CUDA graph's replay. On a CPU ``ms`` is wall-clock time. ``worst`` is
the 95th percentile of the steps, or the slowest of fewer than twenty: about the cost of a step that occurs
once in ten. SOAP improves its bases in cycles of ten steps, and whole cycles are timed. Muon and SOAP have
AdamW for the rest. Optimizers of dion, pytorch_optimizer and heavyball are timed where these are installed.
A floor is the time to move the necessary bytes at the speed of a copy, and to compute the products of
Newton-Schulz at the speed of a large product in bfloat16; both speeds are measured first.

growth: how the cost of a step grows with the size of the model, in weights of 1024 x 1024, and with its
number of tensors, a fixed total divided into smaller and smaller squares. MERIT and torch's AdamW are timed,
on a GPU both fused, with device and host times.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import merit_optim
from merit_lab.measure.bench import timing
from merit_lab.measure.bench.contestants import BenchContestant, on_cpu, on_cuda
from merit_lab.measure.bench.model import WEIGHTS, Parameters, Shape, WeightSpec, floors_of, num_elements
from merit_optim import MERIT

SIDE = 1024
MILLIONS = (1, 4, 16, 64, 256, 1024, 4096, 7168)  # on a CPU up to 64
TENSORS = (1, 4, 16, 64, 256, 1024, 4096)
FIXED_TOTAL = 2**26  # on a CPU a quarter of it


def main(argv: list[str]) -> int:
    """Run the benchmark named first in ``argv``, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="merit bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="benchmark", metavar="step|growth", required=True)
    step = kinds.add_parser("step", help="models of GPT-2's and Llama's shapes, with many optimizers")
    step.add_argument(
        "--models",
        nargs="+",
        choices=WEIGHTS,
        default=["gpt2-small"],
        metavar="MODEL",
        help=f"of {', '.join(WEIGHTS)} (gpt2-small); tiny is not the tiny of `merit train`",
    )
    step.add_argument("--only", help="time only contestants whose name contains this")
    step.add_argument("--without", help="leave out contestants whose name contains this")
    growth = kinds.add_parser("growth", help="ever larger models, and ever more tensors")
    for one, seconds, unit in ((step, 2.0, "contestant"), (growth, 0.5, "measurement")):
        default = "cuda" if torch.cuda.is_available() else "cpu"
        one.add_argument("--device", type=_device, default=default, help="cpu, cuda or cuda:N (%(default)s)")
        one.add_argument(
            "--seconds",
            type=_duration,
            default=seconds,
            help=f"seconds for each {unit} (%(default)s); at least five steps",
        )
        one.add_argument("--out", "--output", dest="output", type=_new_file, help="write the results as JSON")
    args = parser.parse_args(argv)
    _growth(args) if args.benchmark == "growth" else _step(args, step)
    return 0


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


def _step(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    def is_chosen(name: str) -> bool:
        only, without = ((text or "").lower() for text in (args.only, args.without))
        return only in name.lower() and not (without and without in name.lower())

    contestants = on_cuda() if args.device.type == "cuda" else on_cpu()
    chosen = [contestant for contestant in contestants if is_chosen(contestant.name)]
    if not chosen:
        names = "; ".join(contestant.name for contestant in contestants)
        parser.error(f"--only and --without leave no contestant; choose from: {names}")
    machine = environment(args.device)
    record: dict[str, Any] = {"environment": machine, "results": [], "left_out": [], "floors": []}
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
    total = sum(weight.num_elements for weight in weights)
    left_out = {one.name: reason for one in contestants if (reason := one.left_out(weights)) is not None}
    fitting = [contestant for contestant in contestants if contestant.name not in left_out]
    params = Parameters.of(weights if fitting else [], args.device)
    results: list[StepTiming] = []
    head = f"{'ms':>9} {'ratio':>6} {'worst':>9} {'spread':>19} {'host':>7} {'graph':>7} {'temporary':>10}"
    if fitting:
        size = f"{total / 1e6:.1f}M parameters in float32"
        print(f"\n{model}: {size}; ratios to the first\n  {'':40} {head}", flush=True)
    for place, contestant in enumerate(fitting, start=1):
        with _saying(f"  {contestant.name} ({place} of {len(fitting)}) ..."):
            try:
                results.append(measure(contestant, params, model, args.seconds))
            except Exception as error:  # out of memory, or in another library: time the others anyway
                left_out[contestant.name] = _first_line(error)
        if contestant.name not in left_out:
            print(row(results[-1], results[0].median_ms), flush=True)
            record["results"].append(asdict(results[-1]) | {"num_elements": total})
            _write(record, args)
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
    record["left_out"] += [
        {"model": model, "contestant": name, "reason": reason} for name, reason in left_out.items()
    ]
    if not results:
        print(f"\n{model}: none of the chosen contestants could be timed")
    for floor in floors_of(weights) if results else ():
        rates = (record["environment"][rate] for rate in ("copy_tb_s", "matrix_tflop_s"))
        least = floor.milliseconds(*rates)
        record["floors"].append({"model": model, **floor._asdict(), "ms": least})
        print(f"  {f'floor, {floor.what}':40} {least:9.3f} {least / results[0].median_ms:6.2f}", flush=True)
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name in left_out if left_out[name] == reason]
        print(f"  left out, {reason}: {'; '.join(names)}", flush=True)
    _write(record, args)


def row(r: StepTiming, baseline: float) -> str:
    """The row of a contestant, with its ratio to the time of the first one."""
    spread = f"{r.fastest_ms:.3f}..{r.slowest_ms:.3f}"
    host, graph = (f"{x:.3f}" if x is not None else "" for x in (r.host_ms, r.graph_ms))
    graph = "refused" if r.graph_refused else graph
    temporary = f"{r.temporary_mib:.1f} MiB" if r.temporary_mib is not None else ""
    times = f"{r.median_ms:9.3f} {r.median_ms / baseline:6.2f} {r.worst_ms:9.3f}"
    return f"  {r.contestant:40} {times} {spread:>19} {host:>7} {graph:>7} {temporary:>10}"


def _growth(args: argparse.Namespace) -> None:
    on_gpu = args.device.type == "cuda"
    contestants = [
        BenchContestant("torch AdamW", lambda p: torch.optim.AdamW(p.all, fused=on_gpu, foreach=not on_gpu)),
        BenchContestant("MERIT", lambda p: MERIT(p.all)),
    ]
    most, total = (MILLIONS[-1], FIXED_TOTAL) if on_gpu else (64, FIXED_TOTAL // 4)
    models: dict[str, list[Shape]] = {f"{n}M parameters": [(SIDE, SIDE)] * n for n in MILLIONS if n <= most}
    models |= {f"{n} tensors": [(math.isqrt(total // n),) * 2] * n for n in TENSORS}
    record: dict[str, Any] = {"environment": environment(args.device), "results": []}
    print(f"{'':20} {'AdamW':>10} {'MERIT':>10} {'ratio':>6} {'bytes/s':>10}    host: AdamW, MERIT, ms")
    for name, shapes in models.items():
        params = Parameters.of([WeightSpec(shape, "hidden") for shape in shapes], args.device)
        adamw, merit = (measure(contestant, params, name, args.seconds) for contestant in contestants)
        sizes = {"num_elements": num_elements(shapes), "num_tensors": len(shapes)}
        record["results"] += [asdict(adamw) | sizes, asdict(merit) | sizes]
        speed = 40 * num_elements(shapes) / merit.median_ms / 1e9
        host = "".join(f"{r.host_ms:9.3f}" for r in (adamw, merit) if r.host_ms is not None)
        times = f"{adamw.median_ms:10.3f} {merit.median_ms:10.3f} {merit.median_ms / adamw.median_ms:6.2f}"
        print(f"{name:20} {times} {speed:7.2f} TB/s {host}", flush=True)
        _write(record, args)
        del params
        gc.collect()


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


def _device(text: str) -> torch.device:
    """Parse an available device. A CUDA device becomes the current one, whose clock and memory are read."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; it must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            way_out = "cpu" if count == 0 else f"cuda:0 to cuda:{count - 1}, or cpu"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not available; torch sees {count} CUDA devices: use {way_out}"
            )
        torch.cuda.set_device(device.index or 0)
    return device


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds; it must be finite and at least 0"
        )
    return value


def _new_file(text: str) -> Path:
    """Parse the path of a file to write. Create its folder, and check that it can be written."""
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: {error.strerror}; name another file"
        ) from None
    return path
