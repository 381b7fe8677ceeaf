"""Every command that writes into a folder refuses a file in its place, before it does anything else."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from merit_lab.folders import check_writable
from merit_optim import cli

STUDY = ["tiny", "--data", "{data}", "--steps", "2"]


@pytest.mark.parametrize(
    "command",
    [
        ["train", *STUDY, "--out"],
        ["compare", *STUDY, "--out"],
        ["compare", *STUDY, "--jobs", "2", "--out"],
        ["sweep", *STUDY, "--out"],
        ["scale", *STUDY, "--target", "1", "--batches", "2", "--lr", "1e-3", "--out"],
        ["arena", *STUDY, "--out"],
        ["reproduce", "fig4", "--data", "{data}", "--yes", "--out"],
        ["report", "{run}", "--out"],
        ["keep", "{run}", "--out"],
        ["export", "{run}"],
        ["prepare", "demo", "--out"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_file_in_the_place_of_a_folder_is_refused(
    command: list[str],
    name: str,
    data: Path,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "file", tmp_path / name
    file.write_text("kept")
    assert cli.main([word.format(data=data, run=trained) for word in command] + [str(out)]) == 1
    errors = capsys.readouterr().err
    assert f"merit {command[0]}: {file} is a file, but a folder is needed" in errors
    assert errors.count("\n") == 1
    assert file.read_text() == "kept"


@pytest.mark.parametrize(("command", "folder"), [("batch-size", "noise"), ("curvature", "curvature")])
def test_a_run_that_cannot_take_a_measurement_is_not_measured(
    command: str, folder: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / folder).touch()
    assert cli.main([command, str(run)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"merit {command}: {run / folder} is a file, but a folder is needed")
    assert errors.count("\n") == 1


def test_a_folder_that_takes_no_byte_is_refused(
    tmp_path: Path, no_file_larger_than: Callable[[int], AbstractContextManager[None]]
) -> None:
    check_writable(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    refused = pytest.raises(OSError, match=r"^nothing can be written to .*new \(File too large\); choose ano")
    with refused, no_file_larger_than(0):
        check_writable(tmp_path / "new")
