"""Hugging Face Trainer: attention logits and trust-ratio statistics among its logs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from merit_optim.integrations.step_watch import StepWatch


class MeritCallback(TrainerCallback):
    """Logs the largest attention logit, the smallest entropy, and what the optimizer did, at logging steps.

    The numbers go where the Trainer's own go: to its history and to everything in ``report_to``. With an
    optimizer that records no statistics, they are those of attention alone.

        trainer = Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None))
        trainer.add_callback(MeritCallback(trainer))

    Args:
        trainer: Whose ``log`` is called. Its ``train`` also ends what a failure or an interrupt left open.
        every: Steps between observations. None: the Trainer's ``logging_steps``; never where they are 0,
            or ``logging_strategy`` is "no".
        details: Log numbers of every layer and parameter too.
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
        # The Trainer tells its callbacks of no failure and no interrupt.
        trainer.train = self._ending(trainer.train)  # type: ignore[method-assign]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._watch.abandon()  # with auto_find_batch_size, a loop that ran out of memory came before

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
            control.should_log = should_log  # a log takes the Trainer's own for done

    def _ending(self, train: Callable[..., TrainOutput]) -> Callable[..., TrainOutput]:
        @functools.wraps(train)
        def train_and_end(*args: Any, **kwargs: Any) -> TrainOutput:
            try:
                return train(*args, **kwargs)
            finally:
                self._watch.abandon()

        return train_and_end
