"""Hugging Face Trainer: attention logits and trust-ratio statistics in its logs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from merit_optim.integrations.step_watch import StepWatch


class MeritCallback(TrainerCallback):  # type: ignore[misc]
    """Logs the largest attention logit, the smallest entropy, and update statistics, at logging steps.

    The numbers go where the Trainer's do: to its history and to everything in ``report_to``. If the optimizer
    records no statistics, only those of attention are logged.

        trainer = Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None))
        trainer.add_callback(MeritCallback(trainer))

    Args:
        trainer: The Trainer whose ``log`` is called. Its ``train`` is wrapped to clean up after a failure or
            an interrupt.
        every: Steps between observations. None: the Trainer's ``logging_steps``; never if they are 0,
            or ``logging_strategy`` is "no".
        details: Also log numbers of every layer and parameter.
        entropy: Whether to measure the entropy of attention, which takes longer than the logits alone.
    """

    def __init__(
        self, trainer: Trainer, *, every: int | None = None, details: bool = False, entropy: bool = True
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1 step, or None for logging_steps; got {every}")
        self.trainer = trainer
        self.every = every
        self._watch = StepWatch(details=details, entropy=entropy)
        # The Trainer does not notify its callbacks of failures and interrupts.
        trainer.train = self._ending(trainer.train)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._watch.abandon()  # with auto_find_batch_size, an earlier loop may have run out of memory

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        assert model is not None and optimizer is not None
        step = state.global_step + 1
        every = self.every or (0 if args.logging_strategy == "no" else state.logging_steps)
        if (every and step % every == 0) or (step == 1 and args.logging_first_step):
            self._watch.begin(model, [optimizer])

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if self._watch.is_open:
            should_log = control.should_log
            self.trainer.log(self._watch.end())
            control.should_log = should_log  # log() resets it, and the Trainer would skip its log

    def _ending(self, train: Callable[..., TrainOutput]) -> Callable[..., TrainOutput]:
        @functools.wraps(train)
        def train_and_end(*args: Any, **kwargs: Any) -> TrainOutput:
            try:
                return train(*args, **kwargs)
            finally:
                self._watch.abandon()

        return train_and_end
