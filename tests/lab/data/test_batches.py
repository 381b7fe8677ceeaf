"""Batches: every window once per epoch, independent of ranks, micro-batches and history."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merit_lab.data import Batches, TokenFile, check_validation_size, validation_sequences
from merit_lab.data.batches import Order


def file_of(num_tokens: int) -> TokenFile:
    """Tokens 0, 1, 2, ...: a sequence tells where it came from. In memory, as only Batches is tested."""
    return TokenFile(Path("memory"), np.arange(num_tokens, dtype=np.uint32))


@st.composite
def batches(draw: st.DrawFn) -> Batches:
    context = draw(st.integers(1, 20))
    num_tokens = draw(st.integers(context + 1, 600))
    return Batches(
        file_of(num_tokens),
        context=context,
        batch=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**70)),
    )


def epoch_starts(source: Batches, epoch: int) -> np.ndarray:
    """First tokens of all sequences of an epoch, in order."""
    begin, end = epoch * source.num_windows, (epoch + 1) * source.num_windows
    steps = range(begin // source.batch, (end - 1) // source.batch + 1)
    rows = np.concatenate([source.sequences(step)[:, 0] for step in steps])
    skipped = steps[0] * source.batch
    return rows[begin - skipped : end - skipped]


@given(batches(), st.integers(0, 50))
def test_a_sequence_is_a_run_of_the_file(source: Batches, step: int) -> None:
    sequences = source.sequences(step)
    assert sequences.shape == (source.batch, source.context + 1)
    assert sequences.dtype == np.int64
    assert np.array_equal(
        sequences - sequences[:, :1], np.tile(np.arange(source.context + 1), (source.batch, 1))
    )


@given(batches(), st.integers(0, 5))
def test_every_window_once_an_epoch(source: Batches, epoch: int) -> None:
    starts = np.sort(epoch_starts(source, epoch))
    assert np.all(np.diff(starts) == source.context)
    left_out = source.tokens.num_tokens - 1 - source.num_windows * source.context
    assert left_out < 2 * source.context
    assert 0 <= starts[0] <= left_out


@given(batches(), st.integers(0, 30), st.data())
def test_any_split_over_ranks_and_micro_batches_gives_the_same_rows(
    source: Batches, step: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, source.batch), max_size=6)))
    edges = [0, *cuts, source.batch]
    pieces = [source.sequences(step, begin, end) for begin, end in pairwise(edges)]
    assert np.array_equal(np.concatenate(pieces), source.sequences(step))


def test_epochs_and_seeds_differ_in_order_and_in_cuts() -> None:
    source = Batches(file_of(10_000), context=50, batch=7, seed=1)
    epochs = [epoch_starts(source, epoch) for epoch in range(20)]
    assert len({tuple(starts) for starts in epochs}) == 20
    assert len({int(starts.min()) for starts in epochs}) > 10
    other = Batches(file_of(10_000), context=50, batch=7, seed=2)
    assert not np.array_equal(epoch_starts(other, 0), epochs[0])


def test_the_order_never_changes() -> None:
    """A run resumed with another version of this package or of numpy must see the same batches."""
    source = Batches(file_of(100_000), context=64, batch=4, seed=3)
    assert source.sequences(1000)[:, 0].tolist() == [69315, 94531, 15683, 10243]
    assert Order(10, "a")(np.arange(10)).tolist() == [8, 5, 0, 1, 7, 6, 2, 4, 9, 3]
    ends = np.array([0, 1, 8_999_999_999])
    assert Order(9_000_000_000, "b")(ends).tolist() == [6601381580, 5379617621, 1404432251]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Nine billion tokens (a sparse file): the first batch comes at once."""
    import tracemalloc

    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(18 * 10**9)
    source = Batches(TokenFile.open(path), context=1024, batch=8, seed=0)
    tracemalloc.start()
    assert source.sequences(10**7).shape == (8, 1025)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_what_cannot_be_is_refused() -> None:
    short, tokens = file_of(10), file_of(100)
    for refused in (
        lambda: Batches(short, context=10, batch=1, seed=0),
        lambda: validation_sequences(short, 10, 5),
    ):
        with pytest.raises(ValueError, match=r"has 10 tokens; one sequence of context 10 needs 11"):
            refused()
    for message, refused in {
        "context is 0": lambda: Batches(tokens, context=0, batch=1, seed=0),
        "batch is 0": lambda: Batches(tokens, context=1, batch=0, seed=0),
        "limit is 0": lambda: validation_sequences(tokens, 4, 0),
    }.items():
        with pytest.raises(ValueError, match=message):
            refused()


@given(st.integers(1, 30), st.integers(1, 2000), st.integers(1, 60))
def test_validation_is_spread_evenly_and_never_empty(context: int, more: int, limit: int) -> None:
    tokens = file_of(context + more)
    sequences = validation_sequences(tokens, context, limit)
    fitting = (context + more - 1) // context
    assert sequences.shape == (min(limit, fitting), context + 1)
    starts = sequences[:, 0]
    assert np.array_equal(sequences, starts[:, None] + np.arange(context + 1))
    assert starts[0] == 0
    gaps = np.diff([*starts, fitting * context])
    assert gaps.min() >= context
    assert gaps.max() - gaps.min() <= context


def test_few_validation_sequences_are_refused_with_the_way_out() -> None:
    check_validation_size(file_of(64 * 10 + 1), 10)
    with pytest.raises(ValueError, match=r"has 63 validation sequences of context 10, .*--measure.few-valid"):
        check_validation_size(file_of(64 * 10), 10)


@given(length=st.integers(1, 1000), key=st.text(max_size=10))
def test_an_order_has_every_number_once(length: int, key: str) -> None:
    assert np.array_equal(np.sort(Order(length, key)(np.arange(length))), np.arange(length))


@pytest.mark.parametrize("length", [2, 5, 17])
def test_an_order_is_uniform(length: int) -> None:
    """Over many keys each number is at each position equally often (chi-square, 6 sigma)."""
    num_keys = 1000
    counts = np.zeros((length, length))
    for key in range(num_keys):
        counts[np.arange(length), Order(length, str(key))(np.arange(length))] += 1
    freedom = (length - 1) ** 2  # a row and a column sum to num_keys each
    statistic = ((counts - num_keys / length) ** 2 / (num_keys / length)).sum()
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom) + 10
