"""The folders that commands write into."""

from __future__ import annotations

import os
from pathlib import Path


def refuse_file(folder: Path) -> None:
    """Raise NotADirectoryError if a file is in the place of a folder to write into, or of one above it."""
    # Not Path.exists, which raises an error of its own where a name is too long.
    above = (path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    there = next(above, None)
    if there is not None and not there.is_dir():
        purpose = "" if there == folder else f" for {folder}"
        raise NotADirectoryError(
            f"{there} is a file, but a folder is needed{purpose}; name another folder, or move the file away"
        )
