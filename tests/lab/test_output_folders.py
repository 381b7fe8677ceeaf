"""Every command that writes into a folder refuses a file in its place, before it does anything else."""

from pathlib import Path

import pytest

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
