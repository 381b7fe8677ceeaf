"""The trial for the largest micro-batch that fits."""

from types import SimpleNamespace

import pytest
import torch

from merit_lab.models import LanguageModel, ModelConfig
from merit_lab.train import pool


@pytest.fixture
def memory(monkeypatch):
    """The memory of a GPU: how much there is, the share of this process, and the peak of a pass."""
    memory = SimpleNamespace(total_memory=2**40, share=1.0, peak=0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: memory.peak)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: memory.share)
    return memory


@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (0.25, False)])
def test_workers_that_share_a_gpu_have_less_room(share, fits, memory):
    memory.share, memory.peak = share, 2**39
    model = LanguageModel(ModelConfig(width=16, heads=2, layers=1, context=16, vocab_size=256))
    assert pool._fits(model, 2, torch.device("cpu"), bf16=False) == fits
