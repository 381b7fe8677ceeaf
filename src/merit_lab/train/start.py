"""Where a run begins or goes on: everything that can be wrong is found here, before any compute."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from merit_lab.data import Batches, Dataset, validation_sequences
from merit_lab.models import num_parameters
from merit_lab.models.source import check_device
from merit_lab.record import (
    Run,
    Status,
    differences,
    durable,
    environment,
    holds_run,
    import_wandb,
    is_locked,
    lock,
    refuse_run,
)
from merit_lab.train import checkpoint
from merit_lab.train.config import TrainConfig
from merit_lab.train.memory import check_memory
from merit_lab.train.optimizer import check_optimizer
from merit_lab.train.parallel import Ranks

# Seconds that a restart waits for the process before it. One that was killed has let go of its run, but a
# file server keeps the locks of a node that died for as long as their lease: 90 seconds, where it is NFS.
_PATIENCE_OF_A_RESTART = 120.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run that is ready to be computed, from its first step or from a checkpoint."""

    run: Run
    config: TrainConfig
    what: Literal["started", "resumed", "over"]
    message: str
    checkpoint: Path | None = None
    step: int = 0
    metrics_offset: int = 0
    seconds: float = 0.0


def begin_run(config: TrainConfig, folder: Path, ranks: Ranks, held: contextlib.ExitStack) -> Start:
    """Make the run directory of a new run, and hold its lock; where the run is refused, nothing is made."""
    if not is_locked(folder):  # else the lock says who works on it
        refuse_run(folder)
    dataset = Dataset.open(config.data)
    config = dataclasses.replace(config, data=config.data.resolve()).resolve(dataset.vocab_size)
    _check(config, dataset, ranks)
    held.enter_context(lock(folder))
    run = Run.create(folder, config.to_dict(), _environment(dataset, ranks))
    millions = num_parameters(config.model) / 1e6
    chosen = config.optimizer
    rest = f", {chosen.rest} with {chosen.rest_lr:g} for the rest" if chosen.rest is not None else ""
    message = (
        f"{config.model.family} of {millions:.1f}M parameters, {chosen.name} with learning rate "
        f"{chosen.lr:g}{rest}, {config.steps} steps of {config.batch * config.model.context} tokens"
    )
    return Start(run=run, config=config, what="started", message=message)


def extend_run(
    config: TrainConfig, shorter: Path, folder: Path, ranks: Ranks, held: contextlib.ExitStack
) -> Start:
    """Begin a run with the steps of a shorter one, up to where their learning rates part.

    The shorter one stays as it is. It is another run from there on: a schedule knows its end.
    """
    run = Run.open(shorter)
    own = TrainConfig.from_dict(run.config)
    assert own.steps is not None
    common = own.steps_in_common(config)
    found, remarks = checkpoint.find(run.checkpoints, until=common)
    if found is None:
        way_out = "train with --optimizer.schedule wsd to have one that can be extended"
        where = f"they would part after step {common}" if common else "they part from the beginning"
        reason = "; ".join([*remarks, "no checkpoint is there that is as early"])
        raise ValueError(
            f"{shorter} cannot be extended to {config.steps} steps: its learning rate is for {own.steps} "
            f"({own.optimizer.schedule}), {where}, and {reason}. Begin a new run, or {way_out}."
        )
    path, manifest = found
    dataset = Dataset.open(config.data)
    _check_data(run, _environment(dataset, ranks), dataset)
    begun = begin_run(config, folder, ranks, held)
    with durable.replacing(begun.run.metrics_path) as partial, run.metrics_path.open("rb") as metrics:
        partial.write_bytes(metrics.read(manifest.metrics_offset))
    return dataclasses.replace(
        begun,
        message=f"{shorter} goes on from step {manifest.step} to {config.steps}",
        checkpoint=path,
        step=manifest.step,
        metrics_offset=manifest.metrics_offset,
        seconds=manifest.seconds,
    )


def wait_for_the_last_process(folder: Path) -> None:
    """Give the process that works on a run directory the time to end, before its run is gone on with."""
    if is_locked(folder):
        print(f"{folder} is in use; waiting {_PATIENCE_OF_A_RESTART:g} seconds at most", file=sys.stderr)
    give_up = time.monotonic() + _PATIENCE_OF_A_RESTART
    while is_locked(folder) and time.monotonic() < give_up:
        time.sleep(0.1)


def begin_or_resume_run(config: TrainConfig, folder: Path, ranks: Ranks, held: contextlib.ExitStack) -> Start:
    """Go on with the run in a folder, or begin it where there is none: what a restart does.

    A run that diverged is over too. It would do the same again, as often as it was started again.
    """
    if not holds_run(folder):
        return begin_run(config, folder, ranks, held)
    return resume_run(config, folder, ranks, held, ends=("finished", "diverged"))


def resume_run(
    config: TrainConfig | None,
    folder: Path,
    ranks: Ranks,
    held: contextlib.ExitStack,
    *,
    ends: tuple[Status, ...] = ("finished",),
) -> Start:
    """Find where a run goes on, at its newest checkpoint that is whole, and hold its lock.

    With one of the outcomes ``ends`` it does not: there is nothing left to do.
    """
    run = Run.open(folder)
    if not run.is_kept:  # else nothing is written, and there is no folder for a lock
        held.enter_context(lock(folder))
    own = TrainConfig.from_dict(run.config)
    over = None
    if (outcome := run.outcome) in ends:
        message = f"{folder} holds a run that has {outcome} already; nothing is left to do"
        over = Start(run=run, config=own, what="over", message=message)
    if over is not None and config is None:  # its data need not be there any more
        return over
    if over is None and run.is_kept:
        raise ValueError(
            f"{run.folder.parent} keeps what {run.name} recorded, which has {outcome or 'not ended'}, and no "
            "checkpoints to go on from; give its run directory, or train it again in another folder"
        )
    if config is not None:  # the data may have moved since
        own = dataclasses.replace(own, data=config.data.resolve())
    if not own.data.exists():
        raise ValueError(f"{own.data} is not there any more; if it has moved, name the folder with --data")
    dataset = Dataset.open(own.data)
    if config is not None:
        _check_same(own, config.resolve(dataset.vocab_size), folder)
    now = _environment(dataset, ranks)
    _check_data(run, now, dataset)
    if over is not None:
        return over
    _check(own, dataset, ranks)
    found, remarks = checkpoint.find(run.checkpoints)
    remarks += differences(run.environment, now)
    if found is None:
        message = "; ".join(["from the beginning, for there is no checkpoint to go on from", *remarks])
        return Start(run=run, config=own, what="resumed", message=message)
    path, manifest = found
    if manifest.config != own.fingerprint:
        raise ValueError(
            f"{path} was written with another configuration than {folder / 'config.json'} holds; undo the "
            "change there, or start a new run"
        )
    return Start(
        run=run,
        config=own,
        what="resumed",
        message="; ".join([f"from {path.name}", *remarks]),
        checkpoint=path,
        step=manifest.step,
        metrics_offset=manifest.metrics_offset,
        seconds=manifest.seconds,
    )


def _check(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> None:
    """Raise where the machine, the ranks or the data do not fit the configuration."""
    ranks.rows(config.batch)
    is_sharded = ranks.size > 1 and config.parallel == "fsdp2"
    if is_sharded and config.micro_batch is None and ranks.device.type != "cpu":
        raise ValueError(
            "fsdp2 needs --micro-batch: the largest one that fits is found by trying the whole model on one "
            "GPU, which is what sharding is there to avoid"
        )
    check_device(config.model, ranks.device)
    check_memory(config, ranks)
    if config.measure.wandb is not None:
        import_wandb()
    check_optimizer(config)
    Batches(dataset.train, context=config.model.context, batch=config.batch, seed=config.seed)
    if config.measure.validation_every:
        validation_sequences(dataset.validation, config.model.context, config.measure.validation_sequences)
    for file in (dataset.train, dataset.validation):
        file.check(config.model.vocab_size)


def _check_same(own: TrainConfig, asked: TrainConfig, folder: Path) -> None:
    if asked.fingerprint == own.fingerprint:
        return
    before, now = _by_name(own.to_dict()), _by_name(asked.to_dict())
    differing = [
        f"{name} is {before.get(name)!r} there and {now.get(name)!r} here"
        for name in {**before, **now}
        if name != "data" and before.get(name) != now.get(name)
    ]
    raise ValueError(
        f"{folder} holds a run with another configuration than is asked for: {', '.join(differing)}. A run "
        "goes on as it began: ask for the same again, resume it without a configuration (merit train "
        f"--resume {folder}), or choose another folder."
    )


def _by_name(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The numbers and words of a configuration by their dotted names."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            named |= _by_name(value, f"{prefix}{key}.")
        else:
            named[prefix + key] = value
    return named


def _check_data(run: Run, now: dict[str, Any], dataset: Dataset) -> None:
    before = run.data_fingerprint
    if now["data"]["fingerprint"] != before:
        raise ValueError(
            f"{dataset.folder} holds other data than the run began with: its fingerprint is "
            f"{now['data']['fingerprint']}, not {before}. Put the old data back, or start a new run."
        )


def _environment(dataset: Dataset, ranks: Ranks) -> dict[str, Any]:
    data = {
        "folder": str(dataset.folder.resolve()),
        "fingerprint": dataset.fingerprint,
        "tokenizer": dataset.tokenizer,
        "end_of_text": dataset.end_of_text,
        "bytes_per_token": dataset.bytes_per_token,
        "train_tokens": dataset.train.num_tokens,
        "validation_tokens": dataset.validation.num_tokens,
    }
    return environment(device=ranks.device, data=data, num_ranks=ranks.size)
