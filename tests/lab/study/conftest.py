"""Studies that take a moment."""

import fake_runs
import pytest

from merit_lab.study import search


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_runs.Fake:
    """Runs have losses by a formula."""
    fake = fake_runs.Fake()
    monkeypatch.setattr(search, "train", fake.train)
    monkeypatch.setattr(search, "estimate", lambda *_, **__: "")
    return fake
