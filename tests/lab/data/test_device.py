"""Micro-batches on a device, gathered there or loaded ahead: bit for bit the host's rows, in order."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from merit_lab.data import Batches, Prefetcher, TokenFile

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16), ("uint32", 2**32)])
def test_the_same_batches_as_the_hosts(tmp_path: Path, device: str, dtype: str, largest: int) -> None:
    """Over many epochs, for any rows, in any order of the steps, and with the largest tokens."""
    random = np.random.default_rng(0)
    random.integers(0, largest, 3001).astype(dtype).tofile(tmp_path / "tokens.bin")
    batches = Batches(TokenFile.open(tmp_path / "tokens.bin", dtype), context=8, batch=12, seed=5)
    there = batches.on(device)
    for step in (0, 3, 10_000, 682, 683, 1):
        for rows in ((0, 12), (4, 6), (5, 5)):
            sequences = there.sequences(step, *rows)
            assert sequences.dtype == torch.int64
            assert np.array_equal(sequences.cpu(), batches.sequences(step, *rows))
    pairs = list(there.micro_batches(rows=[(4, 6), (6, 8)], first_step=680, num_steps=5))
    wanted = [batches.sequences(step, *rows) for step in range(680, 685) for rows in ((4, 6), (6, 8))]
    for (inputs, targets), sequences in zip(pairs, wanted, strict=True):
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert np.array_equal(inputs.cpu(), sequences[:, :-1])
        assert np.array_equal(targets.cpu(), sequences[:, 1:])
    with pytest.raises(ValueError, match="a batch has rows 0 to 12"):
        there.sequences(0, 3, 13)


def test_the_tokens_are_copied_once(tmp_path: Path) -> None:
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = TokenFile.open(tmp_path / "tokens.bin")
    assert tokens.on("cpu") is tokens.on(torch.device("cpu"))


@pytest.fixture
def batches() -> Batches:
    tokens = TokenFile(Path("memory"), np.arange(2000, dtype=np.uint16))
    return Batches(tokens, context=8, batch=12, seed=5)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("device", DEVICES)
def test_loaded_ahead_they_are_the_same(batches: Batches, device: str) -> None:
    """The micro-batches of a rank, step after step."""
    rows = [(4, 6), (6, 8)]
    wanted = batches.on(device).micro_batches(rows=rows, first_step=3, num_steps=5)
    with Prefetcher(batches, device=device, rows=rows, first_step=3, num_steps=5, depth=3) as prefetcher:
        for found, gathered in zip(prefetcher, wanted, strict=True):
            for one, other in zip(found, gathered, strict=True):
                assert one.dtype == torch.int64
                assert one.is_contiguous()
                assert one.device == other.device
                assert torch.equal(one, other)


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
