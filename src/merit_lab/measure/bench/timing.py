"""Time and memory of a call, and the speed of copies and matrix products on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from merit_optim.optim.axes.directions.newton_schulz import factor_dtype

FEWEST_STEPS = 5
FEWEST_CYCLES = 3
MOST_ON_DEVICE = 50
# Maximum number of steps by which the host is ahead of the device. Enough that the queue never runs empty,
# which would add the host's time to the device's; few enough to respect the given seconds.
STEPS_AHEAD = 5


class Stepped(Protocol):
    """An optimizer, or several that step as one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> object: ...


def step_times(
    run: Callable[[], object], seconds: float, device: torch.device, cycle: int = 1
) -> list[float]:
    """Milliseconds of each call, from the fastest to the slowest.

    Calls repeat until the seconds are over, at least five times. Work that repeats every ``cycle`` calls is
    timed for whole cycles, at least three.
    """
    return sorted((_device_times if device.type == "cuda" else _wall_times)(run, seconds, cycle))


def worst(times: list[float]) -> float:
    """The 95th percentile of sorted times, or the slowest of fewer than twenty.

    Up to one step in twenty may be slow because of the machine. A step that occurs once in ten is above the
    90th percentile, so this is about its median: the cost of the most expensive step in SOAP's cycle.
    """
    return times[-(-95 * len(times) // 100) - 1]


def _continues(num_done: int, cycle: int, begun: float, seconds: float) -> bool:
    if num_done < max(FEWEST_STEPS, FEWEST_CYCLES * cycle) or num_done % cycle:
        return True
    return time.monotonic() - begun < seconds


def _device_times(run: Callable[[], object], seconds: float, cycle: int) -> list[float]:
    run()  # so that the queue is as full for the first timed call as for the others
    begun = time.monotonic()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    while _continues(len(events), cycle, begun, seconds if len(events) < MOST_ON_DEVICE else 0.0):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
        if len(events) > STEPS_AHEAD:
            events[-STEPS_AHEAD - 1][1].synchronize()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _wall_times(run: Callable[[], object], seconds: float, cycle: int) -> list[float]:
    begun = time.monotonic()
    times: list[float] = []
    while _continues(len(times), cycle, begun, seconds):
        times.append(_wall_time(run))
    return times


def _wall_time(run: Callable[[], object]) -> float:
    """Milliseconds of a call on the host."""
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1e3


def host_time(run: Callable[[], object]) -> float:
    """CPU milliseconds of a call: the queue is empty before each, so that the host never waits for it."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        times.append(_wall_time(run))
    return statistics.median(times)


def graph_time(optimizer: Stepped, seconds: float, device: torch.device) -> float:
    """Median milliseconds of a CUDA graph's replay."""
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
    return statistics.median(step_times(graph.replay, seconds, device))


def peak_growth(run: Callable[[], object]) -> float | None:
    """Increase of the process's peak memory by a call, in MiB; None if Linux does not report it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        before = _memory("VmRSS")
        run()
        return max(0.0, _memory("VmHWM") - before)
    except OSError:
        return None


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy, in TB/s."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    times = step_times(lambda: target.copy_(source), 0.5, device)
    return 2 * source.nbytes / statistics.median(times) / 1e9


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a large bfloat16 product, multiplied as Muon's are.

    Of random numbers: zeros would take less power and run faster.
    """
    side = 8192 if device.type == "cuda" else 1024
    factor = torch.randn(side, side, device=device).to(factor_dtype(torch.bfloat16, device))
    product = torch.empty_like(factor)
    times = step_times(lambda: torch.mm(factor, factor, out=product), 0.5, device)
    return 2 * side**3 / statistics.median(times) / 1e9
