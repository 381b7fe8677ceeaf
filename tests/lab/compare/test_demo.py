"""`merit demo`: from the text to the page in one command."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from merit_lab.compare import demo
from merit_lab.data import Dataset
from merit_lab.train import Interrupted


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps of four sequences, in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    for kind, setup in demo.SETUPS.items():
        short = dataclasses.replace(setup, model="tiny", batch=4, steps=2)
        monkeypatch.setitem(demo.SETUPS, kind, short)


def test_the_output_ends_with_the_summary_and_the_path_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([]) == 0
    *_, sentence, place = capsys.readouterr().out.splitlines()
    assert "had the lowest validation loss" in sentence
    assert "one seed each, so the difference" in sentence
    assert all(name in sentence for name in ("AdamW", "LAMB", "MERIT", "Muon", "MuonMERIT"))
    page = tmp_path / "runs" / "demo" / "report" / "index.html"
    assert place == f"Open {page} in a browser to see the curves."
    assert page.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the text is that of the installed packages")
def test_the_text_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "compare", lambda *_, **__: None)
    assert demo.main([]) == 0
    index = Dataset.open(tmp_path / "data" / "demo").index
    assert index is not None
    assert index.recipe["corpus"]["name"] == "demo"


def test_an_interrupt_exits_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: Any, **__: Any) -> None:
        raise Interrupted(signal.SIGINT, "stopped by SIGINT after step 1, with a checkpoint")

    monkeypatch.setattr(demo, "compare", compare)
    assert demo.main([]) == 130
    assert capsys.readouterr().err.endswith(
        "merit demo: stopped by SIGINT after step 1, with a checkpoint. "
        "Run the same command again to continue.\n"
    )


def test_a_file_in_place_of_the_data_folder_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert demo.main(["--data", "file"]) != 0
    assert "file" in capsys.readouterr().err
