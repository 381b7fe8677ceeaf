"""Reports of a run: to the journal and the display, with speeds; of steps without waiting for the device."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from merit_lab.models import flops_per_token
from merit_lab.progress import WorkProgress
from merit_lab.runs import BEGINNING, Journal, Mark
from merit_lab.train.config import TrainConfig
from merit_lab.train.parallel import Ranks
from merit_lab.train.start import Start

_MOST_WAITING = 16  # steps whose numbers may be on their way: then the host waits, so that a run ends in time
_SKIPS_IN_A_ROW = 100  # after so many skipped steps a run will not recover

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


class Reporter:
    """Records measurements and shows them: how far a run is in one line, validations and events in lines."""

    def __init__(self, journal: Journal | None = None, progress: WorkProgress | None = None) -> None:
        self._journal, self._progress = journal, progress
        self._largest_logit = ""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Report one measurement; runs/metrics.py lists the kinds."""
        if self._journal is None or self._progress is None:
            return
        self._journal.write(kind, step, **values)
        if kind == "event":
            self._progress.say(f"step {step}: {values['message']}")
        elif kind == "validation":
            self._progress.say(f"step {step}: validation loss {values['loss']:.4f}")
        elif kind == "attention":
            heads = [head for layer in values["max_logits"] for head in layer]
            self._largest_logit = f", logit {torch.tensor(heads).max():.1f}"  # NaN if there is one
        elif kind == "train":
            speed = f"{values['tokens_per_second']:,.0f} tokens/s"
            self._progress.update(step, f"loss {values['loss']:.4f}{self._largest_logit}, {speed}")

    def event(self, step: int, what: str, message: str) -> None:
        """Report an event."""
        self.write("event", step, what=what, message=message)

    def sync(self) -> Mark:
        """Flush to disk and return the end of the metrics file. Only for the first rank."""
        assert self._journal is not None
        return self._journal.sync()


@contextlib.contextmanager
def reporting(start: Start, ranks: Ranks) -> Iterator[Reporter]:
    """Open the reporter of a run that starts or resumes; that of other ranks than the first does nothing."""
    with contextlib.ExitStack() as stack:

        def open_journal() -> None:
            mark = start.checkpoint[1].metrics if start.checkpoint else BEGINNING
            journal = Journal(start.run, mark=mark, step=start.step + 1, wandb=start.config.measure.wandb)
            opened.append(stack.enter_context(journal))

        opened: list[Journal] = []
        ranks.first(open_journal)
        if not opened:
            yield Reporter()
            return
        progress = WorkProgress()
        with progress.piece("training", start.config.steps, "steps"):
            progress.update(start.step)
            yield Reporter(opened[0], progress)


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

    @property
    def is_past(self) -> bool:
        """Whether the device has reached it."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment; waits until the device has reached this one."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The measurements of a step; ``step`` steps were done before it.

    The tensors are on their way to the host; when the device has reached the end of the step, they are there.
    """

    step: int
    lr: float
    tensors: dict[str, Tensor]
    began: Moment
    optimizer_began: Moment
    optimizer_ended: Moment
    ended: Moment
    update: dict[str, dict[str, float]]


class Ended(Exception):
    """The run ended before its last step: it diverged."""


class StepReports:
    """The steps whose numbers have not been read yet.

    ``seconds`` is the total time of all steps, including those before the run was resumed, without validation
    and checkpoints.

    Args:
        reporter: where the numbers go.
        names: the parameters, in the order of the gradients' norms.
        config: what is trained.
        ranks: the ranks that share a step.
        seconds: those of the steps before the run was resumed.
    """

    def __init__(
        self, reporter: Reporter, names: list[str], config: TrainConfig, ranks: Ranks, seconds: float
    ) -> None:
        self.seconds = seconds
        self._reporter, self._names, self._nonfinite = reporter, names, config.nonfinite
        self._device, self._tokens_per_step = ranks.device, config.batch * config.model.context
        self._peak: float | None = None  # tokens per second; unknown for some models and devices
        if ranks.device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(ranks.device))):
            flops = flops_per_token(config.model)
            self._peak = peak * ranks.size / flops if flops else None
        self._waiting: deque[StepNumbers] = deque()
        self._num_skips_in_a_row = 0

    def add(self, numbers: StepNumbers) -> None:
        """Report the steps whose numbers have arrived; on a CPU also this one."""
        self._waiting.append(numbers)
        while self._waiting and (self._waiting[0].ended.is_past or len(self._waiting) > _MOST_WAITING):
            self._report_step(self._waiting.popleft())

    def finish(self) -> None:
        """Report all steps."""
        while self._waiting:
            self._report_step(self._waiting.popleft())

    def _report_step(self, numbers: StepNumbers) -> None:
        """Read and report the numbers of one step; handle them if they are not finite."""
        numbers.ended.wait()
        read, done = numbers.tensors, numbers.step + 1
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
            **self._speed(numbers),
        )
        if math.isfinite(loss) and math.isfinite(norm):
            self._num_skips_in_a_row = 0
        else:
            self._handle_nonfinite(done, loss, read["norms"])

    def _speed(self, numbers: StepNumbers) -> dict[str, float | None]:
        """Return the speed of a step, and the memory that it took."""
        seconds = max(numbers.ended.since(numbers.began), 1e-9)
        self.seconds += seconds
        per_second, memory = self._tokens_per_step / seconds, None
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device) / 2**30
        return {
            "seconds": self.seconds,
            "tokens_per_second": per_second,
            "optimizer_share": numbers.optimizer_ended.since(numbers.optimizer_began) / seconds,
            "mfu": None if self._peak is None else per_second / self._peak,
            "memory_gib": memory,
        }

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
