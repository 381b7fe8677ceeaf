"""The training loop."""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from merit_lab.data import Batches, validation_sequences
from merit_lab.data.device import micro_batches
from merit_lab.models.base import Observe
from merit_lab.runs import NotWritten, Run
from merit_lab.train import checkpoint
from merit_lab.train.config import TrainConfig, interval
from merit_lab.train.optimizer import create_optimizer, describe, update_curvature, update_recorded
from merit_lab.train.parallel import Ranks
from merit_lab.train.pool import Pool
from merit_lab.train.reports import Ended, Moment, Reporter, StepNumbers, StepReports, reporting
from merit_lab.train.signals import Interrupted, StopRequest, listening
from merit_lab.train.start import Resume, Start, Starting, wait_for_previous_process
from merit_lab.train.steps import (
    MicroBatch,
    Passes,
    gradient_norms,
    seed_from,
    take_step,
    validation_loss,
    weight_norm,
    weights_to_use,
)


def train(
    config: TrainConfig | None, folder: Path | str, *, resume: Resume | None = None, pool: Pool | None = None
) -> Run:
    """Train a model; under torchrun, together with the other ranks.

    Returns the run when it has finished or diverged; see ``run.status``. Raises ``Interrupted`` after a
    signal, once a checkpoint is written.

    Args:
        config: what to train. With ``resume`` it may be None, or must be what the run started with. With
            None the run is trusted: an optimizer that it names as MODULE:CLASS is imported.
        folder: the run directory.
        resume: resume the run in ``folder``. "auto" starts it if there is none, and leaves a finished or
            diverged run unchanged. None: "auto" in a pool, False alone.
        pool: what the run shares with others of this process.
    """
    folder, ranks = Path(folder), Ranks.join()
    resume = (False if pool is None else "auto") if resume is None else resume
    pool = pool or Pool(is_shared=False)
    config = config and pool.adapt(config, ranks)
    if resume == "auto":  # before signals are handled: one must still end the process at once
        ranks.first(lambda: wait_for_previous_process(folder))
    try:
        with contextlib.ExitStack() as held, listening() as stop:
            starting = Starting(ranks, pool.open, held)
            start = ranks.first(lambda: starting.start(config, folder, resume))
            if start.event != "over":
                with reporting(start, ranks) as reporter, contextlib.suppress(Ended):
                    reporter.event(start.step, start.event, start.message)
                    Trainer(start, ranks, reporter, stop, pool).run()
                if start.config.checkpoint.keep == 0 and ranks.is_first:  # the journal, closed, says the end
                    shutil.rmtree(start.run.checkpoints, ignore_errors=True)
            elif ranks.is_first:
                print(start.message, file=sys.stderr)
        return start.run
    except BaseException:  # nobody knows the state of what a failed run has used
        pool.clear()
        raise
    finally:
        gc.collect()  # the memory of this run's optimizer is for that of the next


class Trainer:
    """The loop over steps and its state; every rank has one."""

    def __init__(self, start: Start, ranks: Ranks, reporter: Reporter, stop: StopRequest, pool: Pool) -> None:
        self.config = config = start.config
        self.checkpoints, self.validations = start.run.checkpoints, partial(start.run.metrics, "validation")
        self.ranks, self.reporter, self.stop = ranks, reporter, stop
        assert config.steps is not None and config.optimizer.lr is not None, "the configuration is resolved"
        self.steps, self.peak_lr, self.step = config.steps, config.optimizer.lr, start.step
        self.tokens_per_step = config.batch * config.model.context
        self.is_at_target = False

        model, self.module, self.micro_batch, self.is_compiled, is_bf16 = pool.prepare(config, ranks)
        self.optimizer = create_optimizer(config, model)
        # Groups may have different learning rates, as Muon's embeddings do; the schedule scales all of them.
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        if start.checkpoint is not None:
            checkpoint.load(start.checkpoint[0], self.module, self.optimizer, ranks)
        # Some models have parameters that are not trained, such as the biases of routers.
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.names, self.parameters = list(named), list(named.values())

        dataset, context = pool.open(config.data), config.model.context
        batches = Batches(dataset.train, context=context, batch=config.batch, seed=config.seed)
        self.batches, self.keeps_tokens = batches, pool.is_shared
        if config.measure.validation_every:
            sequences = validation_sequences(dataset.validation, context, config.measure.validation_sequences)
            self.validation_sequences = torch.from_numpy(sequences).to(ranks.device)
        begin, end = ranks.rows(config.batch)
        self.rows = [(row, min(row + self.micro_batch, end)) for row in range(begin, end, self.micro_batch)]
        self.passes = Passes(self.module, self.rows, ranks, bf16=is_bf16)
        self.observe_every = self._observe_every()

        self.last_step_ended: Moment | None = None  # None if something else happened since
        self.last_checkpoint = time.monotonic()
        seconds = start.checkpoint[1].seconds if start.checkpoint else 0.0
        self.reports = StepReports(reporter, self.names, config, ranks, seconds)

    def run(self) -> None:
        """Take the remaining steps, with measurements and checkpoints."""
        first_step, chosen = self.step, self.config.checkpoint
        if self.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.ranks.device)
        if self.step == 0:
            self.validate()
        elif self.config.target is not None:  # the process may have died at the target, after the checkpoint
            self.is_at_target = self.ranks.first(self.was_at_target)
        micro_batches = self.micro_batches()
        while self.step < self.steps and not self.is_at_target:
            numbers = self.take_step(micro_batches)
            self.step += 1
            if self.step == first_step + 1:
                checkpoint.check_state(self.optimizer)
            self.reports.add(numbers)
            is_last = self.step == self.steps
            if is_last or self.is_due(self.config.measure.validation_every):
                self.validate()
            at_end = is_last or self.is_at_target
            signum, is_time = self.ranks.maximum(self.stop.signum, self.is_checkpoint_time())
            if signum and not at_end:
                self.interrupt(signum)
            if chosen.keep > 0 if at_end else is_time or self.is_due(chosen.every_steps):
                self.save(must=at_end)
        self.reports.finish()
        done = f"all {self.steps} steps are done"
        if self.is_at_target:
            reached = f"the validation loss reached {self.config.target:g}"
            done = f"{reached} after {self.step} of {self.steps} steps"
        self.reporter.event(self.step, "finished", done)

    # --- a step ------------------------------------------------------------------------------------------

    def take_step(self, micro_batches: Iterator[MicroBatch]) -> StepNumbers:
        """Train on the next batch. The host does not wait for the device, except for update statistics."""
        began = self.last_step_ended or Moment(self.ranks.device)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = self.config.optimizer.rate(self.step, self.steps, peak)
        loss, attention = self.accumulate_gradients(micro_batches)
        if self.last_step_ended is None:
            self.check_gradients()
        norms = gradient_norms(self.parameters, self.ranks)
        weights = weight_norm(self.parameters, self.ranks)
        with update_recorded(
            self.optimizer, self.is_observed(self.config.measure.update_every)
        ) as statistics:
            optimizer_began = Moment(self.ranks.device)
            take_step(self.optimizer, self.config, norms, self.parameters, loss, self.step)
            optimizer_ended = Moment(self.ranks.device)
        self.optimizer.zero_grad()
        numbers = {"loss": loss, "norms": norms, "weight_norm": weights, **attention}
        tensors = {name: tensor.to("cpu", non_blocking=True) for name, tensor in numbers.items()}
        self.last_step_ended = Moment(self.ranks.device)
        return StepNumbers(
            step=self.step,
            lr=self.config.optimizer.rate(self.step, self.steps, self.peak_lr),
            tensors=tensors,
            began=began,
            optimizer_began=optimizer_began,
            optimizer_ended=optimizer_ended,
            ended=self.last_step_ended,
            update=describe(statistics),
        )

    def check_gradients(self) -> None:
        """Raise if a parameter takes no part in the loss."""
        unused = [name for name, one in zip(self.names, self.parameters, strict=True) if one.grad is None]
        if unused:
            others = f" and {len(unused) - 1} others take" if len(unused) > 1 else " takes"
            raise ValueError(
                f"{unused[0]}{others} no part in the loss of a language model, so that there is no gradient "
                "for it; choose another model, or a configuration of this one without it"
            )

    def accumulate_gradients(self, micro_batches: Iterator[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of the next batch; return the loss and the attention statistics."""
        first = next(micro_batches)
        seed_from("dropout", self.config.seed, self.step, self.ranks.rank)
        with self.passes.autocast():
            update_curvature(self.optimizer, self.module, first[0], self.config, self.ranks, self.step)
        observe: Observe = "max" if self.is_observed(self.observe_every) else False
        if self.is_observed(self.config.measure.entropy_every):
            observe = True
        return self.passes.gradients(chain([first], islice(micro_batches, len(self.rows) - 1)), observe)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches, from the current step on; from tokens on the device, if kept."""
        steps = range(self.step, self.steps)
        return micro_batches(
            self.batches, self.ranks.device, steps=steps, rows=self.rows, keep=self.keeps_tokens
        )

    # --- measurements ------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Measure the validation loss; end the run if it is not finite."""
        self.reports.finish()
        if not self.config.measure.validation_every:
            return
        with self.passes.autocast(), weights_to_use(self.optimizer, self.module):
            loss, error = validation_loss(
                self.module, self.validation_sequences, self.micro_batch, self.ranks
            )
        tokens = self.step * self.tokens_per_step
        self.reporter.write("validation", self.step, tokens=tokens, loss=loss, loss_error=error)
        self.last_step_ended = None
        if not math.isfinite(loss):  # the last step broke the weights after its loss was computed
            self.reporter.event(self.step, "diverged", f"the validation loss is {loss}")
            raise Ended
        self.is_at_target = self.config.target is not None and loss <= self.config.target

    def was_at_target(self) -> bool:
        """Whether the validation loss of the checkpoint is the target."""
        losses = [line["loss"] for line in self.validations() if line["step"] == self.step]
        return any(loss <= self.config.target for loss in losses)

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens every ``every`` steps happens after this one."""
        return every is not None and every > 0 and self.step % every == 0

    def is_observed(self, every: int | None) -> bool:
        """Whether the next step is observed: one in ``every`` steps, and the last."""
        return self.is_due(every) or (bool(every) and self.step == self.steps - 1)

    def _observe_every(self) -> int:
        if (every := self.config.measure.attention_every) is not None:
            return every
        is_free = self.config.model.gives_largest_logits(self.ranks.device, compiled=self.is_compiled)
        return interval(1 if is_free else 25, self.steps)

    # --- checkpoints -------------------------------------------------------------------------------------

    def is_checkpoint_time(self) -> bool:
        """Whether it is time for a checkpoint by the clock."""
        minutes = self.config.checkpoint.every_minutes
        return minutes > 0 and time.monotonic() - self.last_checkpoint > minutes * 60

    def save(self, *, must: bool) -> None:
        """Write a checkpoint. A failure is reported; it ends the run only with ``must``."""
        self.reports.finish()
        try:
            checkpoint.save(
                self.checkpoints,
                self.module,
                self.optimizer,
                self.ranks,
                step=self.step,
                metrics=self.ranks.first(self.reporter.sync),
                seconds=self.reports.seconds,
                config=self.config.fingerprint,
                keep=max(1, self.config.checkpoint.keep),
            )
        except OSError as error:
            message = (
                f"no checkpoint could be written to {self.checkpoints} ({error.strerror or error}); earlier "
                "checkpoints are unchanged"
            )
            if must:
                raise NotWritten(f"{message}. Fix the cause, then resume the run") from error
            self.reporter.event(self.step, "warning", message)
        self.last_checkpoint, self.last_step_ended = time.monotonic(), None

    def interrupt(self, signum: int) -> None:
        """Save a checkpoint and raise ``Interrupted``."""
        self.reports.finish()
        message = f"stopped by {signal.Signals(signum).name}"
        self.reporter.event(self.step, "interrupted", message)
        self.save(must=True)
        raise Interrupted(signum, f"{message} after step {self.step}, with a checkpoint")
