"""Micro-batches on a device, gathered there or on the host: bit for bit the host's rows, in order."""

from pathlib import Path

import numpy as np
import pytest
import torch

from merit_lab.data import Batches, TokenFile
from merit_lab.data.device import micro_batches

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16), ("uint32", 2**32)])
def test_the_same_batches_as_the_hosts(
    tmp_path: Path, device: str, dtype: str, largest: int, keep: bool
) -> None:
    """Over many epochs, more steps than are computed ahead, and with the largest tokens."""
    random = np.random.default_rng(0)
    random.integers(0, largest, 3001).astype(dtype).tofile(tmp_path / "tokens.bin")
    tokens = TokenFile.open(tmp_path / "tokens.bin", dtype)
    assert tokens.on(torch.device(device)) is tokens.on(torch.device(device))
    batches = Batches(tokens, context=8, batch=12, seed=5)
    for steps, rows in ((range(680, 1400), [(4, 6), (6, 8)]), (range(2), [(0, 12), (5, 5)])):
        pairs = list(micro_batches(batches, torch.device(device), steps=steps, rows=rows, keep=keep))
        wanted = [batches.sequences(step, *some) for step in steps for some in rows]
        for (inputs, targets), sequences in zip(pairs, wanted, strict=True):
            assert (inputs.device, inputs.dtype) == (torch.device(device), torch.int64)
            assert np.array_equal(inputs.cpu(), sequences[:, :-1])
            assert np.array_equal(targets.cpu(), sequences[:, 1:])
