"""Checkpoints that are whole or not there, load on any number of ranks, and run no code when loaded.

    checkpoints/step-00000100/
        shard-00001-....safetensors    each rank's part of the weights and of the optimizer's state
        manifest.json                  step, place in the metrics, config, and the sha256 of each file

Torch's distributed checkpoints do the sharding, with their safetensors storage: the usual one unpickles
its `.metadata` file. A checkpoint is written under another name, flushed to the disk and then renamed, so
a folder with the final name was complete once; the hashes tell whether it still is. On several nodes the
run directory must be on a file system that all of them see.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from merit_lab.record import durable
from merit_lab.train.parallel import Ranks

_FORMAT = 1
_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    """Steps done."""
    metrics_offset: int
    """Where the metrics file ended."""
    seconds: float
    """How long training had taken."""
    config: str
    """Fingerprint of the configuration."""
    files: dict[str, str]
    """The sha256 of each file."""
    groups: list[dict[str, float]] = field(default_factory=list)
    """Numbers in the optimizer's parameter groups, where some optimizers count."""
    format: int = _FORMAT


class Damaged(ValueError):
    """A checkpoint that cannot be used."""


def save(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    *,
    step: int,
    metrics_offset: int,
    seconds: float,
    config: str,
    keep: int,
) -> Path:
    """Write a checkpoint and remove the oldest beyond ``keep``; every rank calls this.

    An OSError (a full disk, for one) leaves the earlier checkpoints as they are.
    """
    target = path_of(folder, step)
    partial = target.with_name(target.name + _PARTIAL)
    ranks.first(lambda: _make_room(folder, partial))
    try:
        _write_tensors(partial, module, optimizer, ranks)
        files = _hash_files(partial, ranks)
        manifest = Manifest(
            step=step,
            metrics_offset=metrics_offset,
            seconds=seconds,
            config=config,
            files=files,
            groups=_group_numbers(optimizer),
        )
        ranks.first(lambda: _complete(partial, target, manifest))
    except OSError:
        ranks.first(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    ranks.first(lambda: _tidy(target, keep))
    return target


def find(folder: Path) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones."""
    complaints: list[str] = []
    for path in _complete_ones(folder):
        try:
            return (path, read(path)), complaints
        except Damaged as error:
            complaints.append(str(error))
    return None, complaints


def read(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written; raises Damaged otherwise."""
    try:
        values = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError) as error:
        raise Damaged(f"{path} has no readable manifest ({error})") from None
    if manifest.format != _FORMAT:
        raise Damaged(f"{path} has format {manifest.format}; this version reads format {_FORMAT}")
    for name, digest in manifest.files.items():
        try:
            found = _sha256(path / name)
        except OSError as error:
            raise Damaged(f"{path / name} cannot be read ({error})") from None
        if found != digest:
            raise Damaged(f"{path / name} is not what was written: its sha256 is {found}, not {digest}")
    return manifest


def load(path: Path, module: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Read weights and optimizer state, whatever number of ranks wrote them; every rank calls this."""
    state = _State(module, optimizer)
    reader = HuggingFaceStorageReader(str(path))
    with _alone_without_a_warning():
        state_dict_loader.load(state.tensors, storage_reader=reader, no_dist=ranks.size == 1)
    state.apply(module, optimizer)
    numbers = json.loads((path / "manifest.json").read_text(encoding="utf-8")).get("groups", [])
    for group, own in zip(optimizer.param_groups, numbers, strict=False):  # one group for weights alone
        group.update({key: value for key, value in own.items() if key in group})


def _group_numbers(optimizer: Optimizer) -> list[dict[str, float]]:
    """The numbers among the options of each group, but the learning rate, which follows from the step."""
    return [
        {key: value for key, value in group.items() if type(value) in (int, float) and key != "lr"}
        for group in optimizer.param_groups
    ]


class _State:
    """Model and optimizer as one dictionary of tensors."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._model = get_model_state_dict(module)
        self._optimizer = cast("dict[str, Any]", get_optimizer_state_dict(module, optimizer))
        self.tensors: dict[str, Any] = {f"model.{name}": value for name, value in self._model.items()}
        for name, values in self._optimizer["state"].items():
            for key, value in values.items():
                # A step count is a scalar, which safetensors cannot be read in slices of, or a number.
                tensor = torch.as_tensor(value, dtype=None if torch.is_tensor(value) else torch.float64)
                self.tensors[f"optimizer.{name}.{key}"] = tensor.reshape(-1) if tensor.ndim == 0 else tensor

    def apply(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Give the tensors, which were read into, back to their owners."""
        for name, values in self._optimizer["state"].items():
            for key, value in values.items():
                if not torch.is_tensor(value):
                    values[key] = type(value)(self.tensors[f"optimizer.{name}.{key}"].item())
        set_model_state_dict(module, self._model)
        set_optimizer_state_dict(module, optimizer, self._optimizer)


def _write_tensors(path: Path, module: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    try:
        with _alone_without_a_warning():
            tensors = _State(module, optimizer).tensors
            state_dict_saver.save(tensors, storage_writer=writer, no_dist=ranks.size == 1)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        cause = next((c for c in causes if isinstance(c, OSError)), causes[0])
        number, text = getattr(cause, "errno", None), getattr(cause, "strerror", None)
        raise OSError(number or errno.EIO, text or str(cause)) from error


@contextlib.contextmanager
def _alone_without_a_warning() -> Iterator[None]:
    """One process is what was meant where torch warns that it sees but one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield


def _hash_files(path: Path, ranks: Ranks) -> dict[str, str]:
    """The sha256 of all files, each rank taking its share of them."""

    def hash_share() -> dict[str, str]:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        return {name: _sha256(path / name) for name in names[ranks.rank :: ranks.size]}

    return {name: digest for share in ranks.gather(hash_share) for name, digest in share.items()}


def _complete(partial: Path, target: Path, manifest: Manifest) -> None:
    """Make a written checkpoint one that will be found."""
    durable.write(partial / "manifest.json", json.dumps(asdict(manifest), indent=2) + "\n")
    if target.exists():  # damaged: had it been good, the run would have gone on from it
        shutil.rmtree(target)
    partial.rename(target)
    durable.sync_folder(target.parent)


def _make_room(folder: Path, partial: Path) -> None:
    """Remove what a process that died while writing left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"*{_PARTIAL}"):
        shutil.rmtree(stale)
    partial.mkdir()


def _tidy(newest: Path, keep: int) -> None:
    """Keep so many checkpoints, up to the newest; what seems newer was passed over because it is damaged.

    One that cannot be removed now is tried again after the next save.
    """
    paths = _complete_ones(newest.parent)
    place = paths.index(newest)
    for path in paths[:place] + paths[place + keep :]:
        shutil.rmtree(path, ignore_errors=True)


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order; what has another name is none of ours."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _complete_ones(folder: Path) -> list[Path]:
    """Checkpoints that were completed, the newest first."""
    return [path_of(folder, step) for step in reversed(steps_of(folder))]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
