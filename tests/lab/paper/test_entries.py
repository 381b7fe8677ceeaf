"""Every entry, from its runs to its files, at a scale of a few steps."""

from pathlib import Path

import pytest
from markupsafe import escape

from merit_lab.paper.artefact import Result
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.work import Task, reproduce

EVALUATIONS = ("fig5", "fig12", "table1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all entries, as their runs are."""
    return tmp_path_factory.mktemp("reproduce")


TRAINED = ("fig3", "fig5", "fig6", "fig7", "fig9", "fig10", "theorem1", "variants", "norm")
"""Whose runs differ from those of others in more than their rates, batches and lengths, or are measured."""


@pytest.mark.parametrize(
    "name", [name if name in TRAINED else pytest.param(name, marks=pytest.mark.slow) for name in ENTRIES]
)
def test_an_entry_is_made_from_its_runs(name: str, data: Path, folder: Path) -> None:
    (result,) = reproduce(Task(names=(name,), data=data, out=folder, seeds=1, jobs=1))
    assert result == Result.read(folder / name)
    assert escape(ENTRIES[name].title) in (folder / name / "index.html").read_text()
    assert name in (folder / "index.html").read_text()
    if name in EVALUATIONS:
        assert result.outcome == "not run"
        assert "--task-files" in result.missing
        return
    assert result.outcome in ("holds", "does not hold", "not decided")
    assert all(verdict.comparisons for verdict in result.verdicts)
    assert list((folder / name / "figures").glob("*.svg"))
