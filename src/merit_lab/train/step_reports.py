"""Report the numbers of steps, on a GPU steps later than they are taken, so that the host never waits."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from merit_lab.train.config import NonFinite
from merit_lab.train.reporter import Reporter
from merit_lab.train.speed import Moment, Speedometer

_MOST_WAITING = 16  # steps whose numbers may be on their way: then the host waits, so that a run ends in time
_SKIPS_IN_A_ROW = 100  # after so many skipped steps a run will not recover


class HostCopies:
    """Tensors that are being copied to the host."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def are_here(self) -> bool:
        """Whether reading them now does not wait; always on a CPU, where they need no copy."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> dict[str, Tensor]:
        """Wait until the copies are complete and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The measurements of a step; ``step`` steps were done before it."""

    step: int
    lr: float
    tensors: HostCopies
    began: Moment
    optimizer_began: Moment
    optimizer_ended: Moment
    ended: Moment
    update: dict[str, dict[str, float]]


class Ended(Exception):
    """The run ended before its last step: it diverged."""


class StepReports:
    """The steps whose numbers have not been read yet.

    Args:
        reporter: where the numbers go.
        speedometer: converts durations to speeds.
        names: the parameters, in the order of the gradients' norms.
        tokens_per_step: over all ranks.
        nonfinite: what a number that is not finite means to the run.
    """

    def __init__(
        self,
        reporter: Reporter,
        speedometer: Speedometer,
        names: list[str],
        *,
        tokens_per_step: int,
        nonfinite: NonFinite,
    ) -> None:
        self._reporter, self._speedometer, self._names = reporter, speedometer, names
        self._tokens_per_step, self._nonfinite = tokens_per_step, nonfinite
        self._waiting: deque[StepNumbers] = deque()
        self._num_skips_in_a_row = 0

    def add(self, numbers: StepNumbers) -> None:
        """Report the steps whose numbers have arrived; on a CPU also this one."""
        self._waiting.append(numbers)
        while self._waiting and (self._waiting[0].tensors.are_here or len(self._waiting) > _MOST_WAITING):
            self._report_step(self._waiting.popleft())

    def finish(self) -> None:
        """Report all steps."""
        while self._waiting:
            self._report_step(self._waiting.popleft())

    def _report_step(self, numbers: StepNumbers) -> None:
        """Read and report the numbers of one step; handle them if they are not finite."""
        read, done = numbers.tensors.read(), numbers.step + 1
        if "max_logits" in read:
            entropy = read["entropy"].tolist() if "entropy" in read else None
            logits = read["max_logits"].tolist()
            self._reporter.write("attention", numbers.step, max_logits=logits, entropy=entropy)
        if numbers.update:
            self._reporter.write("update", done, parameters=numbers.update)
        loss, norm = read["loss"].item(), torch.linalg.vector_norm(read["norms"]).item()
        self._reporter.write(
            "train",
            done,
            loss=loss,
            lr=numbers.lr,
            grad_norm=norm,
            weight_norm=read["weight_norm"].item(),
            tokens=done * self._tokens_per_step,
            **self._speedometer.read(
                self._tokens_per_step,
                seconds=numbers.ended.since(numbers.began),
                optimizer_seconds=numbers.optimizer_ended.since(numbers.optimizer_began),
            ),
        )
        if math.isfinite(loss) and math.isfinite(norm):
            self._num_skips_in_a_row = 0
        else:
            self._handle_nonfinite(done, loss, read["norms"])

    def _handle_nonfinite(self, step: int, loss: float, norms: Tensor) -> None:
        """Report which gradients are not finite, and end the run unless such steps are skipped."""
        bad = (~norms.isfinite()).nonzero().flatten().tolist()
        where = f", first that of {self._names[bad[0]]}" if bad else ""
        message = f"the loss is {loss}; {len(bad)} of {len(norms)} gradients are not finite{where}"
        if self._nonfinite == "skip":
            self._num_skips_in_a_row += 1
            self._reporter.event(step, "skipped", f"{message}; the step was skipped")
            if self._num_skips_in_a_row < _SKIPS_IN_A_ROW:
                return
            message = f"{_SKIPS_IN_A_ROW} steps in a row were skipped; {message}"
        self._reporter.event(step, "diverged", message)
        raise Ended
