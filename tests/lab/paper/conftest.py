"""A scale far below tiny, and its data."""

import pytest
from toy_scale import make_scale

from merit_lab.paper.scales import SCALES, Scale


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Scale:
    """In the place of tiny."""
    monkeypatch.setitem(SCALES, "tiny", scale := make_scale())
    return scale
