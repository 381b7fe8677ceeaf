"""A scale far below tiny, and its data."""

from pathlib import Path

import pytest
from toy_scale import make_scale

from merit_lab.data import Dataset
from merit_lab.paper.scales import Scale


@pytest.fixture
def toy() -> Scale:
    return make_scale()


@pytest.fixture
def dataset(data: Path) -> Dataset:
    return Dataset.open(data)
