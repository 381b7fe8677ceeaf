"""How long a call takes, how much memory it needs, and how fast this machine copies and multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

FEWEST_STEPS = 5
FEWEST_CYCLES = 3
MOST_ON_DEVICE = 50
# So many steps the host is ahead of the device at most. Enough that the queue never runs empty, which would
# put the host's time into the device's; few enough that the seconds given are kept.
STEPS_AHEAD = 5


class Stepped(Protocol):
    """What is timed: an optimizer, or several as one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> object: ...


def _nothing() -> None:
    """There is nothing to prepare."""


def step_times(
    run: Callable[[], object],
    seconds: float,
    device: torch.device,
    cycle: int = 1,
    prepare: Callable[[], object] = _nothing,
) -> list[float]:
    """Milliseconds of each call, from the fastest to the slowest.

    Calls go on until the seconds are up, at least five of them. Work that repeats itself every ``cycle``
    calls is timed for whole cycles, at least three. What ``prepare`` does before each call is not timed.
    """
    timed = _device_times if device.type == "cuda" else _wall_times
    return sorted(timed(run, seconds, cycle, prepare))


def median(times: list[float]) -> float:
    """The middle one of times in order."""
    return times[len(times) // 2]


def worst(times: list[float]) -> float:
    """The 95th percentile of times in order: one in twenty may be the machine's own doing.

    The slowest of fewer than twenty. What one step of ten does is above the 90th, so that this is about its
    median: what the dearest step of SOAP's cycle costs, not the unluckiest one.
    """
    return times[-(-95 * len(times) // 100) - 1]


def _goes_on(num_done: int, cycle: int, begun: float, seconds: float) -> bool:
    if num_done < max(FEWEST_STEPS, FEWEST_CYCLES * cycle) or num_done % cycle:
        return True
    return time.monotonic() - begun < seconds


def _device_times(
    run: Callable[[], object], seconds: float, cycle: int, prepare: Callable[[], object]
) -> list[float]:
    prepare()
    run()  # so that the first one timed finds the queue as full as the others do
    begun = time.monotonic()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    while _goes_on(len(events), cycle, begun, seconds if len(events) < MOST_ON_DEVICE else 0.0):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepare()
        begin.record()
        run()
        end.record()
        events.append((begin, end))
        if len(events) > STEPS_AHEAD:
            events[-STEPS_AHEAD - 1][1].synchronize()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _wall_times(
    run: Callable[[], object], seconds: float, cycle: int, prepare: Callable[[], object]
) -> list[float]:
    begun = time.monotonic()
    times: list[float] = []
    while _goes_on(len(times), cycle, begun, seconds):
        prepare()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def host_time(run: Callable[[], object], repeats: int = 20) -> float:
    """What a call costs the CPU: the queue is empty at the start and short enough never to be full."""
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
    return median(sorted(times))


def graph_time(optimizer: Stepped, seconds: float, device: torch.device) -> float:
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
    return median(step_times(graph.replay, seconds, device))


def peak_growth(run: Callable[[], object]) -> float | None:
    """How far a step raises the process's memory, in MiB; None where Linux does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # begin the high-water mark anew
        before = _memory("VmRSS")
        run()
        return max(0.0, _memory("VmHWM") - before)
    except OSError:
        return None


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second, in TB/s, of a large copy."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    times = step_times(lambda: target.copy_(source), 0.5, device)
    return 2 * source.nbytes / median(times) / 1e9


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a large product in bfloat16, of random numbers: zeros take less power and run faster."""
    side = 8192 if device.type == "cuda" else 1024
    factor = torch.randn(side, side, device=device).bfloat16()
    product = torch.empty_like(factor)
    times = step_times(lambda: torch.mm(factor, factor, out=product), 0.5, device)
    return 2 * side**3 / median(times) / 1e9
