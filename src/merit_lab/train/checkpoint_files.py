"""The files of checkpoints: which there are, and whether they are as they were written.

    checkpoints/step-00000100/
        shard-00001-....safetensors    each rank's part of the weights and of the optimizer's state
        manifest.json                  step, metrics offset, config, the sha256 of each file and its own

The hashes detect accidents, not tampering: anyone who can write to the folder can also update them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from merit_lab.data.tokens import hash_file
from merit_lab.json_values import build, read_object
from merit_lab.runs import step_path
from merit_lab.train.config import TrainConfig

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
    optimizers: list[dict[str, Any]] | None = None
    """Structure of the state of external optimizers; None if the state consists of tensors and numbers."""

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


_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


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
        try:
            actual = hash_file(path / name)
        except _GONE as error:
            raise Damaged(f"{path / name} cannot be read ({error})") from None
        except OSError as error:
            raise _perhaps_later(error) from None
        if actual != digest:
            raise Damaged(f"{path / name} was changed: its sha256 is {actual}, not {digest}")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raise Damaged if it was changed."""
    file = path / "manifest.json"
    try:
        values = read_object(file, "it was changed")
        values.pop("sha256", None)
        if file.read_bytes() != _written(values):
            raise Damaged(f"{file} was changed: its own sha256 does not match")
        manifest = build(Manifest, values)
    except Damaged:
        raise
    except (*_GONE, ValueError) as error:
        raise Damaged(f"{path} has no readable manifest ({error})") from None
    except OSError as error:
        raise _perhaps_later(error) from None
    if path != step_path(path.parent, manifest.step):
        raise Damaged(f"{path} has the manifest of another step, {manifest.step}")
    return manifest


def _perhaps_later(error: OSError) -> OSError:
    """A file that cannot be read now is not lost: going back to an older checkpoint would delete it."""
    way_out = "try again later, or remove this checkpoint to go on from an older one"
    return OSError(error.errno, f"{error.strerror}; {way_out}", error.filename)


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
