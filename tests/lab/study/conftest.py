"""Studies that take a moment."""

import math

import fake_runs
import pytest

from merit_lab.study import search


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[fake_runs.FakePool]:
    """Runs have losses by a formula."""
    fake = fake_runs.FakePool
    monkeypatch.setattr(fake, "trained", [])
    monkeypatch.setattr(fake, "loss", staticmethod(fake_runs.valley))
    monkeypatch.setattr(fake, "stop_after", math.inf)
    monkeypatch.setattr(search, "Pool", fake)
    monkeypatch.setattr(search, "estimate", lambda *_, **__: "")
    return fake
