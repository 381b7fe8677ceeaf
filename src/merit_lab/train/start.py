"""Start or resume a run: everything that can be wrong is checked here, before any compute."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from merit_lab.data import Batches, Dataset, check_validation_size, validation_sequences
from merit_lab.models import num_parameters
from merit_lab.models.base import check_device
from merit_lab.runs import (
    Run,
    Status,
    differences,
    environment,
    holds_run,
    import_wandb,
    is_locked,
    lock,
    refuse_run,
)
from merit_lab.text import amount
from merit_lab.train import checkpoint
from merit_lab.train.checkpoint import Manifest
from merit_lab.train.config import TrainConfig
from merit_lab.train.optimizer import options_in_use
from merit_lab.train.parallel import Ranks

Resume = bool | Literal["auto"]
"""Whether to resume a run; "auto" starts it if there is none."""

# Seconds that a restart waits for the previous process. A killed process has released its lock, but a file
# server keeps the locks of a dead node until their lease expires: 90 seconds on NFS.
_RESTART_TIMEOUT = 120.0
_LIMIT_OF_A_CONTAINER = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run that is ready to train, from its first step or from a checkpoint."""

    run: Run
    config: TrainConfig
    event: Literal["started", "resumed", "over"]
    message: str
    checkpoint: tuple[Path, Manifest] | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.checkpoint[1].step if self.checkpoint else 0


@dataclass(frozen=True)
class Starting:
    """How a run starts: on which ranks, with which data, and what holds its lock until it ends."""

    ranks: Ranks
    open_data: Callable[[Path], Dataset]
    held: contextlib.ExitStack

    def start(self, config: TrainConfig | None, folder: Path, resume: Resume) -> Start:
        """Start a run or resume one, as ``train`` is asked to.

        With "auto" a diverged run is over too: it would diverge again in every restart.
        """
        if resume is True:
            return self._resume(config, folder, ends=("finished",))
        if config is None:
            raise ValueError("a new run needs a configuration; pass one, or resume=True")
        if resume and holds_run(folder):
            return self._resume(config, folder, ends=("finished", "diverged"))
        return self._begin(config, folder)

    def _begin(self, config: TrainConfig, folder: Path) -> Start:
        """Create the directory of a new run and hold its lock. If the run is refused, nothing is created."""
        if not is_locked(folder):  # otherwise taking the lock reports which process uses it
            refuse_run(folder)
        dataset = self.open_data(config.data)
        config = dataclasses.replace(config, data=config.data.resolve()).resolve(dataset.vocab_size)
        options = check_run(config, dataset, self.ranks)
        self.held.enter_context(lock(folder))
        size, chosen = num_parameters(config.model), config.optimizer
        about = {**_environment(dataset, self.ranks), "parameters": size, "optimizer": options}
        run = Run.create(folder, config.to_dict(), about)
        rest = f", {chosen.rest} with {chosen.rest_lr:g} for the rest" if chosen.rest is not None else ""
        message = (
            f"{config.model.family} of {amount(size)} parameters, {chosen.name} with learning rate "
            f"{chosen.lr:g}{rest}, {config.steps} steps of {config.batch * config.model.context} tokens"
        )
        return Start(run=run, config=config, event="started", message=message)

    def _resume(self, config: TrainConfig | None, folder: Path, *, ends: tuple[Status, ...]) -> Start:
        """Find the newest intact checkpoint of a run, from which it resumes, and hold its lock.

        A run whose outcome is one of ``ends`` is over: nothing is left to do.
        """
        run = Run.open(folder)
        if run.kept is None:  # otherwise nothing is written, and there is no folder for a lock
            self.held.enter_context(lock(folder))
        recorded = TrainConfig.from_dict(run.config)
        outcome = run.outcome
        message = f"the run in {folder} has already {outcome}; nothing is left to do"
        over = Start(run=run, config=recorded, event="over", message=message) if outcome in ends else None
        if over is not None and config is None:  # its data may be gone
            return over
        if over is None and run.kept:
            raise ValueError(
                f"{run.folder.parent} keeps only the record of {run.name}, which has "
                f"{outcome or 'not ended'}, and no checkpoints to resume from; give its run directory, or "
                "train it again in another folder"
            )
        if config is not None:  # the data may have moved
            recorded = dataclasses.replace(recorded, data=config.data.resolve())
        if not recorded.data.exists():
            raise ValueError(
                f"{recorded.data} does not exist any more; if it has moved, give the folder with --data"
            )
        dataset = self.open_data(recorded.data)
        if config is not None:
            _check_same(recorded, config.resolve(dataset.vocab_size), folder)
        run.check_data(dataset.folder, dataset.fingerprint)
        if over is not None:
            return over
        check_run(recorded, dataset, self.ranks)
        found, remarks = checkpoint.find(run.checkpoints)
        remarks += differences(run.environment, _environment(dataset, self.ranks))
        origin = "from the beginning, because there is no checkpoint"
        if found is not None:
            path, manifest = found
            manifest.check_config(path, recorded)
            origin = f"from {path.name}"
        message = "; ".join([origin, *remarks])
        return Start(run=run, config=recorded, event="resumed", message=message, checkpoint=found)


def wait_for_previous_process(folder: Path) -> None:
    """Wait until the process that uses a run directory ends, up to a time limit."""
    if is_locked(folder):
        print(f"{folder} is in use; waiting for at most {_RESTART_TIMEOUT:g} seconds", file=sys.stderr)
    deadline = time.monotonic() + _RESTART_TIMEOUT
    while is_locked(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def check_run(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> list[dict[str, Any]]:
    """Raise ValueError if machine, ranks or data do not fit the configuration; return its options in use."""
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
    options = options_in_use(config)
    context, measure = config.model.context, config.measure
    Batches(dataset.train, context=context, batch=config.batch, seed=config.seed)
    if measure.validation_every:
        if not measure.few_validation:
            check_validation_size(dataset.validation, context)
        validation_sequences(dataset.validation, context, measure.validation_sequences)
    for file in (dataset.train, dataset.validation):
        file.check(config.model.vocab_size)
    return options


def check_memory(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ValueError if weights, gradients and the tokens of a step need more memory than there is."""
    parameters = num_parameters(config.model)
    weights = 4 * parameters
    tokens = 16 * config.batch // ranks.size * config.model.context  # input and target, int64
    trained = 2 * weights // (ranks.size if config.parallel == "fsdp2" else 1) + tokens
    on_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or its limit is "max"
        on_host = min(on_host, int(_LIMIT_OF_A_CONTAINER.read_text()))
    places = [(max(weights, trained), on_host, "this machine")]
    if ranks.device.type == "cuda":
        on_device = torch.cuda.get_device_properties(ranks.device).total_memory
        places = [(weights, on_host, "this machine"), (trained, on_device, "the GPU")]
    for needed, available, place in places:
        if needed > available:
            raise ValueError(
                f"{parameters / 1e6:.1f}M parameters and batches of {config.batch} sequences of "
                f"{config.model.context} tokens need at least {needed / 2**30:,.1f} GiB, but {place} has "
                f"{available / 2**30:,.1f} GiB; choose a smaller --batch or model (--model.layers, "
                "--model.width, --model.context)"
            )


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
