"""How fast training is: seconds, tokens a second, and the share of the device's peak that it uses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from merit_optim.lab.models import ModelConfig, flops_per_token

# Dense bf16 matrix products a second, from the makers' data sheets, by a part of the device's name. The
# first that fits counts.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_name: str) -> float | None:
    """The device's floating-point operations a second in bf16; None where it is not known."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in device_name), None)


class Stopwatch:
    """Seconds of training, without what is done in pauses: validation, checkpoints."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._began = time.perf_counter() - seconds

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.perf_counter() - self._began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside."""
        before = self.seconds
        try:
            yield
        finally:
            self._began = time.perf_counter() - before


class Speedometer:
    """Turns the tokens of steps into numbers for the metrics."""

    def __init__(
        self, model: ModelConfig, device: torch.device, num_ranks: int, stopwatch: Stopwatch
    ) -> None:
        self._device, self._stopwatch = device, stopwatch
        self._last = stopwatch.seconds
        self._peak = None
        if device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(device))):
            self._peak = peak * num_ranks
        self._flops_per_token = flops_per_token(model)

    def read(self, tokens: int) -> dict[str, float | None]:
        """Speed over the time since the last reading, in which ``tokens`` were trained on."""
        now = self._stopwatch.seconds
        per_second = tokens / max(now - self._last, 1e-9)
        self._last = now
        memory = None
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device) / 2**30
        return {
            "seconds": now,
            "tokens_per_second": per_second,
            "mfu": None if self._peak is None else per_second * self._flops_per_token / self._peak,
            "memory_gib": memory,
        }
