"""Orders are permutations, look random, and never change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merit_lab.data.batches import Order


@given(length=st.integers(1, 3000), key=st.text(max_size=10))
def test_every_number_once(length: int, key: str) -> None:
    numbers = Order(length, key)(np.arange(length))
    assert np.array_equal(np.sort(numbers), np.arange(length))


@given(length=st.integers(1, 2**61), position=st.integers(min_value=0))
def test_any_length_without_memory(length: int, position: int) -> None:
    position %= length
    assert 0 <= Order(length, "")(np.array([position]))[0] < length


def test_the_order_never_changes() -> None:
    """A run resumed with another version of this package or of numpy must see the same batches."""
    assert Order(10, "a")(np.arange(10)).tolist() == [8, 5, 0, 1, 7, 6, 2, 4, 9, 3]
    ends = np.array([0, 1, 8_999_999_999])
    assert Order(9_000_000_000, "b")(ends).tolist() == [6601381580, 5379617621, 1404432251]


@pytest.mark.parametrize("length", [2, 3, 5, 16, 17, 50])
def test_the_order_is_uniform(length: int) -> None:
    """Over many keys each number is at each position equally often (chi-square, 6 sigma)."""
    num_keys = 4000
    counts = np.zeros((length, length))
    for key in range(num_keys):
        counts[np.arange(length), Order(length, str(key))(np.arange(length))] += 1
    expected = num_keys / length
    # A row and a column sum to num_keys each: (length - 1)^2 degrees of freedom.
    freedom = (length - 1) ** 2
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom) + 10


def test_neighbours_are_separated() -> None:
    """Neighbours in the file come at unrelated times."""
    numbers = Order(100_000, "key")(np.arange(100_000))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers, np.arange(100_000))[0, 1]) < 0.02
    assert (np.abs(np.diff(numbers)) == 1).sum() < 20  # 2 are expected
