"""Atomic checkpoints that load on any number of ranks and run no code when loaded.

Torch's distributed checkpoints do the sharding, with their safetensors storage: the default storage unpickles
its `.metadata` file. A checkpoint is written under a temporary name, flushed to disk and then renamed, so a
folder with the final name was complete when it was written; see checkpoint_files.py. On several nodes the run
directory must be on a shared file system.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import warnings
from collections.abc import Iterator
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

from merit_lab.data.tokens import hash_file
from merit_lab.runs import Mark, durable, step_path
from merit_lab.train import packed_state
from merit_lab.train.checkpoint_files import (
    Damaged,
    Manifest,
    complete_ones,
    read_manifest,
    shards_in,
)
from merit_lab.train.parallel import Ranks, unshared
from merit_lab.train.steps import (
    AnyOptimizer,
    copy_into,
    has_modes,
    parts_of,
    weights_of,
    weights_to_use,
)

_PARTIAL = ".partial"


def save(
    folder: Path,
    module: nn.Module,
    optimizer: AnyOptimizer,
    ranks: Ranks,
    *,
    step: int,
    metrics: Mark,
    seconds: float,
    config: str,
    keep: int,
) -> Path:
    """Write a checkpoint and remove the oldest beyond ``keep``.

    Every rank must call this. ``metrics`` is the end of the metrics file.

    An OSError, such as a full disk, leaves the earlier checkpoints untouched.
    """
    target = step_path(folder, step)
    partial = target.with_name(target.name + _PARTIAL)
    ranks.first(lambda: _make_room(folder, partial))
    try:
        packed = _write(partial, module, optimizer, ranks)
        files = _hash_files(partial, ranks)
        manifest = Manifest(
            step=step,
            metrics=metrics,
            seconds=seconds,
            config=config,
            files=files,
            optimizers=packed,
        )
        ranks.first(lambda: _complete(partial, target, manifest))
    except OSError:
        ranks.first(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise
    ranks.first(lambda: _tidy(target, keep))
    return target


def load(path: Path, module: nn.Module, optimizer: AnyOptimizer, ranks: Ranks) -> None:
    """Read weights and optimizer state, written by any number of ranks. Every rank must call this."""
    manifest = read_manifest(path)
    if manifest.optimizers is None:
        assert isinstance(optimizer, Optimizer), "a pair's state is packed"
        state = _MadeState(module, optimizer)
        _read(path, state.tensors, ranks)
        state.apply(module, optimizer)
    else:
        for part, packed in zip(parts_of(optimizer), manifest.optimizers, strict=True):
            tensors = packed_state.to_read_into(part, packed)
            _read(path, tensors, ranks)
            packed_state.unpack(part, packed, tensors)
    load_weights(path, module, ranks)
    if manifest.optimizers is not None and has_modes(optimizer):
        weights = dict(_trained_weights(optimizer))
        trained = {name: torch.empty_like(weight) for name, weight in weights.items()}
        _read(path, trained, ranks)
        copy_into(list(weights.values()), list(trained.values()))


def load_weights(path: Path, module: nn.Module, ranks: Ranks) -> None:
    """Read only the weights."""
    state = get_model_state_dict(module)
    _read(path, _model_tensors(module, state), ranks)
    set_model_state_dict(module, state)


def _read(path: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Read into existing tensors, by name."""
    reader = HuggingFaceStorageReader(str(path))
    try:
        with _alone_without_a_warning():
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=ranks.size == 1)
    except CheckpointException as error:
        raise Damaged(f"{path} cannot be loaded ({_cause(error)})") from error


def _model_tensors(module: nn.Module, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the weights by their names in the file; a tied weight has the first of its names."""
    state = get_model_state_dict(module) if state is None else state
    model = unshared(module)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    again = names - {name for name, _ in model.named_parameters()}
    return {f"model.{name}": value for name, value in state.items() if name not in again}


def _trained_weights(optimizer: AnyOptimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of optimizers with modes, by the names of their trained values in the file."""
    return [
        (f"trained.{name}", weight)
        for part in parts_of(optimizer)
        if has_modes(part)
        for name, weight in zip(packed_state.names_of(part), weights_of(part), strict=True)
    ]


class _MadeState:
    """The state that an optimizer creates in a step that changes nothing, as one dictionary of tensors."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = cast("dict[str, Any]", get_optimizer_state_dict(module, optimizer))
        self.tensors: dict[str, Any] = {}
        for name, values in self._optimizer["state"].items():
            for key, value in values.items():
                # A step count is a number, or a scalar, which safetensors cannot read in slices.
                tensor = torch.as_tensor(value, dtype=None if torch.is_tensor(value) else torch.float64)
                self.tensors[f"optimizer.{name}.{key}"] = tensor.reshape(-1) if tensor.ndim == 0 else tensor

    def apply(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Put the tensors that were read back into the optimizer."""
        for name, values in self._optimizer["state"].items():
            for key, value in values.items():
                if not torch.is_tensor(value):
                    values[key] = type(value)(self.tensors[f"optimizer.{name}.{key}"].item())
        set_optimizer_state_dict(module, optimizer, self._optimizer)


def check_state(optimizer: AnyOptimizer) -> None:
    """Raise ValueError if the state of an optimizer, after a step, cannot be stored in a checkpoint."""
    if not packed_state.is_of_this_package(optimizer):
        for part in parts_of(optimizer):
            packed_state.pack(part, {})


def _write(
    path: Path, module: nn.Module, optimizer: AnyOptimizer, ranks: Ranks
) -> list[dict[str, Any]] | None:
    """Write weights and state; return the structure of the state of external optimizers."""
    if packed_state.is_of_this_package(optimizer):
        tensors = _model_tensors(module) | _MadeState(module, optimizer).tensors
        _write_tensors(path, tensors, ranks)
        return None
    tensors = {}
    packed = [packed_state.pack(part, tensors) for part in parts_of(optimizer)]
    with weights_to_use(optimizer, module) as trained:
        tensors |= {
            name: weight for (name, _), weight in zip(_trained_weights(optimizer), trained, strict=True)
        }
        tensors |= _model_tensors(module)
        _write_tensors(path, tensors, ranks)
    return packed


def _write_tensors(path: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    try:
        with _alone_without_a_warning():
            state_dict_saver.save(tensors, storage_writer=writer, no_dist=ranks.size == 1)
    except CheckpointException as error:
        cause = _cause(error)
        number, text = getattr(cause, "errno", None), getattr(cause, "strerror", None)
        raise OSError(number or errno.EIO, text or str(cause)) from error


def _cause(error: CheckpointException) -> BaseException:
    """Return what went wrong on the ranks. Raise on a second Ctrl-C, which torch reports as a failure."""
    causes = [cause for cause, _ in error.failures.values()]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        raise KeyboardInterrupt from error
    return next((cause for cause in causes if isinstance(cause, OSError)), causes[0])


@contextlib.contextmanager
def _alone_without_a_warning() -> Iterator[None]:
    """Silence torch's warning that there is only one process: that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield


def _hash_files(path: Path, ranks: Ranks) -> dict[str, str]:
    """Return the sha256 of all files; each rank hashes a share of them."""

    def hash_share() -> dict[str, str]:
        names = sorted(shards_in(path))
        return {name: hash_file(path / name) for name in names[ranks.rank :: ranks.size]}

    return {name: digest for share in ranks.gather(hash_share) for name, digest in share.items()}


def _complete(partial: Path, target: Path, manifest: Manifest) -> None:
    """Give a written checkpoint its manifest and its final name."""
    durable.write(partial / "manifest.json", manifest.to_bytes().decode())
    if target.exists():  # damaged: otherwise the run would have resumed from it
        shutil.rmtree(target)
    partial.rename(target)
    durable.sync_folder(target.parent)


def _make_room(folder: Path, partial: Path) -> None:
    """Remove partial checkpoints of a process that died while writing."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"*{_PARTIAL}"):
        shutil.rmtree(stale)
    partial.mkdir()


def _tidy(newest: Path, keep: int) -> None:
    """Keep ``keep`` checkpoints up to ``newest``; those with later steps are damaged and are removed too.

    If one cannot be removed now, the next save tries again.
    """
    paths = complete_ones(newest.parent)
    place = paths.index(newest)
    for path in paths[:place] + paths[place + keep :]:
        shutil.rmtree(path, ignore_errors=True)
