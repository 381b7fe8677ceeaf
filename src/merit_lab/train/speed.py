"""Training speed: seconds, tokens per second, and the share of the device's peak."""

from __future__ import annotations

import time

import torch

from merit_lab.models import AnyModelConfig, flops_per_token

# Peak dense bf16 FLOP/s from the vendors' data sheets, by a substring of the device's name. The first match
# counts.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the device's peak bf16 FLOP/s; None if unknown."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in device_name), None)


class Moment:
    """A point in time of the device's queue, recorded without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment; waits until the device has reached this one."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Speedometer:
    """Converts tokens and durations of steps to metrics.

    ``seconds`` is the total time of all steps, including those before the run was resumed, without validation
    and checkpoints.
    """

    def __init__(
        self, model: AnyModelConfig, device: torch.device, num_ranks: int, seconds: float = 0.0
    ) -> None:
        self.seconds = seconds
        self._device = device
        self._tokens_at_peak: float | None = None  # per second; unknown for some models and devices
        if device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(device))):
            flops = flops_per_token(model)
            self._tokens_at_peak = peak * num_ranks / flops if flops else None

    def read(self, tokens: int, *, seconds: float, optimizer_seconds: float) -> dict[str, float | None]:
        """Return the speed of a step on ``tokens`` in ``seconds``, which include ``optimizer_seconds``."""
        self.seconds += seconds
        per_second = tokens / max(seconds, 1e-9)
        memory = None
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device) / 2**30
        return {
            "seconds": self.seconds,
            "tokens_per_second": per_second,
            "optimizer_share": optimizer_seconds / max(seconds, 1e-9),
            "mfu": None if self._tokens_at_peak is None else per_second / self._tokens_at_peak,
            "memory_gib": memory,
        }
