"""The environment of a run: what one needs to know if its result cannot be reproduced."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import merit_optim

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "transformers")


def environment(*, device: torch.device, data: dict[str, Any], num_ranks: int = 1) -> dict[str, Any]:
    """Describe this process, for environment.json.

    Args:
        device: the device of the run.
        data: where the tokens are and their fingerprint.
        num_ranks: how many processes take part.
    """
    import torch

    return {
        "versions": _versions(),
        "commit": _commit(),
        "device": _describe(device),
        "num_ranks": num_ranks,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "num_threads": torch.get_num_threads(),
        "data": data,
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return differences that can change numbers, such as "torch 2.11.0 -> 2.13.0"."""
    old, new = before.get("versions", {}), now["versions"]
    pairs = {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})}
    pairs |= {name: (before.get(name), now[name]) for name in ("commit", "num_ranks", "num_threads")}
    pairs["device"] = before.get("device", {}).get("name"), now["device"]["name"]
    return [f"{name} {was} -> {this}" for name, (was, this) in pairs.items() if was != this]


def _versions() -> dict[str, str]:
    import torch

    versions = {"merit-optim": merit_optim.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return versions


def _commit() -> str | None:
    """Return the commit of the running code, plus "+changes" if files differ; None if it is installed."""
    package = Path(merit_optim.__file__)
    try:
        # A package installed inside someone's repository is not tracked by it.
        _git(package, "ls-files", "--error-unmatch", package.name)
        commit = _git(package, "rev-parse", "HEAD")
        return commit + "+changes" if _git(package, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(package: Path, *arguments: str) -> str:
    command = ["git", "-C", str(package.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def _describe(device: torch.device) -> dict[str, Any]:
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
    return {
        "type": device.type,
        "name": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
    }
