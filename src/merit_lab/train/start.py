"""Start or resume a run: everything that can be wrong is checked here, before any compute."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from merit_lab.data import Batches, Dataset, check_validation_size, validation_sequences
from merit_lab.models import num_parameters
from merit_lab.models.source import check_device
from merit_lab.runs import (
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
from merit_lab.text import amount
from merit_lab.train import checkpoint_files
from merit_lab.train.config import TrainConfig
from merit_lab.train.memory import check_memory
from merit_lab.train.optimizer import check_optimizer, options_in_use
from merit_lab.train.parallel import Ranks

Open = Callable[[Path], Dataset]
Resume = bool | Literal["auto"]
"""Whether to resume a run; "auto" starts it if there is none."""

# Seconds that a restart waits for the previous process. A killed process has released its lock, but a file
# server keeps the locks of a dead node until their lease expires: 90 seconds on NFS.
_RESTART_TIMEOUT = 120.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run that is ready to train, from its first step or from a checkpoint."""

    run: Run
    config: TrainConfig
    event: Literal["started", "resumed", "over"]
    message: str
    checkpoint: Path | None = None
    step: int = 0
    metrics_offset: int = 0
    metrics_sha256: str | None = None
    seconds: float = 0.0


def start_run(
    config: TrainConfig | None,
    folder: Path,
    ranks: Ranks,
    resume: Resume,
    extends: Path | None,
    held: contextlib.ExitStack,
    open_data: Open,
) -> Start:
    """Start a run or resume one, as ``train`` is asked to, and hold its lock."""
    if resume and extends is not None:
        raise ValueError(f"resume is {resume!r} and extends is {extends}; give only one of the two")
    if resume is True:
        return resume_run(config, folder, ranks, held, open_data)
    if config is None:
        raise ValueError("a new run needs a configuration; pass one, or resume=True")
    if resume == "auto":
        return begin_or_resume_run(config, folder, ranks, held, open_data)
    if extends is not None:
        return extend_run(config, extends, folder, ranks, held, open_data)
    return begin_run(config, folder, ranks, held, open_data)


def begin_run(
    config: TrainConfig, folder: Path, ranks: Ranks, held: contextlib.ExitStack, open_data: Open
) -> Start:
    """Create the directory of a new run and hold its lock. If the run is refused, nothing is created."""
    if not is_locked(folder):  # otherwise taking the lock reports which process uses it
        refuse_run(folder)
    dataset = open_data(config.data)
    config = dataclasses.replace(config, data=config.data.resolve()).resolve(dataset.vocab_size)
    check_run(config, dataset, ranks)
    held.enter_context(lock(folder))
    about = {
        **_environment(dataset, ranks),
        "parameters": num_parameters(config.model),
        "optimizer": options_in_use(config),
    }
    run = Run.create(folder, config.to_dict(), about)
    chosen = config.optimizer
    rest = f", {chosen.rest} with {chosen.rest_lr:g} for the rest" if chosen.rest is not None else ""
    message = (
        f"{config.model.family} of {amount(num_parameters(config.model))} parameters, {chosen.name} with "
        f"learning rate {chosen.lr:g}{rest}, {config.steps} steps of "
        f"{config.batch * config.model.context} tokens"
    )
    return Start(run=run, config=config, event="started", message=message)


def extend_run(
    config: TrainConfig,
    shorter: Path,
    folder: Path,
    ranks: Ranks,
    held: contextlib.ExitStack,
    open_data: Open,
) -> Start:
    """Start a run from the steps of a shorter one, up to where their learning rates diverge.

    The shorter run is not changed. The two differ from there on, because a schedule depends on its end.
    """
    run = Run.open(shorter)
    recorded = TrainConfig.from_dict(run.config)
    assert recorded.steps is not None
    common = recorded.steps_in_common(config)
    found, remarks = checkpoint_files.find(run.checkpoints, until=common)
    if found is None:
        way_out = "train with --optimizer.schedule wsd, which can be extended"
        where = (
            f"the schedules differ after step {common}" if common else "the schedules differ from the start"
        )
        reason = "; ".join([*remarks, "there is no checkpoint that early"])
        raise ValueError(
            f"{shorter} cannot be extended to {config.steps} steps: its learning rate is scheduled for "
            f"{recorded.steps} ({recorded.optimizer.schedule}), {where}, and {reason}. Start a new run, or "
            f"{way_out}."
        )
    path, manifest = found
    dataset = open_data(config.data)
    run.check_data(dataset.folder, dataset.fingerprint)
    begun = begin_run(config, folder, ranks, held, open_data)
    with durable.replacing(begun.run.metrics_path) as partial, run.metrics_path.open("rb") as metrics:
        partial.write_bytes(metrics.read(manifest.metrics_offset))
    return dataclasses.replace(
        begun,
        message=f"continuing {shorter} from step {manifest.step} to {config.steps}",
        checkpoint=path,
        step=manifest.step,
        metrics_offset=manifest.metrics_offset,
        metrics_sha256=manifest.metrics_sha256,
        seconds=manifest.seconds,
    )


def wait_for_previous_process(folder: Path) -> None:
    """Wait until the process that uses a run directory ends, up to a time limit."""
    if is_locked(folder):
        print(f"{folder} is in use; waiting for at most {_RESTART_TIMEOUT:g} seconds", file=sys.stderr)
    deadline = time.monotonic() + _RESTART_TIMEOUT
    while is_locked(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def begin_or_resume_run(
    config: TrainConfig, folder: Path, ranks: Ranks, held: contextlib.ExitStack, open_data: Open
) -> Start:
    """Resume the run in a folder, or start it if there is none.

    A diverged run is over too: it would diverge again in every restart.
    """
    if not holds_run(folder):
        return begin_run(config, folder, ranks, held, open_data)
    return resume_run(config, folder, ranks, held, open_data, ends=("finished", "diverged"))


def resume_run(
    config: TrainConfig | None,
    folder: Path,
    ranks: Ranks,
    held: contextlib.ExitStack,
    open_data: Open,
    *,
    ends: tuple[Status, ...] = ("finished",),
) -> Start:
    """Find the newest intact checkpoint of a run, from which it resumes, and hold its lock.

    A run whose outcome is one of ``ends`` is over: nothing is left to do.
    """
    run = Run.open(folder)
    if not run.is_kept:  # otherwise nothing is written, and there is no folder for a lock
        held.enter_context(lock(folder))
    recorded = TrainConfig.from_dict(run.config)
    over = None
    if (outcome := run.outcome) in ends:
        message = f"the run in {folder} has already {outcome}; nothing is left to do"
        over = Start(run=run, config=recorded, event="over", message=message)
    if over is not None and config is None:  # its data may be gone
        return over
    if over is None and run.is_kept:
        raise ValueError(
            f"{run.folder.parent} keeps only the record of {run.name}, which has {outcome or 'not ended'}, "
            "and no checkpoints to resume from; give its run directory, or train it again in another folder"
        )
    if config is not None:  # the data may have moved
        recorded = dataclasses.replace(recorded, data=config.data.resolve())
    if not recorded.data.exists():
        raise ValueError(
            f"{recorded.data} does not exist any more; if it has moved, give the folder with --data"
        )
    dataset = open_data(recorded.data)
    if config is not None:
        _check_same(recorded, config.resolve(dataset.vocab_size), folder)
    run.check_data(dataset.folder, dataset.fingerprint)
    if over is not None:
        return over
    check_run(recorded, dataset, ranks)
    found, remarks = checkpoint_files.find(run.checkpoints)
    remarks += differences(run.environment, _environment(dataset, ranks))
    if found is None:
        message = "; ".join(["from the beginning, because there is no checkpoint", *remarks])
        return Start(run=run, config=recorded, event="resumed", message=message)
    path, manifest = found
    manifest.check_config(path, recorded)
    return Start(
        run=run,
        config=recorded,
        event="resumed",
        message="; ".join([f"from {path.name}", *remarks]),
        checkpoint=path,
        step=manifest.step,
        metrics_offset=manifest.metrics_offset,
        metrics_sha256=manifest.metrics_sha256,
        seconds=manifest.seconds,
    )


def check_run(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> None:
    """Raise ValueError if the machine, the ranks or the data do not fit the configuration."""
    ranks.rows(config.batch)
    is_sharded = ranks.size > 1 and config.parallel == "fsdp2"
    if is_sharded and config.micro_batch is None and ranks.device.type != "cpu":
        raise ValueError(
            "fsdp2 needs --micro-batch: the search for the largest one that fits runs the whole model on one "
            "GPU, which sharding is meant to avoid"
        )
    check_device(config.model, ranks.device)
    check_memory(config, ranks)
    if config.measure.wandb is not None:
        import_wandb()
    check_optimizer(config)
    Batches(dataset.train, context=config.model.context, batch=config.batch, seed=config.seed)
    if config.measure.validation_every:
        if not config.measure.few_validation:
            check_validation_size(dataset.validation, config.model.context)
        validation_sequences(dataset.validation, config.model.context, config.measure.validation_sequences)
    for file in (dataset.train, dataset.validation):
        file.check(config.model.vocab_size)


def _check_same(recorded: TrainConfig, requested: TrainConfig, folder: Path) -> None:
    if requested.fingerprint == recorded.fingerprint:
        return
    differing = [
        f"{name} is {there!r} there and {here!r} here"
        for name, (there, here) in recorded.differences(requested).items()
    ]
    raise ValueError(
        f"{folder} holds a run with a different configuration: {', '.join(differing)}. A run is resumed with "
        "the configuration that it started with: give the same options, resume it without any (merit train "
        f"--resume {folder}), or choose another folder."
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
