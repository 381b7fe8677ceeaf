"""How long an optimizer step takes, and how much memory it needs, beside the alternatives.

    merit bench step [--models gpt2-small ...] [--device cuda] [--output results.json]

Gradients and weights are random, of GPT-2's and Llama's shapes, in float32. Each contestant is timed in
turn, in one process, so that ratios are of one machine in one state: medians, with the spread beside
them. On a GPU ``ms`` is the time between events around a step when the queue is full, ``host`` what
the call costs the CPU, ``graph`` the time of a CUDA graph's replay. On a CPU ``ms`` is wall-clock time.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import merit_optim
from merit_optim import LAMB, MERIT, MaxLAMB
from merit_optim.lab.bench.naive import NaiveMERIT
from merit_optim.lab.bench.options import add_options, count
from merit_optim.lab.bench.shapes import MODELS, make_parameters, num_elements
from merit_optim.optim.engines import eager

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Contestant:
    """An optimizer, how to make it, and what happens before its step."""

    name: str
    make: Callable[[Tensors], Optimizer]
    clip: bool = False
    compiled: bool = False
    graph: bool = False
    most_elements: int = 10**12
    """Larger models are left out: for what takes minutes there."""


def on_cuda() -> list[Contestant]:
    adamw, billion = torch.optim.AdamW, 10**9
    return [
        Contestant("torch AdamW, fused", lambda p: adamw(p, fused=True), graph=True),
        Contestant("MERIT, fused", lambda p: MERIT(p, fused=True), graph=True),
        Contestant("clip_grad_norm_ and torch AdamW, fused", lambda p: adamw(p, fused=True), clip=True),
        Contestant("MERIT, fused, max_grad_norm", lambda p: MERIT(p, fused=True, max_grad_norm=1.0)),
        Contestant("MERIT, fused, nonfinite='skip'", lambda p: MERIT(p, fused=True, nonfinite="skip")),
        Contestant("LAMB, fused", lambda p: LAMB(p, fused=True)),
        Contestant("MaxLAMB, fused", lambda p: MaxLAMB(p, fused=True)),
        Contestant("torch AdamW, foreach", lambda p: adamw(p, foreach=True), most_elements=billion),
        Contestant("MERIT, foreach", lambda p: MERIT(p, foreach=True), most_elements=billion),
        Contestant("naive MERIT", NaiveMERIT, most_elements=billion),
        *others(),
        Contestant(
            "MERIT, compiled", lambda p: MERIT(p, capturable=True), compiled=True, most_elements=2 * 10**8
        ),
    ]


def others() -> list[Contestant]:
    """Another library's LAMB, where it is installed."""
    if find_spec("pytorch_optimizer") is None:
        return []
    from pytorch_optimizer import Lamb

    return [Contestant("pytorch_optimizer Lamb", Lamb, most_elements=10**9)]


def on_cpu() -> list[Contestant]:
    adamw = torch.optim.AdamW
    return [
        Contestant("torch AdamW, foreach", lambda p: adamw(p, foreach=True)),
        Contestant("torch AdamW, fused", lambda p: adamw(p, fused=True)),
        Contestant("MERIT", MERIT),
        Contestant("LAMB", LAMB),
        Contestant("MaxLAMB", MaxLAMB),
        Contestant("naive MERIT", NaiveMERIT),
        *others(),
    ]


@dataclass
class Result:
    """Milliseconds, and the temporary memory of a step in MiB."""

    model: str
    contestant: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    temporary_mib: float | None
    host_ms: float | None = None
    graph_ms: float | None = None


def measure(contestant: Contestant, params: Tensors, model: str, seconds: float) -> Result:
    """Time one contestant until the seconds are up, at least five steps."""
    device = params[0].device
    optimizer = contestant.make(params)
    step = torch.compile(optimizer.step) if contestant.compiled else optimizer.step

    def run() -> None:
        if contestant.clip:
            clip_grad_norm_(params, 1.0, foreach=True)
        step()

    for _ in range(3):
        run()
    timed = device_times if device.type == "cuda" else wall_times
    times = sorted(timed(run, seconds))
    result = Result(model, contestant.name, times[len(times) // 2], times[0], times[-1], None)
    if device.type == "cuda":
        result.host_ms = host_time(run)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        result.temporary_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        if contestant.graph:
            result.graph_ms = graph_time(optimizer, seconds)
    else:
        result.temporary_mib = peak_growth(run)
    return result


def device_times(run: Callable[[], object], seconds: float) -> Iterator[float]:
    begun = time.monotonic()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    while len(events) < 5 or (time.monotonic() - begun < seconds and len(events) < 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
        if len(events) % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (begin.elapsed_time(end) for begin, end in events)


def host_time(run: Callable[[], object], repeats: int = 20) -> float:
    """What a call costs the CPU: the queue is empty at the start and short enough never to be full."""
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
    return sorted(times)[repeats // 2]


def graph_time(optimizer: Optimizer, seconds: float) -> float:
    """The time of a replay."""
    for group in optimizer.param_groups:
        group["capturable"] = True
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    times = sorted(device_times(graph.replay, seconds))
    return times[len(times) // 2]


def wall_times(run: Callable[[], object], seconds: float) -> Iterator[float]:
    begun = time.monotonic()
    done = 0
    while done < 5 or time.monotonic() - begun < seconds:
        start = time.perf_counter()
        run()
        yield (time.perf_counter() - start) * 1e3
        done += 1


def peak_growth(run: Callable[[], object]) -> float | None:
    """How far a step raises the process's memory, in MiB; None where Linux does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # begin the high-water mark anew
        before = memory("VmRSS")
        run()
        return max(0.0, memory("VmHWM") - before)
    except OSError:
        return None


def memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second, in TB/s, of a large copy."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    timed = device_times if device.type == "cuda" else wall_times
    times = sorted(timed(lambda: target.copy_(source), 0.5))
    return 2 * source.nbytes / times[len(times) // 2] / 1e9


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
        "copy_tb_s": copy_bandwidth(device),
    }


def show(results: list[Result], total: int, bandwidth: float) -> None:
    baseline = results[0].median_ms
    print(
        f"\n{results[0].model}: {total / 1e6:.1f}M parameters in float32; ratios to {results[0].contestant}"
    )
    print(f"  {'':40} {'ms':>9} {'ratio':>6} {'spread':>19} {'host':>7} {'graph':>7} {'temporary':>10}")
    for r in results:
        spread = f"{r.fastest_ms:.3f}..{r.slowest_ms:.3f}"
        host, graph = (f"{x:.3f}" if x is not None else "" for x in (r.host_ms, r.graph_ms))
        temporary = f"{r.temporary_mib:.1f} MiB" if r.temporary_mib is not None else ""
        times = f"{r.median_ms:9.3f} {r.median_ms / baseline:6.2f} {spread:>19} {host:>7} {graph:>7}"
        print(f"  {r.contestant:40} {times} {temporary:>10}")
    for size, what in ((28, "AdamW's traffic"), (40, "MERIT's in two passes")):
        floor = size * total / bandwidth / 1e9
        print(f"  {f'floor, {size} bytes: {what}':40} {floor:9.3f} {floor / baseline:6.2f}", flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="merit bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["gpt2-small"],
        metavar="MODEL",
        help=f"of {', '.join(MODELS)} (gpt2-small); tiny is not the tiny of `merit train`",
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
    record: dict[str, Any] = {"environment": environment(device), "results": []}
    bandwidth = record["environment"]["copy_tb_s"]
    print(
        f"{record['environment']['device']}, torch {torch.__version__}, copy {bandwidth:.3f} TB/s", flush=True
    )
    for model in args.models:
        total, results = num_elements(MODELS[model]), []
        fitting = [own for own in chosen if total <= own.most_elements]
        if not fitting:
            print(f"\n{model}: none of the contestants chosen is timed with as many parameters, {total:,}")
            continue
        params = make_parameters(MODELS[model], device)
        for contestant in fitting:
            if sys.stdout.isatty():
                print(f"\r\033[K  {model}: {contestant.name} ...", end="\r", flush=True)
            results.append(measure(contestant, params, model, args.seconds))
            record["results"].append(asdict(results[-1]) | {"num_elements": total})
            if args.output:
                args.output.write_text(json.dumps(record, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        show(results, total, bandwidth)
        del params


def _is_chosen(name: str, only: str | None, without: str | None) -> bool:
    return (only is None or only in name) and (without is None or without not in name)
