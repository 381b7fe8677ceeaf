"""Micro-batches on a device, gathered there or on the host: bit for bit the host's rows, in order."""

from pathlib import Path

import numpy as np
import pytest
import torch

from merit_lab.data import Batches, TokenFile
from merit_lab.data.device import DeviceBatches

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16), ("uint32", 2**32)])
def test_the_same_batches_as_the_hosts(
    tmp_path: Path, device: str, dtype: str, largest: int, keep: bool
) -> None:
    """Over many epochs, for any rows, in any order of the steps, and with the largest tokens."""
    random = np.random.default_rng(0)
    random.integers(0, largest, 3001).astype(dtype).tofile(tmp_path / "tokens.bin")
    batches = Batches(TokenFile.open(tmp_path / "tokens.bin", dtype), context=8, batch=12, seed=5)
    there = DeviceBatches(batches, device, keep=keep)
    for step in (0, 3, 10_000, 681, 682, 683, 1):
        for rows in ((0, 12), (4, 6), (5, 5)):
            sequences = there.sequences(step, *rows)
            assert (sequences.device.type, sequences.dtype) == (device, torch.int64)
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
