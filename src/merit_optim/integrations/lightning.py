"""Lightning: attention logits and trust-ratio statistics in its loggers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from merit_optim.integrations.step_watch import StepWatch


class MeritCallback(Callback):
    """Logs the largest attention logit, the smallest entropy, and update statistics.

    The numbers go to the trainer's loggers. If the optimizers record no statistics, only those of attention
    are logged. The batches of one accumulated gradient are one step.

        trainer = Trainer(callbacks=[MeritCallback()])

    Args:
        every: Optimizer steps between observations, counted over all optimizers, as in the trainer's
            ``global_step``. None: the trainer's ``log_every_n_steps``, where 0 is never.
        details: Also log numbers of every layer and parameter.
        entropy: Whether to measure the entropy of attention, which takes longer than the logits alone.
    """

    def __init__(self, *, every: int | None = None, details: bool = False, entropy: bool = True) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1 step, or None for log_every_n_steps; got {every}")
        self.every = every
        self._watch = StepWatch(details=details, entropy=entropy)
        self._begun_at = -1
        self._num_due = 0  # multiples of ``every`` passed

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._num_due = self._multiples(trainer, trainer.global_step)  # not 0 in a resumed run

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # Not a remainder: with several optimizers a multiple may be skipped.
        num_due = self._multiples(trainer, trainer.global_step + 1)
        if not self._watch.is_open and num_due > self._num_due:
            self._num_due, self._begun_at = num_due, trainer.global_step
            self._watch.begin(pl_module, trainer.optimizers)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._watch.is_open and trainer.global_step > self._begun_at:
            numbers = self._watch.end()
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def on_validation_start(self, *_: Any) -> None:
        self._watch.pause()  # between the batches of an accumulated gradient

    def on_validation_end(self, *_: Any) -> None:
        self._watch.resume()

    def on_exception(self, *_: Any) -> None:
        self._watch.abandon()

    def on_train_end(self, *_: Any) -> None:
        self._watch.abandon()

    def _multiples(self, trainer: Trainer, step: int) -> int:
        """Return how often an observation has been due by a step."""
        every: int = self.every or trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        return step // every if every else 0
