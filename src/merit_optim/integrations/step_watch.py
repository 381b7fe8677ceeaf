"""Observe one training step from callbacks at its beginning and its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from merit_optim.monitor import AttentionMonitor, update_scalars
from merit_optim.optim import UpdateStatistics


class StepWatch:
    """Observes attention and updates between :meth:`begin` and :meth:`end`.

    Args:
        details: Also return numbers of every layer and parameter, not only of the whole model.
        entropy: Whether to measure the entropy of attention.
    """

    def __init__(self, *, details: bool, entropy: bool) -> None:
        self.details, self.entropy = details, entropy
        self._open: ExitStack | None = None
        self._monitor: AttentionMonitor | None = None
        self._recordings: dict[str, dict[str, UpdateStatistics]] = {}

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Start observing. A previous step that failed and was never ended is abandoned."""
        self.abandon()
        if self._monitor is None or self._monitor.model is not model:
            self._monitor = AttentionMonitor(model, entropy=self.entropy)
        self._monitor.forget()  # the observations of an abandoned step
        with ExitStack() as stack:
            # By a prefix for the names of parameters, which several optimizers may share.
            self._recordings = {
                f"optimizer {index}/" if len(optimizers) > 1 else "": stack.enter_context(recording())
                for index, optimizer in enumerate(optimizers)
                if (recording := getattr(_innermost(optimizer), "recording", None)) is not None
            }
            stack.callback(self._monitor.stop)
            self._monitor.start()
            self._open = stack.pop_all()

    def pause(self) -> None:
        """Stop observing attention for a while, if a step is open."""
        if self._open is not None and self._monitor is not None:
            self._monitor.stop()

    def resume(self) -> None:
        """Observe attention again, as before :meth:`pause`."""
        if self._open is not None and self._monitor is not None:
            self._monitor.start()

    def end(self) -> dict[str, float]:
        """Stop observing and return numbers for a logger. Every rank must call this."""
        self.abandon()
        assert self._monitor is not None
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        reading = self._monitor.read(group)
        numbers = reading.scalars(per_layer=self.details) if reading is not None else {}
        together = {
            prefix + name: update
            for prefix, recording in self._recordings.items()
            for name, update in recording.items()
        }
        return numbers | update_scalars(together, per_parameter=self.details)

    def abandon(self) -> None:
        """Stop observing, if a step is open."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
