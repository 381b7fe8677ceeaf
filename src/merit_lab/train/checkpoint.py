"""Atomic checkpoints that load on any number of ranks and run no code when loaded.

    checkpoints/step-00000100/
        shard-00001-....safetensors    each rank's part of the weights and of the optimizer's state
        manifest.json                  step, metrics offset, config, the sha256 of each file and its own

Torch's distributed checkpoints do the sharding, with their safetensors storage: the default storage unpickles
its `.metadata` file. A checkpoint is written under a temporary name, flushed to disk and then renamed, so a
folder with the final name was complete when it was written. The hashes detect accidents, not tampering:
anyone who can write to the folder can also update them. On several nodes the run directory must be on a
shared file system.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from merit_lab.data.tokens import hash_file
from merit_lab.json_values import build, read_object
from merit_lab.runs import Mark, durable, step_path
from merit_lab.train import packed_state
from merit_lab.train.config import TrainConfig
from merit_lab.train.packed_state import Tensors
from merit_lab.train.parallel import Ranks, unshared
from merit_lab.train.steps import AnyOptimizer, has_modes, parts_of, weights_of, weights_to_use

_PARTIAL = ".partial"
_SHARD = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, stored in its ``manifest.json``."""

    step: int
    """Steps done."""
    metrics: tuple[int, str]
    """Where the metrics file ended."""
    seconds: float
    """Training time so far."""
    config: str
    """Fingerprint of the configuration."""
    files: dict[str, str]
    """The sha256 of each file."""
    optimizers: list[dict[str, Any]]
    """Structure of the state of each optimizer."""

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        return _written(asdict(self))

    def check_config(self, path: Path, config: TrainConfig) -> None:
        """Raise ValueError if the checkpoint at ``path`` belongs to another configuration."""
        if self.config != config.fingerprint:
            raise ValueError(
                f"{path} was written with a different configuration than "
                f"{path.parent.parent / 'config.json'}; undo the change there, or start a new run"
            )


class Damaged(ValueError):
    """A checkpoint that cannot be used."""


def find(folder: Path) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """Return the newest intact checkpoint, and what is wrong with newer ones."""
    complaints: list[str] = []
    for path in complete_ones(folder):
        try:
            return (path, read(path)), complaints
        except Damaged as error:
            complaints.append(str(error))
    return None, complaints


def read(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raise Damaged if any of its files was changed."""
    manifest = read_manifest(path)
    # Torch reads every file in the folder; of two files with the same tensor one would win.
    if unlisted := shards_in(path) - manifest.files.keys():
        raise Damaged(f"{path / min(unlisted)} was not written with the checkpoint")
    for name, digest in manifest.files.items():
        with _reading(f"{path / name} cannot be read"):
            actual = hash_file(path / name)
        if actual != digest:
            raise Damaged(f"{path / name} was changed: its sha256 is {actual}, not {digest}")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raise Damaged if it was changed."""
    file = path / "manifest.json"
    with _reading(f"{path} has no readable manifest"):
        values = read_object(file, "it was changed")
        values.pop("sha256", None)
        is_whole, manifest = file.read_bytes() == _written(values), build(Manifest, values)
    if not is_whole:
        raise Damaged(f"{file} was changed: its own sha256 does not match")
    if path != step_path(path.parent, manifest.step):
        raise Damaged(f"{path} has the manifest of another step, {manifest.step}")
    return manifest


@contextlib.contextmanager
def _reading(problem: str) -> Iterator[None]:
    """Say with Damaged that a file is not there or not as it was written.

    One that cannot be read now is not lost: going back to an older checkpoint would delete it.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        raise Damaged(f"{problem} ({error})") from None
    except OSError as error:
        way_out = "try again later, or remove this checkpoint to go on from an older one"
        raise OSError(error.errno, f"{error.strerror}; {way_out}", error.filename) from None


def _written(values: dict[str, Any]) -> bytes:
    """Return the exact bytes of a manifest file, including the hash of its other values."""
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return (json.dumps({**values, "sha256": digest}, indent=2) + "\n").encode()


def shards_in(path: Path) -> set[str]:
    """Return the files of a checkpoint that torch reads tensors from."""
    return {file.name for file in path.iterdir() if file.name.endswith(_SHARD)}


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order; other names are ignored."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def complete_ones(folder: Path) -> list[Path]:
    """Return the complete checkpoints, newest first."""
    return [step_path(folder, step) for step in reversed(steps_of(folder))]


# --- saving and loading ---


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
        manifest = Manifest(
            step=step,
            metrics=metrics,
            seconds=seconds,
            config=config,
            files=_hash_files(partial, ranks),
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
    for part, packed in zip(parts_of(optimizer), read_manifest(path).optimizers, strict=True):
        tensors = packed_state.to_read_into(part, packed, module)
        _read(path, tensors, ranks)
        packed_state.unpack(part, packed, tensors)
    load_weights(path, module, ranks)
    _read(path, _trained_weights(optimizer), ranks)


def load_weights(path: Path, module: nn.Module, ranks: Ranks) -> None:
    """Read only the weights."""
    _read(path, _model_tensors(module), ranks)


def _read(path: Path, tensors: Tensors, ranks: Ranks) -> None:
    """Read into existing tensors, by name."""
    if not tensors:
        return
    reader = HuggingFaceStorageReader(str(path))
    try:
        with _alone_without_a_warning():
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=ranks.size == 1)
    except CheckpointException as error:
        raise Damaged(f"{path} cannot be loaded ({_cause(error)})") from error


def _model_tensors(module: nn.Module) -> Tensors:
    """Return the weights by their names in the file; a tied weight has the first of its names."""
    model = unshared(module)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    again = names - {name for name, _ in model.named_parameters()}
    return {f"model.{name}": value for name, value in model.state_dict().items() if name not in again}


def _trained_weights(optimizer: AnyOptimizer) -> Tensors:
    """Return the weights of optimizers with modes, by the names of their trained values in the file."""
    return {
        f"trained.{name}": weight.detach()
        for part in parts_of(optimizer)
        if has_modes(part)
        for name, weight in zip(packed_state.names_of(part), weights_of(part), strict=True)
    }


def check_state(optimizer: AnyOptimizer) -> None:
    """Raise ValueError if the state of an optimizer, after a step, cannot be stored in a checkpoint."""
    for part in parts_of(optimizer):
        packed_state.pack(part, {})


def _write(path: Path, module: nn.Module, optimizer: AnyOptimizer, ranks: Ranks) -> list[Any]:
    """Write weights and state; return the structure of the state of each optimizer."""
    tensors: Tensors = {}
    packed = [packed_state.pack(part, tensors) for part in parts_of(optimizer)]
    names = _trained_weights(optimizer)
    with weights_to_use(optimizer, module) as trained:
        tensors |= dict(zip(names, trained, strict=True)) | _model_tensors(module)
        _write_tensors(path, tensors, ranks)
    return packed


def _write_tensors(path: Path, tensors: Tensors, ranks: Ranks) -> None:
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
