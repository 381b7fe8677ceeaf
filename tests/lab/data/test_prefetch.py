"""The prefetcher: the batches' rows, in order; errors arrive; the thread ends."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from merit_lab.data import Batches, Prefetcher, TokenFile


@pytest.fixture
def batches(token_file: Callable[..., TokenFile]) -> Batches:
    return Batches(token_file(2000), context=8, batch=12, seed=5)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_micro_batches_of_a_rank_step_after_step(batches: Batches) -> None:
    rows = [(4, 6), (6, 8)]
    with Prefetcher(batches, device="cpu", rows=rows, first_step=3, num_steps=5, depth=3) as prefetcher:
        pairs = list(prefetcher)
    wanted = [batches.sequences(step, begin, end) for step in range(3, 8) for begin, end in rows]
    assert len(pairs) == len(wanted)
    for (inputs, targets), sequences in zip(pairs, wanted, strict=True):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert np.array_equal(inputs, sequences[:, :-1])
        assert np.array_equal(targets, sequences[:, 1:])


def test_it_works_ahead_up_to_the_depth(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = batches.sequences
    monkeypatch.setattr(batches, "sequences", lambda step, *rows: made.append(step) or original(step, *rows))
    with Prefetcher(
        batches, device="cpu", rows=[(0, 12)], first_step=0, num_steps=100, depth=3
    ) as prefetcher:
        assert settles_at(made, 3)
        next(prefetcher)
        assert settles_at(made, 4)


def settles_at(made: list[int], count: int) -> bool:
    """Whether this many are made soon, and no more a little later."""
    deadline = time.monotonic() + 10
    while len(made) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    return len(made) == count


def test_an_error_in_the_thread_reaches_the_consumer(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = batches.sequences

    def fails_at_two(step: int, begin: int, end: int) -> np.ndarray:
        if step == 2:
            raise OSError("the disk is gone")
        return original(step, begin, end)

    monkeypatch.setattr(batches, "sequences", fails_at_two)
    prefetcher = Prefetcher(batches, device="cpu", rows=[(0, 12)], first_step=0, num_steps=9)
    next(prefetcher)
    next(prefetcher)
    with pytest.raises(OSError, match="the disk is gone"):
        next(prefetcher)
    assert prefetch_threads() == []
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_closing_early_ends_the_thread(batches: Batches) -> None:
    with Prefetcher(batches, device="cpu", rows=[(0, 12)], first_step=0, num_steps=10**9) as prefetcher:
        next(prefetcher)
        assert len(prefetch_threads()) == 1
    assert prefetch_threads() == []
    prefetcher.close()
    assert list(prefetcher) == []


@pytest.mark.gpu
def test_on_a_gpu_the_same_numbers(batches: Batches) -> None:
    with Prefetcher(batches, device="cuda", rows=[(0, 12)], first_step=0, num_steps=20) as prefetcher:
        for step, (inputs, targets) in enumerate(prefetcher):
            assert inputs.is_cuda
            assert targets.is_cuda
            sequences = batches.sequences(step)
            assert np.array_equal(inputs.cpu(), sequences[:, :-1])
            assert np.array_equal(targets.cpu(), sequences[:, 1:])
